#include "views/transitions.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>
#include <utility>

#include "base/error.h"
#include "base/workers.h"
#include "table/racy.h"

namespace sharpwave {

using namespace format;

namespace {

// Decompression is dearer than copying.
constexpr std::uint64_t kParallelHeapBytes = 64 << 10;

// Flags may change after the commit, but an end that came since would have ended the example earlier.
constexpr std::uint64_t kFixed = ~kFlagMask | kHasFinalObservation;

constexpr std::size_t kMostStepFields = 16;
constexpr std::size_t kPiece = 64;

std::uint32_t longest_stack(const Table& table, const ViewConfig& config) {
    std::uint32_t longest = 1;
    for (const ViewLeaf& leaf : config.leaves) {
        longest = std::max(longest, table.layout().fields().at(leaf.field).stack);
    }
    return longest;
}

bool are_neighbours(const std::uint64_t* slots, std::size_t count) {
    if (count < 16 || slots[count - 1] - slots[0] != count - 1) [[likely]]
        return false;
    std::uint64_t differ = 0;
    for (std::size_t i = 0; i < count; ++i) differ |= slots[i] ^ (slots[0] + i);
    return differ == 0;
}

std::uint8_t is_truncated(std::uint64_t word) { return (word & kTruncated) != 0; }

bool is_summed(const Field& field) {
    return (field.dtype == "<f4" && field.item_bytes == 4) || (field.dtype == "<f8" && field.item_bytes == 8);
}

}  // namespace

Transitions::Transitions(const Table& table, ViewConfig config)
    : table_(table),
      rows_(table.view()),
      width_(table.width()),
      config_(std::move(config)),
      stack_(longest_stack(table, config_)),
      stacks_(table, config_, stack_),
      next_(table, config_),
      mutables_(table),
      agents_(table, config_),
      rewards_(rows_) {
    const std::vector<Field>& fields = table.layout().fields();
    is_plain_ = config_.n_step == 1;
    for (std::size_t i = 0; i < config_.leaves.size(); ++i) {
        const ViewLeaf& leaf = config_.leaves[i];
        const Field& field = fields.at(leaf.field);
        example_bytes_ += leaf_bytes(leaf);
        (field.is_mutable ? mutable_leaves_ : row_leaves_).push_back({i, field.offset, field.bytes, leaf.role});
        derives_ = derives_ || leaf.role == Role::next;
        pads_zero_ = pads_zero_ || field.pads_zero;
        is_plain_ = is_plain_ && leaf.role != Role::next && field.stack == 1 && !field.is_in_heap();
        if (leaf.role != Role::reward) continue;
        if (!agents_.is_empty()) continue;
        rewards_.include(i, field);
        if (config_.n_step > 1 && (!is_summed(field) || field.is_in_heap() || field.stack > 1)) {
            throw Error(ErrorKind::schema, "field '" + field.name +
                                               "': n_step > 1 sums it: expected float32 or float64, got " +
                                               field.dtype + "; give the field dtype float32");
        }
    }
    fetched_ = PrefetchPlan(table, config_, stack_ == 1 && has_small_rows(), derives_);
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

// Follows the steps of an example from its first row to its last, which `slot` and `word` are afterwards. Returns their
// number.
inline std::uint32_t Transitions::sum_rewards(ExampleWork& work, std::size_t position, std::uint64_t& slot,
                                              std::uint64_t& word, std::uint32_t n_step, const Outputs& out) const {
    double few_sums[4] = {};
    std::vector<double> many_sums;
    double* sums = few_sums;
    if (rewards_.items() > 4) [[unlikely]]
        sums = (many_sums.resize(rewards_.items()), many_sums.data());
    const std::size_t place = work.begin + position;
    rewards_.add(slot, walk_mutables(work, slot, place, true, out), 1.0, sums);
    std::uint32_t steps = 1;
    while (steps < n_step && table_.successor(slot, word)) {
        work.touch(position, slot, word);
        rewards_.add(slot, walk_mutables(work, slot, place, false, out), powers_[steps], sums);
        ++steps;
    }
    rewards_.put(sums, place, out);
    if (out.discounts) out.discounts[place] = discounts_[steps];
    return steps;
}

// The same where each agent has its own end. A row that is cut is the last of an example.
std::uint32_t Transitions::sum_agents(ExampleWork& work, std::size_t position, std::uint64_t& slot, std::uint64_t& word,
                                      std::uint32_t n_step, const Outputs& out) const {
    const std::size_t place = work.begin + position;
    agents_.begin(work);
    agents_.add(work, slot, walk_mutables(work, slot, place, true, out), 1.0);
    std::uint32_t steps = 1;
    while (steps < n_step && !(word & kCut) && table_.successor(slot, word)) {
        work.touch(position, slot, word);
        agents_.add(work, slot, walk_mutables(work, slot, place, false, out), powers_[steps]);
        ++steps;
    }
    agents_.put(work, place, discounts_.data(), out);
    return steps;
}

// Follows the example's steps from its first row on: sums rewards, finds the last row and what comes after it, and the
// frames of both stacks. False: something is missing.
inline bool Transitions::walk(ExampleWork& work, std::size_t position, std::uint64_t slot, std::uint32_t n_step,
                              std::uint64_t least, const Outputs& out) const {
    const std::size_t place = work.begin + position;
    std::uint64_t word = work.words[place];
    if (!is_live(word, least)) return false;
    work.touch(position, slot, word);
    if (stack_ > 1 &&
        !stacks_.look_back(work, position, slot, word, &work.own_frames[position * stack_], work.own_padded[position]))
        return false;

    std::uint32_t steps = 1;
    if (n_step == 1 && has_mutables()) copy_mutables(slot, place, out);
    if (n_step > 1) {
        steps = agents_.is_empty() ? sum_rewards(work, position, slot, word, n_step, out)
                                   : sum_agents(work, position, slot, word, n_step, out);
    }

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
        // The stack after the last step: its frames but the oldest, then the next frame, which the copy puts in.
        std::uint64_t* frames = &work.next_frames[position * stack_];
        std::uint64_t whole[256];
        std::uint16_t padded = work.own_padded[position];
        if (steps == 1) {
            std::copy_n(&work.own_frames[position * stack_], stack_, whole);
        } else if (!stacks_.look_back(work, position, slot, word, whole, padded)) {
            return false;
        }
        std::copy_n(whole + 1, stack_ - 1, frames);
        frames[stack_ - 1] = next_slot;
        work.next_padded[position] = padded ? static_cast<std::uint16_t>(padded - 1) : std::uint16_t{0};
        // (A final observation where they are derived: a damaged file may say otherwise.)
        work.starts_over[position] = (word & kNextStartsOver) && (derives_ == (work.nexts[position] != Next::row));
        work.over_count += work.starts_over[position];
    }
    return true;
}

// Plain rows at once; others in pieces: while one is walked and copied, the rows of the next are on their way.
std::size_t Transitions::gather_pieces(const std::uint64_t* slots, std::size_t begin, std::size_t end,
                                       const Outputs& out, std::uint64_t* words, std::uint32_t* missed,
                                       bool single) const {
    if (is_plain_ && !out.places) return gather_plain(slots, begin, end, out, words, missed);
    if (is_short_ && !out.places && (!single || derives_))
        return gather_steps(slots, begin, end, out, words, missed, single);
    std::size_t misses = 0;
    for (std::size_t i = begin; i < std::min(begin + kPiece, end); ++i)
        fetched_.fetch(rows_.rows + slots[i] * rows_.stride);
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
    const std::uint32_t n_step = single ? 1 : config_.n_step;
    StepMove moves[kMostStepFields + 1];
    std::size_t move_count = 0;
    for (const LeafPlace& leaf : row_leaves_) {
        if (leaf.role == Role::reward && n_step > 1) continue;
        const StepRow row = leaf.role == Role::last   ? StepRow::last
                            : leaf.role == Role::next ? StepRow::after
                                                      : StepRow::first;
        moves[move_count++] = {leaf.offset, leaf.bytes, out.flats[leaf.leaf], row};
    }
    // The byte of the last row's word that has the flag, copied like a field: the kernel checks that word.
    if (out.truncated) moves[move_count++] = {0, 1, reinterpret_cast<std::byte*>(out.truncated), StepRow::last};
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
                         .reward_offset = rewards_.offset(),
                         .powers = powers_.data(),
                         .sums = n_step > 1 ? out.flats[rewards_.leaf()] : nullptr,
                         .discounts_of = discounts_.data(),
                         .discounts = out.discounts,
                         .wanted = fetched_.offsets().data(),
                         .wanted_count = fetched_.offsets().size()};
    const std::size_t left = kernels().gather_steps(job, begin, end, missed);
    for (std::size_t i = begin; out.truncated && i < end; ++i) out.truncated[i] = is_truncated(out.truncated[i]);
    std::size_t misses = 0;
    for (std::size_t m = 0; m < left; ++m) {
        const std::uint32_t position = missed[m];
        if (!gather_one(slots[position], position, n_step, out, words)) missed[misses++] = position;
    }
    if (has_mutables()) misses = gather_mutables(slots, begin, end, out, words, missed, misses);
    return misses;
}

