#include "views/transitions.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>

#include "base/error.h"
#include "base/workers.h"
#include "table/codec.h"

namespace sharpwave {

using namespace format;

namespace {

// From here on a copy is worth waking other threads for, and its outputs are worth keeping out of the caches.
constexpr std::uint64_t kParallelBytes = 512 << 10;
constexpr std::uint64_t kStreamingBytes = 4 << 20;
// Decompression is dearer than copying.
constexpr std::uint64_t kParallelHeapBytes = 64 << 10;

// Where an example's next observation is.
enum class Next : std::uint8_t { row, final_place, waiting };

bool is_summed(const Field& field) { return field.dtype == "<f4" || field.dtype == "<f8"; }

}  // namespace

// What one part of a batch needs besides its outputs; kept between calls.
struct Transitions::Work {
    struct Touched {
        std::uint32_t position;
        std::uint64_t slot, word;
    };
    struct Step {
        std::uint64_t last_slot, last_word;
        std::uint64_t next_slot;
        Next next;
    };
    std::vector<Touched> touched;                        // rows read for the examples
    std::vector<Step> steps;                             // one a position
    std::vector<std::uint64_t> own_frames, next_frames;  // stack slots a position
    std::vector<std::uint64_t> last_slots, next_slots, stack_slots;
    std::vector<std::uint64_t> ignored_words;
    std::vector<std::uint32_t> ignored;
    std::vector<std::byte> bytes;
    std::vector<bool> failed;
    std::size_t begin = 0;

