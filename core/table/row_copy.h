// Copies rows out of a table while writers go on: each row whole or not at all, with its bytes in the heap and its next
// observation, and with the checksum that a snapshot has.
#pragma once

#include <cstdint>
#include <vector>

#include "storage/new_file.h"
#include "table/cut.h"
#include "table/mutable_values.h"
#include "table/save_pipe.h"
#include "table/save_plan.h"
#include "table/table.h"

namespace sharpwave {

class RowCopy {
public:
    RowCopy(const Table& table, const SavePlan& plan, NewFile& file)
        : table_(table), layout_(table.layout()), plan_(plan), header_(plan.header), file_(file), mutables_(table) {}

    // The copies that follow go by this reach. It outlives them.
    void go_by(const std::vector<Reach>& reach) { reach_ = &reach; }

    // Where rows stand in memory as the file wants them, takes their checksums there: they need no copy. False: they
    // must be copied.
    bool check_in_place(Chunk& chunk) const;

    // Copies the chunk's rows. With `cut`: rows behind it are left out, rows of it that were written over are counted.
    void fill(Chunk& chunk, std::uint64_t block, const Reach* cut);

    // Whether rows of the cut were written over before they were copied.
    bool was_outrun() const { return missed_ > 0; }

    // Takes a row out of the file again: it was copied and came after the cut.
    void leave_out(std::uint64_t slot);

    void flush_heap();
    std::uint64_t heap_bytes() const { return heap_begin_; }  // in the file, after flush_heap()

private:
    bool is_missed(std::uint64_t slot, std::uint64_t block, const Reach& cut, std::uint64_t least) const;
    std::uint64_t copy_row(Chunk& chunk, std::uint64_t i, std::uint64_t end);
    bool copy_heap_values(std::byte* row);
    bool copy_next(std::uint64_t slot, std::uint64_t word, std::uint64_t& place);
    bool image_of_final(std::uint64_t kept, std::uint64_t serial);
    bool image_of_row(std::uint64_t slot, std::uint64_t word);
    bool image_of_waiting(std::uint64_t pair, std::uint64_t serial);
    std::uint64_t put(const std::byte* bytes, std::uint64_t count);
    void add_checksums(Chunk& chunk, bool is_plain) const;

    const Table& table_;
    const RowLayout& layout_;
    const SavePlan& plan_;
    const format::Header& header_;
    NewFile& file_;
    const MutableValues mutables_;
    const std::vector<Reach>* reach_ = nullptr;
    std::vector<std::byte> heap_;   // what is not written yet
    std::vector<std::byte> image_;  // of a final observation
    std::uint64_t heap_begin_ = 0, missed_ = 0;
};

}  // namespace sharpwave
