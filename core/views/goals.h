// Hindsight: which goal an example gets instead of its own. The goal is what was achieved after another step of the
// same episode; what to do with it is the caller's matter.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/random.h"
#include "table/episode_places.h"
#include "views/transitions.h"

namespace sharpwave {

enum class GoalStrategy { future, final, episode };

struct GoalConfig {
    GoalStrategy strategy = GoalStrategy::future;
    double ratio = 0.8;
    ViewLeaf achieved;  // what was achieved after a step
    std::uint32_t n_step = 1;
    std::vector<std::size_t> desired = {};  // leaves of the batch that the new goals are put into
};

// One entry a position, but for the goals.
struct GoalOutputs {
    std::byte* goals = nullptr;          // of the relabelled positions alone, side by side
    std::uint8_t* relabelled = nullptr;  // 0 or 1
    std::byte* achieved = nullptr;       // n_step > 1: after each step of the example, n_step of them ...
    std::uint32_t* steps = nullptr;      // ... of which this many are
};

class Goals {
public:
    Goals(const Table& table, const EpisodePlaces& places, const GoalConfig& config);

    // For the examples of positions begin..end, whose other arrays stand in `batch`. Positions whose goal could not be
    // read go to `missed`.
    std::size_t gather(const std::uint64_t* slots, const std::uint64_t* words, std::size_t begin, std::size_t end,
                       const Substream& stream, const Outputs& batch, const GoalOutputs& out,
                       std::uint32_t* missed) const;

private:
    struct Work;
    void choose(Work& work, const std::uint64_t* slots, const std::uint64_t* words, const Substream& stream) const;
    std::int64_t steps_to_goal(const format::EpisodePlace& here, std::size_t position, std::uint64_t attempt,
                               const Substream& stream) const;
    bool choose_left(std::uint64_t& slot, std::uint64_t& word, std::size_t position, const Substream& stream) const;
    void read(Work& work, std::size_t each, std::byte* to) const;
    void read_plain(Work& work, std::byte* to) const;

    const Table& table_;
    const EpisodePlaces& places_;
    GoalConfig config_;
    Transitions view_;
};

}  // namespace sharpwave
