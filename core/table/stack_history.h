// The frames before a row that its stack is made of: whether given stacks agree with them, and which rows can no longer
// be drawn because their frames are about to be written over.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "table/row_batch.h"
#include "table/stack_check.h"
#include "table/writer_place.h"

namespace sharpwave {

class StackHistory : private FramesBefore {
public:
    explicit StackHistory(WriterPlace& place) : at_(place), check_(place.table.layout(), place.table.width()) {}

    // See StackCheck.
    void check(const RowBatch& batch) { check_.check(batch, *this); }
    bool is_reset(std::size_t row) const { return check_.is_reset(row); }
    bool starts_over(std::size_t row) const { return check_.starts_over(row); }

    // A client may go on in the middle of an episode, with stacks whose first frames are of rows that this writer did
    // not write. Such an episode starts here, and its first rows lack frames: they are kept for the rows after them.
    void expect_episodes_inside() {
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
    bool is_open(std::uint64_t env) const override { return at_.open_rows[env] != 0; }
    bool goes_on(const Field& field, std::uint64_t env, const std::byte* newest, std::uint32_t count) const override;
    bool may_start_inside(std::uint64_t env) const override { return !returned_.empty() && returned_[env]; }
    void retire_one_ahead(std::size_t ahead, std::uint64_t least, std::uint64_t writers);

    WriterPlace& at_;
    StackCheck check_;
    std::vector<std::uint8_t> returned_;  // one an env that has no row yet since; empty: no client that did
    std::vector<std::uint32_t> lacking_;  // one an env: so many of its next rows lack frames
};

}  // namespace sharpwave
