// The next observations of rows whose successor has not been added, where next observations are derived.
//
// The next observation of an env's newest row waits in one of two places of the writer's record, outside the rows. It
// is dropped when the env's next row arrives and shows the same observation. Where the next row shows another one, or
// the episode ends, it moves into the heap as a final observation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "table/row_batch.h"
#include "table/writer_place.h"

namespace sharpwave {

class NextObservations {
public:
    explicit NextObservations(WriterPlace& place)
        : at_(place),
          is_derived_(place.table.layout().gives_next()),
          halves_(is_derived_ ? place.table.width() : 0, 0),
          image_(place.table.header().waiting_bytes) {}

    // Gives a file the space that the next `count` rows may need. ErrorKind::storage if there is none; nothing has
    // changed then.
    void ensure_space(std::size_t count);

    // The row in `slot` is about to be written over. The row before it may take its next observation from there: with
    // several writers it may stand in a block that the ring passed over. Then it gets a final observation in `heap`.
    void leave_to_previous(std::uint64_t slot, BlockHeap& heap);

    // Compares what an env shows now with what was said to come next. If they differ the episode was reset without a
    // flag: see end_unflagged().
    void meet_previous(const RowBatch& batch, std::size_t row, std::uint64_t env);

    // Ends an env's open episode as truncated, because its next row starts another one and no flag said so. The last
    // row keeps its next observation, and the reset is counted.
    void end_unflagged(std::uint64_t env);

    // Puts a row's next observation where it will be found: into the heap where the row ends its episode, else into the
    // waiting place that its predecessor does not use, so that at every instant both rows have theirs.
    void keep(const RowBatch& batch, std::size_t row, std::uint64_t env, std::uint64_t slot, std::uint64_t serial,
              std::uint64_t& flags);

private:
    bool copy_observation(std::uint64_t slot);

    WriterPlace& at_;
    const bool is_derived_;
    std::vector<std::uint8_t> halves_;  // one an env: which of its two waiting places is the newer
    std::vector<std::byte> image_;      // of a waiting place
};

}  // namespace sharpwave