// One example that gather_steps() left: its rows do not stand side by side, or some are not there.
bool Transitions::gather_one(std::uint64_t slot, std::size_t position, std::uint32_t n_step, const Outputs& out,
                             std::uint64_t* words) const {
    ExampleWork& work = ExampleWork::of_this_thread();
    work.make_room(1, n_step + 3, 1);
    work.begin = position;
    work.words = words;
    words[position] = table_.load_word(slot);
    if (!walk(work, 0, slot, n_step, table_.least_word(), out)) return false;
    for (const LeafPlace& leaf : row_leaves_) {
        if (leaf.role == Role::reward && n_step > 1) continue;
        const std::uint64_t from = leaf.role == Role::last   ? work.last_slots[0]
                                   : leaf.role == Role::next ? work.next_slots[0]
                                                             : slot;
        racy_copy(out.flats[leaf.leaf] + position * leaf.bytes, rows_.rows + from * rows_.stride + leaf.offset,
                  leaf.bytes);
    }
    if (out.truncated) out.truncated[position] = is_truncated(work.last_words[0]);
    work.failed[0] = work.nexts[0] != Next::row && !next_.copy(work, 0, out);
    check_again(work);
    return !work.failed[0];
}

// Examples made from a row that has changed since have failed.
void Transitions::check_again(ExampleWork& work) const {
    fence(std::memory_order_acquire);
    for (std::size_t t = 0; t < work.touched_count; ++t) {
        const Touched& row = work.touched[t];
        if ((table_.load_word(row.slot) ^ row.word) & kFixed) work.failed[row.position] = true;
    }
}

