#include "views/goals.h"

#include <cstring>
#include <vector>

namespace sharpwave {

using namespace format;

namespace {

// Random numbers of a position apart from those that drew it.
constexpr std::uint64_t kCoin = 1 << 22;
constexpr std::uint64_t kGoal = kCoin + 1;
constexpr std::uint64_t kMostTries = 64;

// Goals are mostly two or three numbers: a call of memcpy costs more than its copy.
inline void copy_goal(std::byte* to, const std::byte* from, std::uint64_t bytes) {
    if (bytes == 12) return racy_copy(to, from, 12);
    if (bytes == 8) return racy_copy(to, from, 8);
    racy_copy(to, from, bytes);
}

double unit(std::uint64_t bits) { return static_cast<double>(bits >> 11) * 0x1p-53; }

}  // namespace

Goals::Goals(const Table& table, const EpisodePlaces& places, const GoalConfig& config)
    : table_(table), places_(places), config_(config), view_(table, ViewConfig{1, 1.0, {config.achieved}}) {}

// Examples on their way, kept between calls. `at` names the positions that get another goal; of the rows that are read,
// where they are, their words as they were found and as they were when the bytes were copied.
struct Goals::Work {
    std::size_t begin = 0;
    std::size_t count = 0;  // of `at`
    std::vector<std::uint32_t> at;
    std::vector<std::int64_t> steps;
    std::vector<std::uint64_t> slots, seen, copied;
    std::vector<std::uint32_t> missed;
    std::vector<std::uint8_t> failed;  // one a position

