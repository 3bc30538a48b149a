// The values of a group of rows that have no fixed size, on their way into the heap: compressed first, which may fail
// for lack of space, and put into the block's heap when nothing can fail any more.
#pragma once

#include <cstddef>
#include <vector>

#include "table/copy.h"
#include "table/row_batch.h"
#include "table/writer_place.h"

namespace sharpwave {

class HeapValues {
public:
    explicit HeapValues(WriterPlace& place) : at_(place) {}

    // Compresses the values of rows first..first+count, and gives the heap of a file the space for them.
    // ErrorKind::storage if there is none; nothing has changed then.
    void pack(const RowBatch& batch, std::size_t first, std::size_t count);

    // Puts what pack() made into the heap, and points `moves` at where it went.
    void place(std::size_t count, FieldMove* moves);

private:
    WriterPlace& at_;
    std::vector<std::byte> packed_;  // the values one after the other
    std::vector<HeapPlace> places_;  // where each stands, in packed_ and then in the heap
};

}  // namespace sharpwave