bool Transitions::are_unchanged(const std::vector<Touched>& touched) const {
    fence(std::memory_order_acquire);
    return std::none_of(touched.begin(), touched.end(),
                        [&](const Touched& row) { return (table_.load_word(row.slot) ^ row.word) & kFixed; });
}

// Instead of their bytes, where the rows are. Only those of examples that did not fail are to be looked at again.
void Transitions::name_rows(const ExampleWork& work, const std::uint64_t* slots, std::size_t count,
                            Places& places) const {
    const auto number = [](std::uint64_t slot) { return static_cast<std::int64_t>(slot); };
    for (std::size_t i = 0; i < count; ++i) {
        const std::size_t place = work.begin + i;
        const bool is_row = work.nexts[i] == Next::row;
        places.own[place] = number(slots[i]);
        places.last[place] = number(work.last_slots[i]);
        places.next[place] = is_row ? number(work.next_slots[i]) : -1;
        if (stack_ > 1) name_frames(work, i, places);
    }
    for (std::size_t t = 0; t < work.touched_count; ++t) {
        const Touched& row = work.touched[t];
        if (!work.failed[row.position]) places.touched.push_back({row.slot, row.word, work.begin + row.position});
    }
}

void Transitions::name_frames(const ExampleWork& work, std::size_t i, Places& places) const {
    const auto number = [](std::uint64_t slot) { return static_cast<std::int64_t>(slot); };
    const auto marked = [&](std::uint64_t slot, bool is_next) { return -2 - (2 * number(slot) + is_next); };
    const std::uint64_t *own = &work.own_frames[i * stack_], *next = &work.next_frames[i * stack_];
    std::int64_t* own_out = places.own_frames + (work.begin + i) * stack_;
    std::int64_t* next_out = places.next_frames + (work.begin + i) * stack_;
    for (std::uint32_t k = 0; k < stack_; ++k) {
        own_out[k] = pads_zero_ && k < work.own_padded[i] ? marked(own[k], false) : number(own[k]);
        next_out[k] = pads_zero_ && k < work.next_padded[i] ? marked(next[k], false) : number(next[k]);
        if (work.starts_over[i] && k + 1 < stack_) next_out[k] = derives_ ? -1 : marked(next[stack_ - 1], true);
    }
    if (work.nexts[i] != Next::row) next_out[stack_ - 1] = -1;
}

