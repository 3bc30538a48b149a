#include "table/stack_check.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/error.h"

namespace sharpwave {

namespace {

[[noreturn]] void refuse(const Field& field, const char* what, const char* mend) {
    throw Error(ErrorKind::schema, "add(): field '" + field.name + "': " + what + "; " + mend);
}

bool ends_episode(const RowBatch& batch, std::size_t i) {
    return batch.flags && (batch.flags[i] & (kRowTerminated | kRowTruncated));
}

// The row of the same env before row i in this batch; i itself where there is none.
std::size_t row_before(const RowBatch& batch, std::size_t i, std::size_t width) {
    for (std::size_t j = i; j >= width;) {
        j -= width;
        if (!is_void(batch, j)) return j;
    }
    return i;
}

}  // namespace

bool is_first_stack(const Field& field, const std::byte* newest, std::uint32_t frames) {
    const std::uint64_t bytes = field.full_bytes, older = (frames - 1) * bytes;
    const std::byte* oldest = newest - older;
    if (field.pads_zero) return std::all_of(oldest, newest, [](std::byte item) { return item == std::byte{0}; });
    return std::memcmp(oldest, oldest + bytes, older) == 0;  // each frame equals the one after it
}

// Calls each(field, input of the observation, input of the next one) for the fields that have both.
template <class Each>
void StackCheck::each_next(const RowBatch& batch, Each each) const {
    const std::vector<Field>& fields = layout_.fields();
    std::size_t next = 0;
    for (std::size_t f = 0; f < fields.size(); ++f) {
        const Field& field = fields[f];
        if (field.gives_next) each(field, batch.fields[f], batch.next[next++]);
        if (field.follows >= 0) each(field, batch.fields[static_cast<std::size_t>(field.follows)], batch.fields[f]);
    }
}

void StackCheck::check(const RowBatch& batch, const FramesBefore& before) {
    const std::vector<Field>& fields = layout_.fields();
    resets_.assign(batch.rows, 0);
    starts_over_.assign(batch.rows, 0);
    starts_inside_.assign(batch.rows, 0);
    each_next(batch, [&](const Field& field, const FieldInput& own, const FieldInput& after) {
        check_next(batch, field, own, after);
    });
    if (std::any_of(starts_over_.begin(), starts_over_.end(), [](std::uint8_t starts) { return starts != 0; })) {
        each_next(batch, [&](const Field& field, const FieldInput&, const FieldInput& after) {
            check_starts(batch, field, after);
        });
    }
    for (std::size_t f = 0; f < fields.size(); ++f) {
        if (fields[f].follows < 0 && batch.fields[f].frames > 1) check_field(batch, fields[f], batch.fields[f], before);
    }
}

void StackCheck::check_next(const RowBatch& batch, const Field& field, const FieldInput& own, const FieldInput& after) {
    if (own.frames <= 1 || after.frames <= 1) return;
    const std::uint64_t older = (own.frames - 1) * field.full_bytes;
    for (std::size_t i = 0; i < batch.rows; ++i) {
        if (is_void(batch, i)) continue;
        const std::byte *now = own.flat + i * own.stride, *then = after.flat + i * after.stride;
        if (std::memcmp(then - older, now - older + field.full_bytes, older) == 0) continue;
        if (!is_first_stack(field, then, after.frames)) {
            refuse(field, "the stack of next_obs does not go on from that of obs",
                   "its frames but the newest must be obs' frames but the oldest; pass single frames");
        }
        if (!ends_episode(batch, i)) {
            refuse(field, "the stack of next_obs starts an episode, and its row does not end one",
                   "give done=True or truncated=True with the last row before a reset");
        }
        starts_over_[i] = 1;
    }
}

// The stacks of one row start over together.
void StackCheck::check_starts(const RowBatch& batch, const Field& field, const FieldInput& after) const {
    for (std::size_t i = 0; after.frames > 1 && i < batch.rows; ++i) {
        if (!starts_over_[i] || is_first_stack(field, after.flat + i * after.stride, after.frames)) continue;
        refuse(field, "the stack of next_obs goes on from that of obs, and another field's starts an episode",
               "give the next observation of one episode in all fields");
    }
}

void StackCheck::check_field(const RowBatch& batch, const Field& field, const FieldInput& own,
                             const FramesBefore& before) {
    const std::uint64_t bytes = field.full_bytes, older = (own.frames - 1) * bytes;
    for (std::size_t i = 0; i < batch.rows; ++i) {
        if (is_void(batch, i)) continue;
        const std::byte* newest = own.flat + i * own.stride;
        const std::size_t last = row_before(batch, i, width_);
        const std::uint64_t env = i % width_;
        const bool starts = last != i ? ends_episode(batch, last) : !before.is_open(env);
        const bool goes_on =
            !starts &&
            (last != i ? std::memcmp(newest - older, own.flat + last * own.stride - older + bytes, older) == 0
                       : before.goes_on(field, env, newest - bytes, own.frames - 1));
        if (goes_on) continue;
        const bool is_first = is_first_stack(field, newest, own.frames);
        if (!is_first && starts && last == i && before.may_start_inside(env)) {
            starts_inside_[i] = 1;
            continue;
        }
        if (!is_first && starts && field.pads_zero) {
            refuse(field, "the stack that starts an episode holds frames before the first that are not zero",
                   "the field has padding='zero': give padding='repeat', pass single frames, or pad that way");
        }
        if (!is_first && starts) {
            refuse(field, "the stack that starts an episode holds different frames",
                   "the field has padding='repeat', its first frame over and over: give padding='zero' if the others "
                   "are zero, pass single frames, or pad that way");
        }
        if (!is_first) {
            refuse(field, "the stack does not go on from the frames added before",
                   "end an episode with truncated=True before a jump, or pass single frames");
        }
        resets_[i] |= !starts;
    }
}

}  // namespace sharpwave