    std::uint64_t* words = nullptr;
};

Transitions::Transitions(const Table& table, ViewConfig config) : table_(table), config_(std::move(config)) {
    const std::vector<Field>& fields = table.layout().fields();
    is_plain_ = config_.n_step == 1;
    for (std::size_t i = 0; i < config_.leaves.size(); ++i) {
        const ViewLeaf& leaf = config_.leaves[i];
        const Field& field = fields.at(leaf.field);
        example_bytes_ += leaf_bytes(leaf);
        stack_ = std::max(stack_, field.stack);
        derives_ = derives_ || leaf.role == Role::next;
        is_plain_ = is_plain_ && leaf.role != Role::next && field.stack == 1 && !field.is_in_heap();
        if (leaf.role != Role::reward) continue;
        reward_ = static_cast<int>(i);
        if (config_.n_step > 1 && (!is_summed(field) || field.is_in_heap() || field.stack > 1)) {
            throw Error(
                ErrorKind::schema,
                "field '" + field.name + "': n_step > 1 sums it: expected float32 or float64, got " + field.dtype);
        }
    }
    for (std::uint32_t k = 0; k <= config_.n_step; ++k) powers_.push_back(std::pow(config_.gamma, k));
}

std::uint64_t Transitions::leaf_bytes(const ViewLeaf& leaf) const {
    const Field& field = table_.layout().fields()[leaf.field];
    return field.full_bytes * field.stack;
}

std::size_t Transitions::gather(const std::uint64_t* slots, std::size_t begin, std::size_t end, const Outputs& out,
                                std::uint64_t* words, std::uint32_t* missed, bool single) const {
    const std::uint64_t bytes = (end - begin) * example_bytes_;
    const std::uint64_t limit = table_.layout().uses_heap() ? kParallelHeapBytes : kParallelBytes;
    if (bytes < limit || end - begin == 1) return gather_part(slots, begin, end, out, words, missed, single);
    std::mutex mutex;
    std::size_t total = 0;
    in_parallel(end - begin, [&](std::size_t from, std::size_t to) {
        std::vector<std::uint32_t> own(to - from);
        const std::size_t misses = gather_part(slots, begin + from, begin + to, out, words, own.data(), single);
        if (misses == 0) return;
        std::lock_guard<std::mutex> guard(mutex);
        std::copy_n(own.data(), misses, missed + total);
        total += misses;
    });
    return total;
}

std::size_t Transitions::gather_part(const std::uint64_t* slots, std::size_t begin, std::size_t end, const Outputs& out,
                                     std::uint64_t* words, std::uint32_t* missed, bool single) const {
    const std::vector<Field>& fields = table_.layout().fields();
    const std::size_t leaf_count = config_.leaves.size();
    const bool streaming = (end - begin) * example_bytes_ >= kStreamingBytes;
    FieldMove few[32];
    std::vector<FieldMove> many;
    FieldMove* moves = few;
    if (leaf_count > 32) moves = (many.resize(leaf_count), many.data());
    const auto run = [&](const std::uint64_t* from, std::size_t move_count, std::size_t first, std::size_t last,
                         std::uint64_t* seen, std::uint32_t* bad) {
        const Gather job{table_.view(), table_.least_word(), from, moves, move_count, seen, streaming};
        return kernels().gather(job, first, last, bad);
    };
    if (is_plain_ || (single && !derives_ && stack_ == 1 && !table_.layout().uses_heap())) {
        for (std::size_t i = 0; i < leaf_count; ++i) {
            const Field& field = fields[config_.leaves[i].field];
            moves[i] = {field.offset, field.bytes, out.flats[i]};
        }
        return run(slots, leaf_count, begin, end, words, missed);
    }

    thread_local Work work;
    const std::size_t count = end - begin;
    const std::uint32_t n_step = single ? 1 : config_.n_step;
    work.touched.clear();
    work.begin = begin;
    work.words = words;
    work.steps.resize(count);
    work.failed.assign(count, false);
    work.last_slots.resize(count);
    work.next_slots.resize(count);
    if (stack_ > 1) {
        work.own_frames.resize(count * stack_);
        work.next_frames.resize(count * stack_);
    }
    constexpr std::size_t kAhead = 8;
    for (std::size_t i = 0; i < std::min(count, kAhead); ++i) prefetch(slots[begin + i]);
    for (std::size_t i = 0; i < count; ++i) {
        if (i + kAhead < count) prefetch(slots[begin + i + kAhead]);
        words[begin + i] =
            std::atomic_ref<std::uint64_t>(table_.word(slots[begin + i])).load(std::memory_order_acquire);
        work.steps[i].last_slot = slots[begin + i];
        if (!walk(work, i, n_step, out)) {
            // A place of its own stands in for what is not there; the position is reported as missed.
            work.failed[i] = true;
            work.steps[i] = {slots[begin + i], words[begin + i], slots[begin + i], Next::row};
            for (std::uint32_t k = 0; stack_ > 1 && k < stack_; ++k) {
                work.own_frames[i * stack_ + k] = work.next_frames[i * stack_ + k] = slots[begin + i];
            }
        }
        work.last_slots[i] = work.steps[i].last_slot;
        work.next_slots[i] = work.steps[i].next_slot;
    }

    // Fixed fields, by where they come from. The kernels' own checks are not asked: every row read is checked below.
    work.ignored.resize(count * stack_);
    work.ignored_words.resize(count * stack_);
    const auto copy_fixed = [&](Role role, const std::uint64_t* from) {
        std::size_t move_count = 0;
        for (std::size_t i = 0; i < leaf_count; ++i) {
            const ViewLeaf& leaf = config_.leaves[i];
            const Field& field = fields[leaf.field];
            Role effective = leaf.role == Role::reward ? (n_step > 1 ? Role::reward : Role::own) : leaf.role;
            if (effective != role || field.stack > 1 || field.is_in_heap()) continue;
            moves[move_count++] = {field.offset, field.bytes, out.flats[i] + begin * field.bytes};
        }
        if (move_count) run(from, move_count, 0, count, work.ignored_words.data(), work.ignored.data());
    };
    copy_fixed(Role::own, slots + begin);
    copy_fixed(Role::last, work.last_slots.data());
    copy_fixed(Role::next, work.next_slots.data());
    for (std::size_t i = 0; i < leaf_count; ++i) {
        const ViewLeaf& leaf = config_.leaves[i];
        const Field& field = fields[leaf.field];
        if (field.stack == 1 && !field.is_in_heap()) continue;
        copy_stacks(work, i, slots + begin, count, out, streaming);
    }
    for (std::size_t i = 0; i < count; ++i) {
        if (derives_ && !work.failed[i] && work.steps[i].next != Next::row && !copy_next(work, i, out)) {
            work.failed[i] = true;
        }
    }
#if !defined(SHARPWAVE_TSAN)
    std::atomic_thread_fence(std::memory_order_acquire);
#endif
    for (const Work::Touched& row : work.touched) {
        const std::uint64_t again =
            std::atomic_ref<std::uint64_t>(table_.word(row.slot)).load(std::memory_order_acquire);
        // Flags may change after the commit, but an end that came since would have ended the example earlier.
        const std::uint64_t fixed = ~kFlagMask | kHasFinalObservation;
        if ((again ^ row.word) & fixed) work.failed[row.position] = true;
    }
    std::size_t misses = 0;
    for (std::size_t i = 0; i < count; ++i) {
        if (work.failed[i]) missed[misses++] = static_cast<std::uint32_t>(begin + i);
    }
    return misses;
}

void Transitions::prefetch(std::uint64_t slot) const {
    const std::uint64_t stride = table_.header().row_bytes;
    if (stride > 1024) return table_.prefetch(slot);
    const std::byte* row = table_.view().rows + slot * stride;
    // The rows after it are its successors, or near them.
    const std::uint64_t reach = std::min<std::uint64_t>(stride * (config_.n_step + (derives_ ? 1 : 0)), 1024);
    for (std::uint64_t line = 0; line < reach; line += 64) __builtin_prefetch(row + line);
}

// Follows the example's steps from its first row on: sums rewards, finds the last row and what comes after it, and the
// frames of both stacks. False: something is missing.
bool Transitions::walk(Work& work, std::size_t position, std::uint32_t n_step, const Outputs& out) const {
    const std::size_t place = work.begin + position;
    std::uint64_t slot = work.steps[position].last_slot, word = work.words[place];
    if (!is_live(word, table_.least_word())) return false;
    const auto touch = [&](std::uint64_t at, std::uint64_t seen) {
        work.touched.push_back({static_cast<std::uint32_t>(position), at, seen});
    };
    touch(slot, word);
    if (stack_ > 1 && !look_back(work, position, slot, word, &work.own_frames[position * stack_])) return false;

    std::uint32_t steps = 1;
    if (n_step > 1) {
        const Field* field = reward_ < 0 ? nullptr : &table_.layout().fields()[config_.leaves[reward_].field];
        const std::uint64_t items = field ? field->bytes / field->item_bytes : 0;
        double first_sum = 0;
        std::vector<double>* sums = nullptr;
        thread_local std::vector<double> many_sums;
        if (items > 1) {
            many_sums.assign(items, 0.0);
            sums = &many_sums;
        }
        const auto add_reward = [&](std::uint64_t at, double factor) {
            if (!field) return;
            const std::byte* from = table_.view().rows + at * table_.header().row_bytes + field->offset;
            for (std::uint64_t k = 0; k < items; ++k) {
                double value;
                if (field->item_bytes == 4) {
                    float narrow;
                    racy_copy(reinterpret_cast<std::byte*>(&narrow), from + 4 * k, 4);
                    value = narrow;
                } else {
                    racy_copy(reinterpret_cast<std::byte*>(&value), from + 8 * k, 8);
                }
                (sums ? (*sums)[k] : first_sum) += factor * value;
            }
        };
        add_reward(slot, 1.0);
        while (steps < n_step) {
            const auto next = table_.successor(word);
            if (!next) break;
            slot = *next;
            touch(slot, word);
            add_reward(slot, powers_[steps]);
            ++steps;
        }
        for (std::uint64_t k = 0; k < items; ++k) {
            const double sum = sums ? (*sums)[k] : first_sum;
            std::byte* to = out.flats[reward_] + place * field->bytes + k * field->item_bytes;
            if (field->item_bytes == 4) {
                const float narrow = static_cast<float>(sum);
                std::memcpy(to, &narrow, 4);
            } else {
                std::memcpy(to, &sum, 8);
            }
        }
    }
    if (out.discounts) out.discounts[place] = static_cast<float>(powers_[steps]);

    Work::Step& step = work.steps[position];
    step = {slot, word, slot, Next::row};
    if (derives_) {
        if (word & kHasFinalObservation) {
            step.next = Next::final_place;
        } else {
            std::uint64_t next_word = word;
            if (const auto next = table_.successor(next_word)) {
                step.next_slot = *next;
                touch(*next, next_word);
            } else {
                step.next = Next::waiting;
            }
        }
    }
    if (stack_ > 1) {
        // The stack after the last step: its frames but the oldest, then the next frame, put in by whoever copies it.
        std::uint64_t* frames = &work.next_frames[position * stack_];
        std::uint64_t whole[256];
        if (steps == 1) {
            std::copy_n(&work.own_frames[position * stack_], stack_, whole);
        } else if (!look_back(work, position, slot, word, whole)) {
            return false;
        }
        std::copy_n(whole + 1, stack_ - 1, frames);
        frames[stack_ - 1] = step.next_slot;
    }
    return true;
}

// The slots of the stack that ends in a row, oldest first; an episode's start stands for what was before it.
bool Transitions::look_back(Work& work, std::size_t position, std::uint64_t slot, std::uint64_t word,
                            std::uint64_t* frames) const {
    frames[stack_ - 1] = slot;
    bool at_start = false;
    for (std::uint32_t k = stack_ - 1; k-- > 0;) {
        if (!at_start) {
            bool gone;
            if (const auto before = table_.predecessor(word, gone)) {
                slot = *before;
                work.touched.push_back({static_cast<std::uint32_t>(position), slot, word});
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

// One leaf that is stacked or in the heap, for all positions.
void Transitions::copy_stacks(Work& work, std::size_t leaf_index, const std::uint64_t* slots, std::size_t count,
                              const Outputs& out, bool streaming) const {
    const ViewLeaf& leaf = config_.leaves[leaf_index];
    const Field& field = table_.layout().fields()[leaf.field];
    const std::vector<Field>& fields = table_.layout().fields();
    const std::uint64_t frame = field.full_bytes, depth = field.stack;
    std::byte* flat = out.flats[leaf_index] + work.begin * frame * depth;
    std::int64_t* lengths = out.lengths && out.lengths[leaf_index] ? out.lengths[leaf_index] + work.begin : nullptr;

    // Slot and field of each frame. A leaf's own stack may be shorter than the longest: it is the end of it.
    const auto frame_slot = [&](std::size_t i, std::uint64_t k) {
        const std::uint64_t at = i * stack_ + (stack_ - depth) + k;
        if (leaf.role == Role::own) return depth == 1 ? slots[i] : work.own_frames[at];
        if (depth == 1) return leaf.role == Role::last ? work.last_slots[i] : work.next_slots[i];
        return work.next_frames[at];
    };
    const auto frame_field = [&](std::uint64_t k) -> const Field& {
        // A stored next frame ends a stack whose other frames are observations.
        return leaf.role == Role::last && k + 1 < depth ? fields[leaf.older] : field;
    };
    if (!field.is_in_heap() && leaf.role != Role::last) {
        std::vector<std::uint64_t>& all = work.stack_slots;
        all.resize(count * depth);
        for (std::size_t i = 0; i < count; ++i) {
            for (std::uint64_t k = 0; k < depth; ++k) all[i * depth + k] = frame_slot(i, k);
        }
        const FieldMove move{field.offset, frame, flat};
        const Gather job{table_.view(), table_.least_word(), all.data(), &move, 1, work.ignored_words.data(),
                         streaming};
        kernels().gather(job, 0, count * depth, work.ignored.data());
        return;
    }
    for (std::size_t i = 0; i < count; ++i) {
        if (work.failed[i]) continue;
        for (std::uint64_t k = 0; k < depth; ++k) {
            std::byte* to = flat + (i * depth + k) * frame;
            const std::uint64_t slot = frame_slot(i, k);
            const bool elsewhere = leaf.role == Role::next && k + 1 == depth && work.steps[i].next != Next::row;
            if (elsewhere) continue;
            // The same frame just before in this stack (an episode's start) is copied, not decoded again.
            if (k > 0 && slot == frame_slot(i, k - 1) && &frame_field(k) == &frame_field(k - 1)) {
                std::memcpy(to, to - frame, frame);
                continue;
            }
            if (!copy_value(work, frame_field(k), slot, to, lengths ? lengths + i : nullptr)) {
                work.failed[i] = true;
                break;
            }
        }
    }
}

// One value, wherever it is. False: its bytes are not, or no longer, what the row says.
bool Transitions::copy_value(Work& work, const Field& field, std::uint64_t slot, std::byte* to,
                             std::int64_t* length) const {
    const std::byte* row = table_.view().rows + slot * table_.header().row_bytes + field.offset;
    if (!field.is_in_heap()) {
        racy_copy(to, row, field.full_bytes);
        return true;
    }
    HeapPlace place;
    racy_copy(reinterpret_cast<std::byte*>(&place), row, sizeof place);
    const std::uint64_t heap = table_.header().regions[kHeap].bytes;
    if (place.offset > heap || place.kept_bytes > heap - place.offset || place.value_bytes > field.full_bytes)
        return false;
    std::atomic_ref<std::uint64_t> word(table_.word(slot));
    const std::uint64_t before = word.load(std::memory_order_acquire);
    if (work.bytes.size() < place.kept_bytes) work.bytes.resize(place.kept_bytes);
    racy_copy(work.bytes.data(), table_.region(kHeap) + place.offset, place.kept_bytes);
#if !defined(SHARPWAVE_TSAN)
    std::atomic_thread_fence(std::memory_order_acquire);
#endif
    // Torn input is never decoded.
    if ((word.load(std::memory_order_acquire) ^ before) & ~kFlagMask) return false;
    if (state_of(before) != kCommitted) return false;
    if (!decode(work.bytes.data(), place.kept_bytes, to, place.value_bytes)) return false;
    return finish_value(field, to, place.value_bytes, length);
}

bool Transitions::finish_value(const Field& field, std::byte* to, std::uint64_t value_bytes,
                               std::int64_t* length) const {
    if (!field.is_ragged) return value_bytes == field.full_bytes;
    std::memset(to + value_bytes, 0, field.full_bytes - value_bytes);
    if (length) *length = static_cast<std::int64_t>(value_bytes / field.item_row_bytes());
    return true;
}

// A next observation that no row holds: an episode's last one, or that of the newest row.
bool Transitions::copy_next(Work& work, std::size_t position, const Outputs& out) const {
    const Work::Step& step = work.steps[position];
    const std::uint64_t image_bytes = table_.layout().final_bytes();
    work.bytes.resize(std::max<std::size_t>(work.bytes.size(), 2 * image_bytes));
    std::byte* image = work.bytes.data();
    const std::uint64_t place =
        std::atomic_ref<std::uint64_t>(table_.final_place(step.last_slot)).load(std::memory_order_acquire);
    if (step.next == Next::final_place) {
        const std::uint64_t heap = table_.header().regions[kHeap].bytes;
        if (place > heap || image_bytes > heap - place) return false;
        racy_copy(image, table_.region(kHeap) + place, image_bytes);
    } else {
        if (place >= table_.max_writers() * table_.width()) return false;
        bool found = false;
        for (std::uint64_t half = 0; half < 2 && !found; ++half) {
            std::byte* from = table_.waiting(place, half);
            std::atomic_ref<std::uint64_t> tag(*reinterpret_cast<std::uint64_t*>(from));
            if (tag.load(std::memory_order_acquire) != serial_of(step.last_word) + 1) continue;
            racy_copy(image, from + kWaitingHead, image_bytes);
#if !defined(SHARPWAVE_TSAN)
            std::atomic_thread_fence(std::memory_order_acquire);
#endif
            found = tag.load(std::memory_order_acquire) == serial_of(step.last_word) + 1;
        }
        if (!found) return false;
    }
    // The row must still say the same before its image is decoded.
    const std::uint64_t again =
        std::atomic_ref<std::uint64_t>(table_.word(step.last_slot)).load(std::memory_order_acquire);
    if ((again ^ step.last_word) & (~kFlagMask | kHasFinalObservation)) return false;
    const std::vector<Field>& fields = table_.layout().fields();
    std::uint64_t at = 0;
    for (std::size_t f = 0; f < fields.size(); ++f) {
        const Field& field = fields[f];
        if (!field.gives_next) continue;
        FinalValue value;
        if (at + sizeof value > image_bytes) return false;
        std::memcpy(&value, image + at, sizeof value);
        at += sizeof value;
        if (value.kept_bytes > image_bytes - at || value.value_bytes > field.full_bytes) return false;
        for (std::size_t i = 0; i < config_.leaves.size(); ++i) {
            const ViewLeaf& leaf = config_.leaves[i];
            if (leaf.role != Role::next || leaf.field != f) continue;
            const std::size_t example = work.begin + position;
            std::byte* to = out.flats[i] + (example * field.stack + field.stack - 1) * field.full_bytes;
            if (!decode(image + at, value.kept_bytes, to, value.value_bytes)) return false;
            std::int64_t* length = out.lengths && out.lengths[i] ? out.lengths[i] + example : nullptr;
            if (!finish_value(field, to, value.value_bytes, length)) return false;
        }
        const std::uint64_t room = step.next == Next::final_place ? value.kept_bytes : field.full_bytes;
        at += (room + 15) / 16 * 16;
    }
    return true;
}

}  // namespace sharpwave
