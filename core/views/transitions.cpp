#include "views/transitions.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>
#include <utility>

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

// Flags may change after the commit, but an end that came since would have ended the example earlier.
constexpr std::uint64_t kFixed = ~kFlagMask | kHasFinalObservation;

constexpr std::size_t kMostWanted = 16;  // lines of an example: eight steps or so
constexpr std::size_t kMostStepFields = 16;
constexpr std::size_t kPiece = 64;

// Where an example's next observation is.
enum class Next : std::uint8_t { row, final_place, waiting };

std::uint64_t load_word(const Table& table, std::uint64_t slot) {
    return std::atomic_ref<std::uint64_t>(table.word(slot)).load(std::memory_order_acquire);
}

bool is_summed(const Field& field) {
    return (field.dtype == "<f4" && field.item_bytes == 4) || (field.dtype == "<f8" && field.item_bytes == 8);
}

}  // namespace

// What one part of a batch needs besides its outputs; kept between calls.
struct Transitions::Work {
    static Work& of_this_thread() {
        thread_local Work kept;
        return kept;
    }
    // The rows read for the examples, to be looked at once more at the end: room for all that they may touch.
    std::vector<Touched> touched;
    std::size_t touched_count = 0;
    std::vector<std::uint64_t> last_slots, last_words, next_slots;  // one a position
    std::vector<Next> nexts;
    std::vector<std::uint8_t> failed;
    std::vector<std::uint64_t> own_frames, next_frames;  // the slots of a stack a position
    std::vector<std::uint64_t> stack_slots, ignored_words;
    std::vector<std::uint32_t> ignored;
    std::vector<std::byte> bytes;
    std::size_t begin = 0;
    std::uint64_t* words = nullptr;

    void touch(std::size_t position, std::uint64_t slot, std::uint64_t word) {
        touched[touched_count++] = {slot, word, position};
    }
    void make_room(std::size_t count, std::size_t rows_each, std::size_t stack) {
        if (failed.size() < count) {
            last_slots.resize(count);
            last_words.resize(count);
            next_slots.resize(count);
            nexts.resize(count);
            failed.resize(count);
        }
        if (touched.size() < count * rows_each) touched.resize(count * rows_each);
        if (ignored.size() < count * stack) {
            ignored.resize(count * stack);
            ignored_words.resize(count * stack);
        }
        if (stack > 1 && own_frames.size() < count * stack) {
            own_frames.resize(count * stack);
            next_frames.resize(count * stack);
        }
        touched_count = 0;
    }
};

Transitions::Transitions(const Table& table, ViewConfig config)
    : table_(table), rows_(table.view()), width_(table.width()), config_(std::move(config)) {
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
        reward_ = i;
        reward_offset_ = field.offset;
        reward_items_ = field.full_bytes / field.item_bytes;
        reward_is_double_ = field.item_bytes == 8;
        if (config_.n_step > 1 && (!is_summed(field) || field.is_in_heap() || field.stack > 1)) {
            throw Error(ErrorKind::schema, "field '" + field.name +
                                               "': n_step > 1 sums it: expected float32 or float64, got " +
                                               field.dtype + "; give the field dtype float32");
        }
    }
    plan_prefetch();
    is_short_ = !is_plain_ && can_be_short();
    for (std::uint32_t k = 0; k <= config_.n_step; ++k) {
        powers_.push_back(std::pow(config_.gamma, k));
        discounts_.push_back(static_cast<float>(powers_.back()));
    }
}

std::uint64_t Transitions::leaf_bytes(const ViewLeaf& leaf) const {
    const Field& field = table_.layout().fields()[leaf.field];
    return field.full_bytes * field.stack;
}

std::size_t Transitions::gather(const std::uint64_t* slots, std::size_t begin, std::size_t end, const Outputs& out,
                                std::uint64_t* words, std::uint32_t* missed, bool single) const {
    const std::uint64_t bytes = (end - begin) * example_bytes_;
    const std::uint64_t limit = table_.layout().uses_heap() ? kParallelHeapBytes : kParallelBytes;
    if (bytes < limit || end - begin == 1 || out.places)
        return gather_pieces(slots, begin, end, out, words, missed, single);
    std::mutex mutex;
    std::size_t total = 0;
    in_parallel(end - begin, [&](std::size_t from, std::size_t to) {
        std::vector<std::uint32_t> own(to - from);
        const std::size_t misses = gather_pieces(slots, begin + from, begin + to, out, words, own.data(), single);
        if (misses == 0) return;
        std::lock_guard<std::mutex> guard(mutex);
        std::copy_n(own.data(), misses, missed + total);
        total += misses;
    });
    return total;
}