// What copies fixed fields of a row to their places in a batch.
struct Transitions::Moves {
    Moves(const Transitions& view, const Outputs& out) {
        const std::vector<LeafPlace>& leaves = view.row_leaves_;
        count = leaves.size();
        if (count > 32) all = (many.resize(count), many.data());
        for (std::size_t i = 0; i < count; ++i)
            all[i] = {leaves[i].offset, leaves[i].bytes, out.flats[leaves[i].leaf], 0};
    }
    std::size_t count;
    FieldMove few[32];
    std::vector<FieldMove> many;
    FieldMove* all = few;
};

// Rows that are their examples: one pass of the copy kernel.
std::size_t Transitions::gather_plain(const std::uint64_t* slots, std::size_t begin, std::size_t end,
                                      const Outputs& out, std::uint64_t* words, std::uint32_t* missed) const {
    std::size_t misses;
    if (are_neighbours(slots + begin, end - begin)) {
        misses = gather_neighbours(slots[begin], begin, end, out, words, missed);
    } else {
        const Moves moves(*this, out);
        const bool streaming = (end - begin) * example_bytes_ >= kStreamingBytes;
        const Gather job{rows_, table_.least_word(), slots, moves.all, moves.count, words, streaming};
        misses = kernels().gather(job, begin, end, missed);
        if (has_mutables()) misses = gather_mutables(slots, begin, end, out, words, missed, misses);
    }
    for (std::size_t i = begin; out.truncated && i < end; ++i) out.truncated[i] = is_truncated(words[i]);
    return misses;
}

// All mutable values of an example that is one row.
void Transitions::copy_mutables(std::uint64_t slot, std::size_t place, const Outputs& out) const {
    mutables_.read(slot, [&](const std::byte* values) {
        for (const LeafPlace& leaf : mutable_leaves_)
            racy_copy(out.flats[leaf.leaf] + place * leaf.bytes, values + leaf.offset, leaf.bytes);
    });
}

// The mutable values of one step of an example, all from one moment of the row; null where there are none. Rewards are
// the caller's to sum. The last of the rows is not known before it is passed, so each row leaves what a last one gives.
inline const std::byte* Transitions::walk_mutables(ExampleWork& work, std::uint64_t slot, std::size_t place,
                                                   bool is_first, const Outputs& out) const {
    if (!has_mutables()) [[likely]]
        return nullptr;
    work.mutables.resize(mutables_.value_bytes());
    std::byte* const kept = work.mutables.data();
    mutables_.read(slot, [&](const std::byte* values) { racy_copy(kept, values, mutables_.value_bytes()); });
    for (const LeafPlace& leaf : mutable_leaves_) {
        if (leaf.role != Role::reward && (is_first || leaf.role == Role::last))
            std::memcpy(out.flats[leaf.leaf] + place * leaf.bytes, kept + leaf.offset, leaf.bytes);
    }
    return kept;
}

