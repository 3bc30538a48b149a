// Where a writer stands: its record, the block that it fills and the open episode of each env. A writer and its parts
// (BlockClaim, StackHistory, NextObservations, HeapValues) share one. The writer's mutex guards it.
#pragma once

#include <cstdint>
#include <vector>

#include "table/heap.h"
#include "table/table.h"

namespace sharpwave {

struct WriterPlace {
    WriterPlace(Table& of, std::uint64_t record_index)
        : table(of),
          record(of.writer_record(record_index)),
          owner(static_cast<std::uint32_t>(record_index + 1)),
          open_rows(of.width(), 0) {}

    Table& table;
    format::WriterRecord& record;
    const std::uint32_t owner;  // record index plus 1
    std::uint64_t ticket = format::kNone;
    std::uint64_t block = 0;   // ticket mod blocks
    std::uint64_t head = 0;    // next row in the block
    std::uint64_t length = 0;  // rows of the block; 0: none held
    std::uint64_t origin = 0;  // of the table, when the writer last looked
    BlockHeap heap;
    // One an env: the serial plus 1 of the newest row of its open episode; 0 while none is open.
    std::vector<std::uint64_t> open_rows;

    // The number of an env's pair of waiting places: see Table::waiting().
    std::uint64_t pair_of(std::uint64_t env) const { return (owner - 1) * open_rows.size() + env; }
};

// A block that was taken for a moment. Unless keep() is called it has no owner again afterwards, also when something
// throws.
class BorrowedBlock {
public:
    BorrowedBlock(format::BlockRecord& block, bool was_taken) : block_(was_taken ? &block : nullptr) {}
    ~BorrowedBlock() {
        if (block_) block_->owner.store(0, std::memory_order_release);
    }
    BorrowedBlock(const BorrowedBlock&) = delete;
    BorrowedBlock& operator=(const BorrowedBlock&) = delete;
    void keep() { block_ = nullptr; }

private:
    format::BlockRecord* block_;
};

}  // namespace sharpwave