// Always inlined: the compiler takes a function that only fetches for one that does nothing, and drops the call.
__attribute__((always_inline)) inline void Transitions::prefetch(std::uint64_t slot) const {
    const std::byte* row = rows_.rows + slot * rows_.stride;
    for (const std::uint64_t offset : wanted_) __builtin_prefetch(row + offset, 0, 2);
}

// The reward of a row, times a factor, into the sums.
inline void Transitions::add_reward(std::uint64_t slot, double factor, double* sums) const {
    const std::byte* from = rows_.rows + slot * rows_.stride + reward_offset_;
    if (!reward_is_double_) {
        for (std::uint64_t k = 0; k < reward_items_; ++k) {
            float narrow;
            racy_copy(reinterpret_cast<std::byte*>(&narrow), from + 4 * k, 4);
            sums[k] += factor * static_cast<double>(narrow);
        }
        return;
    }
    for (std::uint64_t k = 0; k < reward_items_; ++k) {
        double value;
        racy_copy(reinterpret_cast<std::byte*>(&value), from + 8 * k, 8);
        sums[k] += factor * value;
    }
}

// Follows the example's steps from its first row on: sums rewards, finds the last row and what comes after it, and the
// frames of both stacks. False: something is missing.
inline bool Transitions::walk(Work& work, std::size_t position, std::uint64_t slot, std::uint32_t n_step,
                              std::uint64_t least, const Outputs& out) const {
    const std::size_t place = work.begin + position;
    std::uint64_t word = work.words[place];
    if (!is_live(word, least)) return false;
    work.touch(position, slot, word);
    if (stack_ > 1 && !look_back(work, position, slot, word, &work.own_frames[position * stack_])) return false;

    std::uint32_t steps = 1;
    if (n_step > 1) {
        double few_sums[4] = {};
        std::vector<double> many_sums;
        double* sums = few_sums;
        if (reward_items_ > 4) [[unlikely]]
            sums = (many_sums.resize(reward_items_), many_sums.data());
        add_reward(slot, 1.0, sums);
        while (steps < n_step && table_.successor(slot, word)) {
            work.touch(position, slot, word);
            add_reward(slot, powers_[steps], sums);
            ++steps;
        }
        std::byte* to = out.flats[reward_] + place * reward_items_ * (reward_is_double_ ? 8 : 4);
        for (std::uint64_t k = 0; k < reward_items_; ++k) {
            const float narrow = static_cast<float>(sums[k]);
            if (reward_is_double_) {
                std::memcpy(to + 8 * k, sums + k, 8);
            } else {
                std::memcpy(to + 4 * k, &narrow, 4);
            }
        }
    }
    if (out.discounts) out.discounts[place] = discounts_[steps];

    work.last_slots[position] = slot;
    work.last_words[position] = word;
    work.nexts[position] = Next::row;
    std::uint64_t next_slot = slot, next_word = word;
    if (derives_) {
        if (word & kHasFinalObservation) {
            work.nexts[position] = Next::final_place;
        } else if (table_.successor(next_slot, next_word)) {
            work.touch(position, next_slot, next_word);
        } else {
            work.nexts[position] = Next::waiting;
        }
    }
    work.next_slots[position] = next_slot;
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
        frames[stack_ - 1] = next_slot;
    }
    return true;
}

// Plain rows at once; others in pieces: while one is walked and copied, the rows of the next are on their way.
std::size_t Transitions::gather_pieces(const std::uint64_t* slots, std::size_t begin, std::size_t end,
                                       const Outputs& out, std::uint64_t* words, std::uint32_t* missed,
                                       bool single) const {
    if (is_plain_ && !out.places) return gather_part(slots, begin, end, out, words, missed, single, end);
    if (is_short_ && !out.places && (!single || derives_))
        return gather_steps(slots, begin, end, out, words, missed, single);
    std::size_t misses = 0;
    for (std::size_t i = begin; i < std::min(begin + kPiece, end); ++i) prefetch(slots[i]);
    for (std::size_t from = begin; from < end; from += kPiece) {
        const std::size_t to = std::min(from + kPiece, end);
        misses += gather_part(slots, from, to, out, words, missed + misses, single, std::min(to + kPiece, end));
    }
    return misses;
}

