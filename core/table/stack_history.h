// The frames before a row that its stack is made of: whether given stacks agree with them, and which rows can no longer
// be drawn because their frames are about to be written over.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "table/row_batch.h"
#include "table/writer_place.h"

namespace sharpwave {

class StackHistory {
public:
    explicit StackHistory(WriterPlace& place) : at_(place) {}

    // Refuses stacks that the table would not give back. Each must go on from the frames added before it, or start an
    // episode: one frame, and before it the field's padding. One that starts an episode while another is open ends that
    // one: see is_reset(). The stack of a next observation must go on from that of its observation; that of an
    // episode's last row may start over instead: see starts_over(). ErrorKind::schema.
    void check(const RowBatch& batch);

    // Whether a row of the batch that was checked last starts an episode though the one before was not ended.
    bool is_reset(std::size_t row) const { return resets_[row] != 0; }

    // Whether the next observation of an episode's last row is the first one of the episode after it.
    bool starts_over(std::size_t row) const { return starts_over_[row] != 0; }

    // A client that was here before may go on in the middle of an episode, with stacks whose first frames are of rows
    // before. Such an episode starts here, and its first rows lack frames: they are kept for the rows after them.
    void expect_return() {
        returned_.assign(at_.open_rows.size(), 1);
        lacking_.assign(at_.open_rows.size(), 0);
    }

    // Whether a row of the batch that was checked last is such a one. Asked once for each row, in order, as it is
    // written.
    bool lacks_frames(std::size_t row, std::uint64_t env, bool is_end);

    // Retires the rows that lie `spare_rows` ahead of the next `count` rows, so that no more than the capacity can be
    // drawn, and the rows whose stacks reach back to the rows about to be written over.
    void retire_ahead(std::size_t count);

    // Whether the rows that a stack needs before its newest frame are still there, from `serial` backwards.
    bool is_whole(std::uint64_t serial) const;

private:
    template <class Each>
    void each_next(const RowBatch& batch, Each each) const;
    void check_next(const RowBatch& batch, const Field& field, const FieldInput& own, const FieldInput& after);
    void check_starts(const RowBatch& batch, const Field& field, const FieldInput& after) const;
    void check_field(const RowBatch& batch, const Field& field, const FieldInput& own);
    bool goes_on_from(const Field& field, std::uint64_t serial, const std::byte* newest, std::uint32_t count,
                      bool is_cut_off) const;
    void retire_one_ahead(std::size_t ahead, std::uint64_t least, std::uint64_t writers);

    WriterPlace& at_;
    std::vector<std::uint8_t> resets_, starts_over_;  // one a row of the batch
    std::vector<std::uint8_t> goes_on_;               // of a client that returned: those that lack their first frames
    std::vector<std::uint8_t> returned_;              // one an env that has no row yet since; empty: no client that did
    std::vector<std::uint32_t> lacking_;              // one an env: so many of its next rows lack frames
};

}  // namespace sharpwave