// The mutable values of rows that were just read; positions whose row has changed since join the `misses` missed ones.
std::size_t Transitions::gather_mutables(const std::uint64_t* slots, std::size_t begin, std::size_t end,
                                         const Outputs& out, const std::uint64_t* words, std::uint32_t* missed,
                                         std::size_t misses) const {
    const std::size_t known = misses;
    for (std::size_t i = begin; i < std::min(begin + 2 * kPiece, end); ++i) mutables_.prefetch_selector(slots[i]);
    for (std::size_t from = begin; from < end; from += kPiece) {
        const std::size_t to = std::min(from + kPiece, end);
        for (std::size_t i = from; i < to; ++i) {
            if (i + 2 * kPiece < end) mutables_.prefetch_selector(slots[i + 2 * kPiece]);
            mutables_.prefetch(slots[i]);
        }
        for (std::size_t i = from; i < to; ++i) copy_mutables(slots[i], i, out);
        fence(std::memory_order_acquire);
        for (std::size_t i = from; i < to; ++i) {
            const std::uint64_t again = table_.load_word(slots[i], std::memory_order_relaxed);
            if (((words[i] ^ again) & ~kFlagMask) && std::find(missed, missed + known, i) == missed + known)
                missed[misses++] = static_cast<std::uint32_t>(i);
        }
    }
    return misses;
}

// All rows of a table in turn, as rows() reads them.
std::size_t Transitions::gather_neighbours(std::uint64_t slot, std::size_t begin, std::size_t end, const Outputs& out,
                                           std::uint64_t* words, std::uint32_t* missed) const {
    const std::uint64_t least = table_.least_word(), fetched = std::min<std::uint64_t>(rows_.stride, 512);
    const bool streaming = (end - begin) * example_bytes_ >= kStreamingBytes;
    std::size_t misses = 0;
    for (std::size_t from = begin; from < end; from += kPiece) {
        const std::size_t to = std::min(from + kPiece, end);
        const std::uint64_t first = slot + (from - begin);
        const std::byte* ahead = rows_.rows + (first + kPiece) * rows_.stride;
        for (std::size_t i = from; i < to; ++i, ahead += rows_.stride) {
            for (std::uint64_t line = 0; line < fetched; line += 64) __builtin_prefetch(ahead + line, 0, 2);
            words[i] = table_.load_word(first + (i - from));
        }
        copy_run(first, 1, to - from, from, out, streaming);
        fence(std::memory_order_acquire);
        for (std::size_t i = from; i < to; ++i) {
            const std::uint64_t again = table_.load_word(first + (i - from), std::memory_order_relaxed);
            if (((words[i] ^ again) & ~kFlagMask) || !is_live(words[i], least)) [[unlikely]]
                missed[misses++] = static_cast<std::uint32_t>(i);
        }
    }
    return misses;
}

void Transitions::copy_run(std::uint64_t slot, std::uint64_t step, std::size_t count, std::size_t place,
                           const Outputs& out, bool streaming) const {
    const Moves moves(*this, out);
    const Gather job{rows_, 0, nullptr, moves.all, moves.count, nullptr, streaming};
    kernels().gather_run(job, slot, step, count, place);
    for (std::size_t i = 0; has_mutables() && i < count; ++i) copy_mutables(slot + i * step, place + i, out);
}

// The row itself stands in for what is not there; the position is reported as missed.
void Transitions::stand_in(ExampleWork& work, const std::uint64_t* slots, std::size_t count) const {
    for (std::size_t i = 0; i < count; ++i) {
        if (!work.failed[i]) [[likely]]
            continue;
        work.last_slots[i] = work.next_slots[i] = slots[i];
        work.nexts[i] = Next::row;
        for (std::uint32_t k = 0; stack_ > 1 && k < stack_; ++k) {
            work.own_frames[i * stack_ + k] = work.next_frames[i * stack_ + k] = slots[i];
        }
        if (stack_ > 1) work.own_padded[i] = work.next_padded[i] = work.starts_over[i] = 0;
    }
}