// Examples of small rows, where nothing is stacked or in the heap: mostly their rows stand side by side, and a kernel
// makes them. What it leaves is made one by one.
std::size_t Transitions::gather_steps(const std::uint64_t* slots, std::size_t begin, std::size_t end,
                                      const Outputs& out, std::uint64_t* words, std::uint32_t* missed,
                                      bool single) const {
    const std::vector<Field>& fields = table_.layout().fields();
    const std::uint32_t n_step = single ? 1 : config_.n_step;
    StepMove moves[kMostStepFields];
    std::size_t move_count = 0;
    for (std::size_t i = 0; i < config_.leaves.size(); ++i) {
        const ViewLeaf& leaf = config_.leaves[i];
        if (leaf.role == Role::reward && n_step > 1) continue;
        const Field& field = fields[leaf.field];
        const StepRow row = leaf.role == Role::last   ? StepRow::last
                            : leaf.role == Role::next ? StepRow::after
                                                      : StepRow::first;
        moves[move_count++] = {field.offset, field.bytes, out.flats[i], row};
    }
    const StepGather job{.view = rows_,
                         .least_word = table_.least_word(),
                         .slots = slots,
                         .words = words,
                         .fields = moves,
                         .field_count = move_count,
                         .n_step = n_step,
                         .takes_after = derives_,
                         .width = width_,
                         .all_slots = table_.header().slots,
                         .block_rows = table_.block_rows(),
                         .block_magic = ~std::uint64_t{0} / table_.block_rows() + 1,
                         .reward_offset = reward_offset_,
                         .powers = powers_.data(),
                         .sums = n_step > 1 ? out.flats[reward_] : nullptr,
                         .discounts_of = discounts_.data(),
                         .discounts = out.discounts,
                         .wanted = wanted_.data(),
                         .wanted_count = wanted_.size()};
    const std::size_t left = kernels().gather_steps(job, begin, end, missed);
    std::size_t misses = 0;
    for (std::size_t m = 0; m < left; ++m) {
        const std::uint32_t position = missed[m];
        if (!gather_one(slots[position], position, n_step, out, words)) missed[misses++] = position;
    }
    return misses;
}

// One example that gather_steps() left: its rows do not stand side by side, or some are not there.
bool Transitions::gather_one(std::uint64_t slot, std::size_t position, std::uint32_t n_step, const Outputs& out,
                             std::uint64_t* words) const {
    Work& work = Work::of_this_thread();
    work.make_room(1, n_step + 3, 1);
    work.begin = position;
    work.words = words;
    words[position] = load_word(table_, slot);
    if (!walk(work, 0, slot, n_step, table_.least_word(), out)) return false;
    for (std::size_t i = 0; i < config_.leaves.size(); ++i) {
        const ViewLeaf& leaf = config_.leaves[i];
        if (leaf.role == Role::reward && n_step > 1) continue;
        const Field& field = table_.layout().fields()[leaf.field];
        const std::uint64_t from = leaf.role == Role::last   ? work.last_slots[0]
                                   : leaf.role == Role::next ? work.next_slots[0]
                                                             : slot;
        racy_copy(out.flats[i] + position * field.bytes, rows_.rows + from * rows_.stride + field.offset, field.bytes);
    }
    work.failed[0] = work.nexts[0] != Next::row && !copy_next(work, 0, out);
    check_again(work);
    return !work.failed[0];
}

// Whoever read a row that has changed since has failed.
void Transitions::check_again(Work& work) const {
    fence(std::memory_order_acquire);
    for (std::size_t t = 0; t < work.touched_count; ++t) {
        const Touched& row = work.touched[t];
        if ((load_word(table_, row.slot) ^ row.word) & kFixed) work.failed[row.position] = true;
    }
}

bool Transitions::are_unchanged(const std::vector<Touched>& touched) const {
    fence(std::memory_order_acquire);
    return std::none_of(touched.begin(), touched.end(),
                        [&](const Touched& row) { return (load_word(table_, row.slot) ^ row.word) & kFixed; });
}