    void make_room(std::size_t positions, std::size_t rows) {
        failed.assign(positions, 0);
        if (at.size() < positions) {
            at.resize(positions);
            steps.resize(positions);
        }
        if (slots.size() < rows) {
            slots.resize(rows);
            seen.resize(rows);
            copied.resize(rows);
            missed.resize(rows);
        }
    }
};

// From the example's first row to the row whose outcome is the goal.
inline std::int64_t Goals::steps_to_goal(const EpisodePlace& here, std::size_t position, std::uint64_t attempt,
                                         const Substream& stream) const {
    if (config_.strategy == GoalStrategy::final) return here.left;
    const auto below = [&](std::uint64_t range) {
        return static_cast<std::int64_t>(stream.below(range, position, kGoal + attempt));
    };
    if (config_.strategy == GoalStrategy::future) return below(here.left + 1ull);
    return below(std::uint64_t{here.step} + 1 + here.left) - static_cast<std::int64_t>(here.step);
}

// The goals' rows. Where they are is told first and fetched, for all of them: one by one each would wait for memory.
void Goals::choose(Work& work, const std::uint64_t* slots, const std::uint64_t* words, const Substream& stream) const {
    const std::uint64_t width = table_.width(), all = table_.header().slots;
    for (std::size_t j = 0; j < work.count; ++j) {
        const std::size_t i = work.at[j];
        const EpisodePlace here = places_.at(slots[i]);
        work.steps[j] = 0;
        if (here.left == EpisodePlaces::kOpen) {
            work.failed[i - work.begin] = 1;
            continue;
        }
        work.steps[j] = steps_to_goal(here, i, 0, stream);
        const std::uint64_t there = slots[i] + static_cast<std::uint64_t>(work.steps[j]) * width;
        if (there >= all) continue;
        places_.prefetch(there);
        view_.prefetch(there);
    }
    for (std::size_t j = 0; j < work.count; ++j) {
        const std::size_t i = work.at[j];
        std::uint64_t slot = slots[i], word = words[i];
        if (!places_.move(slot, word, work.steps[j])) {
            slot = slots[i];
            word = words[i];
            if (config_.strategy != GoalStrategy::episode || !choose_left(slot, word, i, stream))
                work.failed[i - work.begin] = 1;
        }
        work.slots[j] = slot;
        work.seen[j] = word;
    }
}

// What read() does where a goal stands in one row as it is: no pass over the rows but the copies.
void Goals::read_plain(Work& work, std::byte* to) const {
    const RowView view = table_.view();
    const Field& field = table_.layout().fields()[config_.achieved.field];
    for (std::size_t j = 0; j < work.count; ++j)
        copy_goal(to + j * field.bytes, view.rows + work.slots[j] * view.stride + field.offset, field.bytes);
    fence(std::memory_order_acquire);
    for (std::size_t j = 0; j < work.count; ++j) {
        if ((table_.load_word(work.slots[j], std::memory_order_relaxed) ^ work.seen[j]) & ~kFlagMask) [[unlikely]]
            work.failed[work.at[j] - work.begin] = 1;
    }
}

// The episode's oldest rows may be gone: then another one, so that all that are left are equally likely.
bool Goals::choose_left(std::uint64_t& slot, std::uint64_t& word, std::size_t position, const Substream& stream) const {
    const EpisodePlace here = places_.at(slot);
    for (std::uint64_t attempt = 1; attempt < kMostTries; ++attempt) {
        std::uint64_t at = slot, seen = word;
        if (places_.move(at, seen, steps_to_goal(here, position, attempt, stream))) {
            slot = at;
            word = seen;
            return true;
        }
    }
    // Nearly all of it is gone: count what is left.
    const std::vector<std::uint64_t> rows = places_.episode(slot, word);
    if (rows.empty()) return false;
    const std::uint64_t own = serial_of(word), end = own + here.left * table_.width();
    slot = rows[stream.below(rows.size(), position, kGoal + kMostTries)];
    word = std::atomic_ref<std::uint64_t>(table_.word(slot)).load(std::memory_order_acquire);
    // One that came since has a later serial. Where several writers share the ring some that are right are passed over
    // too; then another example is drawn.
    return is_live(word, table_.least_word()) && serial_of(word) <= end;
}

// What was achieved after the rows that the entries of `at` name, `each` rows an entry.
void Goals::read(Work& work, std::size_t each, std::byte* to) const {
    const std::size_t rows = work.count * each;
    const Outputs outputs{&to};
    const auto fail = [&](std::size_t row) { work.failed[work.at[row / each] - work.begin] = 1; };
    const std::size_t misses =
        view_.gather(work.slots.data(), 0, rows, outputs, work.copied.data(), work.missed.data(), true);
    for (std::size_t m = 0; m < misses; ++m) fail(work.missed[m]);
    for (std::size_t row = 0; row < rows; ++row) {
        if ((work.copied[row] ^ work.seen[row]) & ~kFlagMask) [[unlikely]]
            fail(row);
    }
}

std::size_t Goals::gather(const std::uint64_t* slots, const std::uint64_t* words, std::size_t begin, std::size_t end,
                          const Substream& stream, const Outputs& batch, const GoalOutputs& out,
                          std::uint32_t* missed) const {
    thread_local Work of_this_thread;
    Work& work = of_this_thread;  // its address is looked up once
    const std::uint64_t steps = config_.n_step, bytes = view_.leaf_bytes(config_.achieved);
    work.begin = begin;
    work.make_room(end - begin, (end - begin) * steps);
    work.count = 0;
    for (std::size_t i = begin; i < end; ++i) {
        places_.prefetch(slots[i]);
        out.relabelled[i] = unit(stream.bits(i, kCoin)) < config_.ratio;
        work.at[work.count] = static_cast<std::uint32_t>(i);
        work.count += out.relabelled[i];
    }
    choose(work, slots, words, stream);
    // A position's coin falls the same way at every attempt: the goals before it stay where they are.
    std::byte* goals = out.goals;
    for (std::size_t i = 0; i < begin; ++i) goals += out.relabelled[i] * bytes;
    if (view_.copies_rows() && !view_.has_mutables()) {
        read_plain(work, goals);
    } else {
        read(work, 1, goals);
    }
    for (std::size_t leaf : config_.desired) {
        for (std::size_t j = 0; j < work.count; ++j)
            copy_goal(batch.flats[leaf] + work.at[j] * bytes, goals + j * bytes, bytes);
    }
    if (out.achieved) {
        work.count = end - begin;
        for (std::size_t i = begin; i < end; ++i) {
            std::uint64_t slot = slots[i], word = words[i];
            const std::size_t first = (i - begin) * steps;
            work.at[i - begin] = static_cast<std::uint32_t>(i);
            out.steps[i] = 1;
            for (std::uint64_t k = 0; k < steps; ++k) {
                if (k > 0 && out.steps[i] == k && table_.successor(slot, word)) ++out.steps[i];
                work.slots[first + k] = slot;
                work.seen[first + k] = word;
            }
        }
        read(work, steps, out.achieved + begin * steps * bytes);
    }
    std::size_t total = 0;
    for (std::size_t i = begin; i < end; ++i) {
        if (work.failed[i - begin]) missed[total++] = static_cast<std::uint32_t>(i);
    }
    return total;
}

}  // namespace sharpwave
