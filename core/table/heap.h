// The heap of a block: bytes of no fixed size. Only the block's owner allocates.
//
// Values of rows stand in a chain, in the order in which they came. A lap begins at the chain's start and writes over
// the pieces of the lap before. The row that owns such a piece is lost first, so no reader can take torn bytes for its
// own; mostly it stands just ahead of the writer and was to go anyway.
//
// Final observations have places of equal size, taken again when their row is gone, so none is ever lost. The first
// free one is taken: only as many are touched as there were episode ends at one time.
#pragma once

#include <cstdint>

#include "base/crc32c.h"
#include "table/table.h"

namespace sharpwave {

class BlockHeap {
public:
    BlockHeap() = default;

    // Goes on where the block's lap stands; 0 `used` begins a new one.
    BlockHeap(Table& table, std::uint64_t block);

    // Room for `bytes` that belong to the row `owner`; returns its place in the heap region. Live rows that had to go
    // are charged to `by`.
    std::uint64_t allocate(std::uint64_t owner, std::uint64_t bytes, format::WriterRecord& by);

    // Gives the next `bytes` of the chain their space in a file.
    void ensure(std::uint64_t bytes);

    // The same for the next `count` places of final observations.
    void ensure_finals(std::uint64_t count);

    // A place for the final observation of the row `owner`, likewise.
    std::uint64_t allocate_final(std::uint64_t owner);

private:
    Table* table_ = nullptr;
    std::uint64_t block_ = 0;
    std::uint64_t used_ = 0;            // this lap's pieces end here
    std::uint64_t next_final_ = 0;      // where the search for a place begins
    std::uint64_t touched_finals_ = 0;  // places that were ever used
    std::uint64_t old_ = 0;  // and here the next piece of an earlier lap begins; the heap's end: there is none
};

// Puts the next observation of row `serial` into the heap as its final one; returns the place. `waiting` is the image
// of a waiting place; if it makes no sense (a damaged file) kNone comes back.
std::uint64_t keep_final(Table& table, BlockHeap& heap, std::uint64_t serial, const std::byte* waiting);

// Of a next observation's field: names its row too, for places are used again.
inline std::uint32_t next_checksum(std::uint64_t serial, const void* bytes, std::uint64_t count) {
    return crc32c(crc32c(0, &serial, sizeof serial), bytes, count);
}

// Ends the episodes of a writer that says no more: what waits for a row that never came becomes final. `pair` is the
// writer's first pair of waiting places.
void settle_waiting(Table& table, BlockHeap& heap, std::uint64_t pair);

// Whether that would find something to do.
bool is_waited_for(const Table& table, std::uint64_t pair);

}  // namespace sharpwave
