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

double unit(std::uint64_t bits) { return static_cast<double>(bits >> 11) * 0x1p-53; }

}  // namespace

Goals::Goals(const Table& table, const EpisodePlaces& places, const GoalConfig& config)
    : table_(table), places_(places), config_(config), view_(table, ViewConfig{1, 1.0, {config.achieved}}) {}

// From the example's first row to the row whose outcome is the goal.
bool Goals::choose(std::uint64_t& slot, std::uint64_t& word, std::size_t position, const Substream& stream) const {
    const EpisodePlace here = places_.at(slot);
    if (here.left == EpisodePlaces::kOpen) return false;
    switch (config_.strategy) {
        case GoalStrategy::final:
            return places_.move(slot, word, here.left);
        case GoalStrategy::future:
            return places_.move(slot, word, static_cast<std::int64_t>(stream.below(here.left + 1ull, position, kGoal)));
        case GoalStrategy::episode:
            break;
    }
    // Its oldest rows may be gone: then another one of the episode, so that all that are left are equally likely.
    const std::uint64_t length = std::uint64_t{here.step} + 1 + here.left;
    for (std::uint64_t attempt = 0; attempt < kMostTries; ++attempt) {
        std::uint64_t at = slot, seen = word;
        const auto step = static_cast<std::int64_t>(stream.below(length, position, kGoal + attempt));
        if (places_.move(at, seen, step - static_cast<std::int64_t>(here.step))) {
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

std::size_t Goals::gather(const std::uint64_t* slots, const std::uint64_t* words, std::size_t begin, std::size_t end,
                          const Substream& stream, const Outputs& batch, const GoalOutputs& out,
                          std::uint32_t* missed) const {
    struct Scratch {
        std::vector<std::uint64_t> slots, seen, copied;
        std::vector<std::uint32_t> missed;
        std::vector<std::uint8_t> failed;
    };
    thread_local Scratch scratch;
    const std::uint64_t steps = config_.n_step;
    if (scratch.slots.size() < end * steps) {
        scratch.slots.resize(end * steps);
        scratch.seen.resize(end * steps);
        scratch.copied.resize(end * steps);
        scratch.missed.resize(end * steps);
    }
    scratch.failed.assign(end - begin, 0);
    const auto read = [&](std::uint64_t each, std::byte* to) {
        const Outputs outputs{&to};
        const std::size_t misses = view_.gather(scratch.slots.data(), begin * each, end * each, outputs,
                                                scratch.copied.data(), scratch.missed.data(), true);
        for (std::size_t m = 0; m < misses; ++m) scratch.failed[scratch.missed[m] / each - begin] = 1;
        for (std::size_t at = begin * each; at < end * each; ++at) {
            if ((scratch.copied[at] ^ scratch.seen[at]) & ~kFlagMask) scratch.failed[at / each - begin] = 1;
        }
    };
    for (std::size_t i = begin; i < end; ++i) {
        std::uint64_t slot = slots[i], word = words[i];
        out.relabelled[i] = unit(stream.bits(i, kCoin)) < config_.ratio;
        if (out.relabelled[i] && !choose(slot, word, i, stream)) scratch.failed[i - begin] = 1;
        scratch.slots[i] = slot;
        scratch.seen[i] = word;
    }
    read(1, out.goals);
    const std::uint64_t bytes = view_.leaf_bytes(config_.achieved);
    for (std::size_t leaf : config_.desired) {
        for (std::size_t i = begin; i < end; ++i) {
            if (out.relabelled[i]) std::memcpy(batch.flats[leaf] + i * bytes, out.goals + i * bytes, bytes);
        }
    }
    if (out.achieved) {
        for (std::size_t i = begin; i < end; ++i) {
            std::uint64_t slot = slots[i], word = words[i];
            out.steps[i] = 1;
            for (std::uint64_t k = 0; k < steps; ++k) {
                if (k > 0 && out.steps[i] == k && table_.successor(slot, word)) ++out.steps[i];
                scratch.slots[i * steps + k] = slot;
                scratch.seen[i * steps + k] = word;
            }
        }
        read(steps, out.achieved);
    }
    std::size_t total = 0;
    for (std::size_t i = begin; i < end; ++i) {
        if (scratch.failed[i - begin]) missed[total++] = static_cast<std::uint32_t>(i);
    }
    return total;
}

}  // namespace sharpwave
