#include "views/stack_copy.h"

#include <cstring>
#include <vector>

namespace sharpwave {

bool StackCopy::look_back(ExampleWork& work, std::size_t position, std::uint64_t slot, std::uint64_t word,
                          std::uint64_t* frames, std::uint16_t& padded) const {
    frames[depth_ - 1] = slot;
    bool at_start = false;
    padded = 0;
    for (std::uint32_t k = depth_ - 1; k-- > 0;) {
        if (!at_start) {
            bool gone;
            if (table_.predecessor(slot, word, gone)) {
                work.touch(position, slot, word);
            } else if (gone) {
                return false;
            } else {
                at_start = true;
                padded = static_cast<std::uint16_t>(k + 1);
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

// How many of the frames of a leaf are zeros, the oldest.
inline std::uint64_t StackCopy::zeros(const ExampleWork& work, const ViewLeaf& leaf, std::size_t i) const {
    const Field& field = table_.layout().fields()[leaf.field];
    if (!field.pads_zero) return 0;
    const std::uint64_t padded = leaf.role == Role::own ? work.own_padded[i] : work.next_padded[i];
    const std::uint64_t others = depth_ - field.stack;
    return padded > others ? padded - others : 0;
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
    for (std::size_t i = 0; field.pads_zero && i < count; ++i)
        std::memset(flat + i * field.full_bytes * field.stack, 0, zeros(work, leaf, i) * field.full_bytes);
}

void StackCopy::start_over(const ExampleWork& work, std::size_t leaf_index, std::size_t count,
                           const Outputs& out) const {
    const ViewLeaf& leaf = config_.leaves[leaf_index];
    const Field& field = table_.layout().fields()[leaf.field];
    const bool is_next = leaf.role == Role::next || leaf.role == Role::last;
    if (!is_next || field.stack == 1 || !out.flats[leaf_index]) return;
    const std::uint64_t bytes = field.full_bytes, older = (field.stack - 1) * bytes;
    std::byte* flat = out.flats[leaf_index] + work.begin * (older + bytes);
    for (std::size_t i = 0; i < count; ++i, flat += older + bytes) {
        if (!work.starts_over[i]) continue;
        if (field.pads_zero) {
            std::memset(flat, 0, older);
        } else {
            for (std::byte* to = flat; to < flat + older; to += bytes) std::memcpy(to, flat + older, bytes);
        }
    }
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
    const std::uint64_t zero_frames = zeros(work, leaf, i);
    std::memset(to, 0, zero_frames * field.full_bytes);
    to += zero_frames * field.full_bytes;
    for (std::uint64_t k = zero_frames; k < field.stack; ++k, to += field.full_bytes) {
        if (leaf.role == Role::next && k + 1 == field.stack && work.nexts[i] != Next::row) continue;  // see NextCopy
        const std::uint64_t slot = frame_slot(work, leaf, slots, i, k);
        // The same frame just before in this stack (an episode's start) is copied, not decoded again.
        if (k > zero_frames && slot == frame_slot(work, leaf, slots, i, k - 1) && &field_of(k) == &field_of(k - 1)) {
            std::memcpy(to, to - field.full_bytes, field.full_bytes);
        } else if (!values_.copy(field_of(k), slot, work.bytes, to, length)) {
            return false;
        }
    }
    return true;
}

}  // namespace sharpwave