// Instead of their bytes, where the rows are. Only those of examples that did not fail are to be looked at again.
void Transitions::name_rows(const Work& work, const std::uint64_t* slots, std::size_t count, Places& places) const {
    const auto number = [](std::uint64_t slot) { return static_cast<std::int64_t>(slot); };
    for (std::size_t i = 0; i < count; ++i) {
        const std::size_t place = work.begin + i;
        const bool is_row = work.nexts[i] == Next::row;
        places.own[place] = number(slots[i]);
        places.last[place] = number(work.last_slots[i]);
        places.next[place] = is_row ? number(work.next_slots[i]) : -1;
        for (std::uint32_t k = 0; stack_ > 1 && k < stack_; ++k) {
            places.own_frames[place * stack_ + k] = number(work.own_frames[i * stack_ + k]);
            places.next_frames[place * stack_ + k] = number(work.next_frames[i * stack_ + k]);
        }
        if (stack_ > 1 && !is_row) places.next_frames[place * stack_ + stack_ - 1] = -1;
    }
    for (std::size_t t = 0; t < work.touched_count; ++t) {
        const Touched& row = work.touched[t];
        if (!work.failed[row.position]) places.touched.push_back({row.slot, row.word, work.begin + row.position});
    }
}

std::size_t Transitions::gather_part(const std::uint64_t* slots, std::size_t begin, std::size_t end, const Outputs& out,
                                     std::uint64_t* words, std::uint32_t* missed, bool single,
                                     std::size_t fetch_end) const {
    const std::vector<Field>& fields = table_.layout().fields();
    const std::size_t leaf_count = config_.leaves.size();
    const bool streaming = (end - begin) * example_bytes_ >= kStreamingBytes;
    FieldMove few[32];
    std::vector<FieldMove> many;
    FieldMove* moves = few;
    if (leaf_count > 32) moves = (many.resize(leaf_count), many.data());
    const auto run = [&](const std::uint64_t* from, std::size_t move_count, std::size_t first, std::size_t last,
                         std::uint64_t* seen, std::uint32_t* bad) {
        const Gather job{rows_, table_.least_word(), from, moves, move_count, seen, streaming};
        return kernels().gather(job, first, last, bad);
    };
    if (!out.places && (is_plain_ || (single && !derives_ && stack_ == 1 && !table_.layout().uses_heap()))) {
        for (std::size_t i = 0; i < leaf_count; ++i) {
            const Field& field = fields[config_.leaves[i].field];
            moves[i] = {field.offset, field.bytes, out.flats[i], 0};
        }
        return run(slots, leaf_count, begin, end, words, missed);
    }

    Work& work = Work::of_this_thread();  // its address is looked up once
    const std::size_t count = end - begin;
    const std::uint32_t n_step = single ? 1 : config_.n_step;
    work.make_room(count, n_step + 1 + 2 * stack_, stack_);
    work.begin = begin;
    work.words = words;
    const std::uint64_t least = table_.least_word();
    for (std::size_t i = 0; i < count; ++i) {
        if (end + i < fetch_end) prefetch(slots[end + i]);
        const std::uint64_t slot = slots[begin + i];
        words[begin + i] = load_word(table_, slot);
        work.failed[i] = !walk(work, i, slot, n_step, least, out);
    }
    for (std::size_t i = 0; i < count; ++i) {
        if (!work.failed[i]) [[likely]]
            continue;
        // The row itself stands in for what is not there; the position is reported as missed.
        const std::uint64_t slot = slots[begin + i];
        work.last_slots[i] = work.next_slots[i] = slot;
        work.nexts[i] = Next::row;
        for (std::uint32_t k = 0; stack_ > 1 && k < stack_; ++k) {
            work.own_frames[i * stack_ + k] = work.next_frames[i * stack_ + k] = slot;
        }
    }

    // Fixed fields, by where they come from. Every row read is checked below.
    const auto copy_fixed = [&](Role role, const std::uint64_t* from) {
        std::size_t move_count = 0;
        for (std::size_t i = 0; i < leaf_count; ++i) {
            const ViewLeaf& leaf = config_.leaves[i];
            const Field& field = fields[leaf.field];
            Role effective = leaf.role == Role::reward ? (n_step > 1 ? Role::reward : Role::own) : leaf.role;
            if (effective != role || field.stack > 1 || field.is_in_heap()) continue;
            moves[move_count++] = {field.offset, field.bytes, out.flats[i] + begin * field.bytes, 0};
        }
        const Gather job{rows_, 0, from, moves, move_count, nullptr, streaming};
        if (move_count) kernels().gather_warm(job, 0, count);
    };
    if (!out.places) {
        copy_fixed(Role::own, slots + begin);
        copy_fixed(Role::last, work.last_slots.data());
        copy_fixed(Role::next, work.next_slots.data());
    }
    for (std::size_t i = 0; i < leaf_count; ++i) {
        const ViewLeaf& leaf = config_.leaves[i];
        const Field& field = fields[leaf.field];
        if ((field.stack == 1 || out.places) && !field.is_in_heap()) continue;
        copy_stacks(work, i, slots + begin, count, out, streaming);
    }
    for (std::size_t i = 0; derives_ && i < count; ++i) {
        if (work.nexts[i] != Next::row && !work.failed[i]) work.failed[i] = !copy_next(work, i, out);
    }
    check_again(work);
    if (out.places) name_rows(work, slots + begin, count, *out.places);
    std::size_t misses = 0;
    for (std::size_t i = 0; i < count; ++i) {
        if (work.failed[i]) missed[misses++] = static_cast<std::uint32_t>(begin + i);
    }
    return misses;
}

