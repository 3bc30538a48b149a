// Whether whole stacks given to an add agree with each other and with the frames added before them. The rules are the
// same for a writer, which finds those frames in its table (StackHistory), and for a packer, which remembers them
// (StackMemory).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "schema/schema.h"
#include "table/row_batch.h"

namespace sharpwave {

// What is known of the rows before a batch.
class FramesBefore {
public:
    virtual ~FramesBefore() = default;
    virtual bool is_open(std::uint64_t env) const = 0;  // an episode goes on

    // Of an open episode: whether the frame at `newest` and those before it, `count` of them, are those of its newest
    // rows. True where nothing is left to compare with.
    virtual bool goes_on(const Field& field, std::uint64_t env, const std::byte* newest, std::uint32_t count) const = 0;

    // Whether an episode may start with frames of rows that came before it.
    virtual bool may_start_inside(std::uint64_t env) const = 0;
};

class StackCheck {
public:
    // The layout must live as long.
    StackCheck(const RowLayout& layout, std::uint64_t width) : layout_(layout), width_(width) {}

    // Refuses stacks that a table would not give back. Each must go on from the frames added before it, or start an
    // episode: one frame, and before it the field's padding. One that starts an episode while another is open ends that
    // one: see is_reset(). The stack of a next observation must go on from that of its observation; that of an
    // episode's last row may start over instead: see starts_over(). ErrorKind::schema. The batch is of whole steps.
    void check(const RowBatch& batch, const FramesBefore& before);

    // Of the batch that was checked last: whether a row starts an episode though the one before was not ended; whether
    // the next observation of an episode's last row is the first one of the episode after it; whether a row starts an
    // episode with frames of rows before.
    bool is_reset(std::size_t row) const { return resets_[row] != 0; }
    bool starts_over(std::size_t row) const { return starts_over_[row] != 0; }
    bool starts_inside(std::size_t row) const { return starts_inside_[row] != 0; }

private:
    template <class Each>
    void each_next(const RowBatch& batch, Each each) const;
    void check_next(const RowBatch& batch, const Field& field, const FieldInput& own, const FieldInput& after);
    void check_starts(const RowBatch& batch, const Field& field, const FieldInput& after) const;
    void check_field(const RowBatch& batch, const Field& field, const FieldInput& own, const FramesBefore& before);

    const RowLayout& layout_;
    const std::uint64_t width_;
    std::vector<std::uint8_t> resets_, starts_over_, starts_inside_;  // one a row of the batch
};

// Whether the stack that ends with the frame at `newest` is the first one of an episode.
bool is_first_stack(const Field& field, const std::byte* newest, std::uint32_t frames);

}  // namespace sharpwave
