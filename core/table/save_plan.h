// What a snapshot will hold, decided before a row is copied: which blocks, how many slots, and where each region stands
// in the file. An increment holds the blocks that have changed since a whole snapshot, its base.
#pragma once

#include <cstdint>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "storage/format.h"
#include "storage/new_file.h"
#include "table/cut.h"
#include "table/table.h"

namespace sharpwave {

// Bytes aligned as records are in a table: they are looked at as records.
template <class Value>
struct RecordAllocator {
    using value_type = Value;
    RecordAllocator() = default;
    template <class Other>
    RecordAllocator(const RecordAllocator<Other>&) {}
    Value* allocate(std::size_t count) {
        return static_cast<Value*>(::operator new(count * sizeof(Value), std::align_val_t{128}));
    }
    void deallocate(Value* place, std::size_t) { ::operator delete(place, std::align_val_t{128}); }
    bool operator==(const RecordAllocator&) const { return true; }
};
using RecordBytes = std::vector<std::byte, RecordAllocator<std::byte>>;

class SavePlan {
public:
    // `slack`: rows that may come before the cut.
    SavePlan(const Table& table, const std::optional<format::Header>& base, const std::string& base_path,
             std::uint64_t slack);
    ~SavePlan();
    SavePlan(const SavePlan&) = delete;
    SavePlan& operator=(const SavePlan&) = delete;

    // Nothing but a share of the blocks has changed.
    bool is_small() const { return dirty.size() * 2 <= table_.blocks(); }

    // Where a row stands in the file. Its block is in the plan.
    std::uint64_t place_of_row(std::uint64_t block, std::uint64_t slot) const {
        return header.regions[format::kRows].offset +
               (place_of[block] + slot - block * table_.block_rows()) * header.row_bytes;
    }

    // The same for its mutable values.
    std::uint64_t place_of_mutables(std::uint64_t block, std::uint64_t slot) const {
        return header.regions[format::kMutables].offset +
               (place_of[block] + slot - block * table_.block_rows()) * table_.layout().mutable_bytes();
    }

    // Whether rows of the cut stand behind the slots that were planned for.
    bool is_outgrown(const Cut& cut) const;

    // Copies the columns of blocks that stay in the base.
    void copy_columns_of_base(NewFile& file) const;

    format::Header header{};
    std::uint64_t slots = 0;
    std::vector<std::uint64_t> dirty;     // blocks in the file
    std::vector<std::uint64_t> place_of;  // one a block: where its rows begin there; kNone: not in it
    std::vector<Reach> clean;             // one a block: what the base holds of it

private:
    void choose_blocks(bool has_base, std::uint64_t slack);
    void place_regions(const std::optional<format::Header>& base);
    void read_base(const format::Header& base);

    const Table& table_;
    std::string base_path_;
    std::optional<format::Header> base_;
    int base_fd_ = -1;
    std::uint64_t rows_ = 0;  // in the file
};

}  // namespace sharpwave