// Whether gather_steps() can make examples: what its kernel knows is what most tables are.
bool Transitions::can_be_short() const {
    if (stack_ > 1 || !has_small_rows() || config_.leaves.size() > kMostStepFields) return false;
    if (config_.n_step > 1 && (reward_items_ != 1 || reward_is_double_)) return false;
    for (const ViewLeaf& leaf : config_.leaves) {
        const Field& field = table_.layout().fields()[leaf.field];
        if (field.is_in_heap()) return false;
    }
    if (table_.header().slots <= (config_.n_step + 1) * width_) return false;
    // Up to here its division by a multiplication is exact: see base/divide.h.
    return table_.block_rows() > 1 && table_.header().slots <= ~std::uint64_t{0} / table_.block_rows();
}

bool Transitions::has_small_rows() const { return rows_.stride <= 1024 && table_.layout().word_is_embedded(); }

// Which bytes an example will want, from its first row's start on, where its steps stand side by side: fetched while
// the examples before it are worked out. They are named by their offsets, the same for every example: to work out the
// lines that a row's place gives them costs a mispredicted branch an example, to fetch a line twice next to nothing.
// Of large rows only the first lines: the rest is left to the hardware.
void Transitions::plan_prefetch() {
    const auto want = [&](std::uint64_t from, std::uint64_t to) {
        for (std::uint64_t at = from;; at += 64) {
            const std::uint64_t point = std::min(at, to - 1);
            // Rows start at multiples of 8.
            const auto is_near = [&](std::uint64_t other) { return other / 8 == point / 8; };
            if (wanted_.size() < kMostWanted && std::none_of(wanted_.begin(), wanted_.end(), is_near))
                wanted_.push_back(point);
            if (point == to - 1) return;
        }
    };
    if (stack_ > 1 || !has_small_rows()) return want(0, std::min<std::uint64_t>(rows_.stride, 256));
    const std::uint64_t step = rows_.stride * width_;
    for (std::uint32_t k = 0; k < config_.n_step + derives_; ++k) {
        std::vector<std::pair<std::uint64_t, std::uint64_t>> parts = {{0, 8}};  // the word
        for (const ViewLeaf& leaf : config_.leaves) {
            const Field& field = table_.layout().fields()[leaf.field];
            const bool is_read = leaf.role == Role::reward ? k < config_.n_step
                                 : leaf.role == Role::own  ? k == 0
                                 : leaf.role == Role::last ? k + 1 == config_.n_step
                                                           : k == config_.n_step;
            if (is_read) parts.emplace_back(field.offset, field.offset + field.bytes);
        }
        std::sort(parts.begin(), parts.end());
        for (std::size_t p = 0; p < parts.size();) {
            const std::uint64_t from = parts[p].first;
            std::uint64_t to = parts[p++].second;
            while (p < parts.size() && parts[p].first < to + 64) to = std::max(to, parts[p++].second);
            want(k * step + from, k * step + to);
        }
    }
}

