#include "views/stack_copy.h"

#include <cstring>
#include <vector>

namespace sharpwave {

bool StackCopy::look_back(ExampleWork& work, std::size_t position, std::uint64_t slot, std::uint64_t word,
                          std::uint64_t* frames) const {
    frames[depth_ - 1] = slot;
    bool at_start = false;
    for (std::uint32_t k = depth_ - 1; k-- > 0;) {
        if (!at_start) {
            bool gone;
            if (table_.predecessor(slot, word, gone)) {
                work.touch(position, slot, word);
            } else if (gone) {
                return false;
            } else {
                at_start = true;
            }
        }
        frames[k] = slot;
    }
    return true;
}

// The slot of frame k, oldest first. A leaf's own stack may be shorter than the longest: it is the end of it.
inline std::uint64_t StackCopy::frame_slot(const ExampleWork& work, const ViewLeaf& leaf, const std::uint64_t* slots,
                                           std::size_t i, std::uint64_t k) const {
    const std::uint64_t frames = table_.layout().fields()[leaf.field].stack;
    const std::uint64_t at = i * depth_ + (depth_ - frames) + k;
    if (leaf.role == Role::own) return frames == 1 ? slots[i] : work.own_frames[at];
    if (frames == 1) return leaf.role == Role::last ? work.last_slots[i] : work.next_slots[i];
    return work.next_frames[at];
}

void StackCopy::copy(ExampleWork& work, std::size_t leaf_index, const std::uint64_t* slots, std::size_t count,
                     const Outputs& out, bool streaming) const {
    const ViewLeaf& leaf = config_.leaves[leaf_index];
    const Field& field = table_.layout().fields()[leaf.field];
    const std::uint64_t example = field.full_bytes * field.stack;
    std::byte* flat = out.flats[leaf_index] + work.begin * example;
    if (!field.is_in_heap() && leaf.role != Role::last) return copy_rows(work, leaf, slots, count, flat, streaming);
    std::int64_t* lengths = out.lengths && out.lengths[leaf_index] ? out.lengths[leaf_index] + work.begin : nullptr;
    for (std::size_t i = 0; i < count; ++i) {
        if (work.failed[i]) continue;
        work.failed[i] = !copy_values(work, leaf, slots, i, flat + i * example, lengths ? lengths + i : nullptr);
    }
}

// Frames that are fixed fields of rows: one gather for all of them.
void StackCopy::copy_rows(ExampleWork& work, const ViewLeaf& leaf, const std::uint64_t* slots, std::size_t count,
                          std::byte* flat, bool streaming) const {
    const Field& field = table_.layout().fields()[leaf.field];
    std::vector<std::uint64_t>& all = work.stack_slots;
    all.resize(count * field.stack);
    for (std::size_t i = 0; i < count; ++i) {
        for (std::uint64_t k = 0; k < field.stack; ++k) all[i * field.stack + k] = frame_slot(work, leaf, slots, i, k);
    }
    const FieldMove move{field.offset, field.full_bytes, flat, 0};
    const Gather job{table_.view(), table_.least_word(), all.data(), &move, 1, work.ignored_words.data(), streaming};
    kernels().gather(job, 0, count * field.stack, work.ignored.data());
}

// The frames of one example, value by value. False: one of them could not be read.
bool StackCopy::copy_values(ExampleWork& work, const ViewLeaf& leaf, const std::uint64_t* slots, std::size_t i,
                            std::byte* to, std::int64_t* length) const {
    const std::vector<Field>& fields = table_.layout().fields();
    const Field& field = fields[leaf.field];
    const auto field_of = [&](std::uint64_t k) -> const Field& {
        // A stored next frame ends a stack whose other frames are observations.
        return leaf.role == Role::last && k + 1 < field.stack ? fields[leaf.older] : field;
    };
    for (std::uint64_t k = 0; k < field.stack; ++k, to += field.full_bytes) {
        if (leaf.role == Role::next && k + 1 == field.stack && work.nexts[i] != Next::row) continue;  // see NextCopy
        const std::uint64_t slot = frame_slot(work, leaf, slots, i, k);
        // The same frame just before in this stack (an episode's start) is copied, not decoded again.
        if (k > 0 && slot == frame_slot(work, leaf, slots, i, k - 1) && &field_of(k) == &field_of(k - 1)) {
            std::memcpy(to, to - field.full_bytes, field.full_bytes);
        } else if (!values_.copy(field_of(k), slot, work.bytes, to, length)) {
            return false;
        }
    }
    return true;
}

}  // namespace sharpwave