// Fixed fields that come from the rows of one role. The caller checks every row that is read.
void Transitions::copy_fixed(Role role, const std::uint64_t* from, std::size_t begin, std::size_t count,
                             std::uint32_t n_step, const Outputs& out, bool streaming) const {
    const std::vector<Field>& fields = table_.layout().fields();
    FieldMove few[32];
    std::vector<FieldMove> many;
    FieldMove* moves = few;
    if (config_.leaves.size() > 32) moves = (many.resize(config_.leaves.size()), many.data());
    std::size_t move_count = 0;
    for (std::size_t i = 0; i < config_.leaves.size(); ++i) {
        const ViewLeaf& leaf = config_.leaves[i];
        const Field& field = fields[leaf.field];
        const Role effective = leaf.role == Role::reward && n_step == 1 ? Role::own : leaf.role;
        if (effective != role || field.stack > 1 || field.is_in_heap() || field.is_mutable) continue;
        moves[move_count++] = {field.offset, field.bytes, out.flats[i] + begin * field.bytes, 0};
    }
    const Gather job{rows_, 0, from, moves, move_count, nullptr, streaming};
    if (move_count) kernels().gather_warm(job, 0, count);
}

std::size_t Transitions::gather_part(const std::uint64_t* slots, std::size_t begin, std::size_t end, const Outputs& out,
                                     std::uint64_t* words, std::uint32_t* missed, bool single,
                                     std::size_t fetch_end) const {
    if (!out.places && single && !derives_ && stack_ == 1 && !table_.layout().uses_heap())
        return gather_plain(slots, begin, end, out, words, missed);
    const std::vector<Field>& fields = table_.layout().fields();
    const std::size_t leaf_count = config_.leaves.size();
    const bool streaming = (end - begin) * example_bytes_ >= kStreamingBytes;
    ExampleWork& work = ExampleWork::of_this_thread();  // its address is looked up once
    const std::size_t count = end - begin;
    const std::uint32_t n_step = single ? 1 : config_.n_step;
    work.make_room(count, n_step + 1 + 2 * stack_, stack_);
    work.begin = begin;
    work.words = words;
    const std::uint64_t least = table_.least_word();
    for (std::size_t i = 0; i < count; ++i) {
        if (end + i < fetch_end) fetched_.fetch(rows_.rows + slots[end + i] * rows_.stride);
        const std::uint64_t slot = slots[begin + i];
        words[begin + i] = table_.load_word(slot);
        work.failed[i] = !walk(work, i, slot, n_step, least, out);
    }
    stand_in(work, slots + begin, count);
    for (std::size_t i = 0; out.truncated && i < count; ++i)
        out.truncated[begin + i] = is_truncated(work.last_words[i]);

    if (!out.places) {
        copy_fixed(Role::own, slots + begin, begin, count, n_step, out, streaming);
        copy_fixed(Role::last, work.last_slots.data(), begin, count, n_step, out, streaming);
        copy_fixed(Role::next, work.next_slots.data(), begin, count, n_step, out, streaming);
    }
    for (std::size_t i = 0; i < leaf_count; ++i) {
        const ViewLeaf& leaf = config_.leaves[i];
        const Field& field = fields[leaf.field];
        if ((field.stack == 1 || out.places) && !field.is_in_heap()) continue;
        stacks_.copy(work, i, slots + begin, count, out, streaming);
    }
    for (std::size_t i = 0; derives_ && i < count; ++i) {
        if (work.nexts[i] != Next::row && !work.failed[i]) work.failed[i] = !next_.copy(work, i, out);
    }
    if (work.over_count) {
        for (std::size_t i = 0; i < leaf_count; ++i) stacks_.start_over(work, i, count, out);
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
    if (config_.n_step > 1 && !rewards_.is_one_float()) return false;
    for (const ViewLeaf& leaf : config_.leaves) {
        const Field& field = table_.layout().fields()[leaf.field];
        if (field.is_in_heap()) return false;
        // Of the first row only: the kernel does not tell which rows come after it.
        if (field.is_mutable && leaf.role != Role::own && (leaf.role != Role::reward || config_.n_step > 1))
            return false;
    }
    if (table_.header().slots <= (config_.n_step + 1) * width_) return false;
    // Up to here its division by a multiplication is exact: see base/divide.h.
    return table_.block_rows() > 1 && table_.header().slots <= ~std::uint64_t{0} / table_.block_rows();
}

bool Transitions::has_small_rows() const { return rows_.stride <= 1024 && table_.layout().word_is_embedded(); }

}  // namespace sharpwave