// The slots of the stack that ends in a row, oldest first; an episode's start stands for what was before it.
bool Transitions::look_back(Work& work, std::size_t position, std::uint64_t slot, std::uint64_t word,
                            std::uint64_t* frames) const {
    frames[stack_ - 1] = slot;
    bool at_start = false;
    for (std::uint32_t k = stack_ - 1; k-- > 0;) {
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
        const FieldMove move{field.offset, frame, flat, 0};
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
            const bool elsewhere = leaf.role == Role::next && k + 1 == depth && work.nexts[i] != Next::row;
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
    if (place.offset > heap || place.kept_bytes > heap - place.offset || place.value_bytes > field.full_bytes ||
        place.kept_bytes > place.value_bytes)
        return false;
    std::atomic_ref<std::uint64_t> word(table_.word(slot));
    const std::uint64_t before = word.load(std::memory_order_acquire);
    if (work.bytes.size() < place.kept_bytes) work.bytes.resize(place.kept_bytes);
    racy_copy(work.bytes.data(), table_.region(kHeap) + place.offset, place.kept_bytes);
    fence(std::memory_order_acquire);
    // Torn input is never decoded, nor what belongs to another row.
    if (place.value_bytes != 0 && !is_owner(place.offset, serial_of(before))) return false;
    if ((word.load(std::memory_order_acquire) ^ before) & ~kFlagMask) return false;
    if (state_of(before) != kCommitted) return false;
    if (!decode(work.bytes.data(), place.kept_bytes, to, place.value_bytes)) return false;
    return finish_value(field, to, place.value_bytes, length);
}

// Whether the bytes at a place of the heap are those of a row.
bool Transitions::is_owner(std::uint64_t place, std::uint64_t serial) const {
    if (place < sizeof(PieceHeader) || place % 16 != 0) return false;
    std::byte* header = table_.region(kHeap) + place - sizeof(PieceHeader);
    return std::atomic_ref<std::uint64_t>(reinterpret_cast<PieceHeader*>(header)->owner)
               .load(std::memory_order_acquire) == serial + 1;
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
    const std::uint64_t last_slot = work.last_slots[position], last_word = work.last_words[position];
    const bool is_final = work.nexts[position] == Next::final_place;
    const std::uint64_t image_bytes = table_.layout().final_bytes();
    work.bytes.resize(std::max<std::size_t>(work.bytes.size(), 2 * image_bytes));
    std::byte* image = work.bytes.data();
    const std::uint64_t place =
        std::atomic_ref<std::uint64_t>(table_.final_place(last_slot)).load(std::memory_order_acquire);
    if (is_final) {
        const std::uint64_t heap = table_.header().regions[kHeap].bytes;
        if (place > heap || image_bytes > heap - place) return false;
        racy_copy(image, table_.region(kHeap) + place, image_bytes);
        fence(std::memory_order_acquire);
        if (!is_owner(place, serial_of(last_word))) return false;
    } else {
        if (place >= table_.max_writers() * table_.width()) return false;
        bool found = false;
        for (std::uint64_t half = 0; half < 2 && !found; ++half) {
            std::byte* from = table_.waiting(place, half);
            std::atomic_ref<std::uint64_t> tag(*reinterpret_cast<std::uint64_t*>(from));
            if (tag.load(std::memory_order_acquire) != serial_of(last_word) + 1) continue;
            racy_copy(image, from + kWaitingHead, image_bytes);
            fence(std::memory_order_acquire);
            found = tag.load(std::memory_order_acquire) == serial_of(last_word) + 1;
        }
        if (!found) return false;
    }
    // The row must still say the same before its image is decoded.
    const std::uint64_t again = std::atomic_ref<std::uint64_t>(table_.word(last_slot)).load(std::memory_order_acquire);
    if ((again ^ last_word) & (~kFlagMask | kHasFinalObservation)) return false;
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
        const std::uint64_t room = is_final ? value.kept_bytes : field.full_bytes;
        at += (room + 15) / 16 * 16;
    }
    return true;
}

}  // namespace sharpwave
