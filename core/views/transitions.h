// Rows become examples: n-step returns, next observations taken from the row after, stacks rebuilt from single frames.
//
// Everything is worked out when an example is asked for and nothing is written. An example reads several rows; all of
// them are looked at again at the end, and if one has changed meanwhile the example is thrown away.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "table/mutable_values.h"
#include "table/table.h"
#include "views/agent_sums.h"
#include "views/next_copy.h"
#include "views/prefetch_plan.h"
#include "views/reward_sums.h"
#include "views/stack_copy.h"
#include "views/view_config.h"

namespace sharpwave {

// From here on a copy is worth waking other threads for, and its outputs are worth keeping out of the caches.
inline constexpr std::uint64_t kParallelBytes = 512 << 10;
inline constexpr std::uint64_t kStreamingBytes = 4 << 20;

class Transitions {
public:
    // A reward that cannot be summed is ErrorKind::schema.
    Transitions(const Table& table, ViewConfig config);

    Transitions(const Transitions&) = delete;  // its parts refer to its configuration
    Transitions& operator=(const Transitions&) = delete;

    const ViewConfig& config() const { return config_; }
    std::uint64_t leaf_bytes(const ViewLeaf& leaf) const;  // in a batch, of one example
    std::uint64_t example_bytes() const { return example_bytes_; }
    std::uint32_t stack() const { return stack_; }                                         // the longest
    std::uint64_t discounts() const { return agents_.is_empty() ? 1 : agents_.agents(); }  // of one example

    // Whether none of the rows has changed since examples were made from them.
    bool are_unchanged(const std::vector<Touched>& touched) const;

    // Makes the examples of positions begin..end that start at slots[begin..end); `words` gets the words of those rows.
    // Positions without one (the row is no longer there, or something it needs) go to `missed`; returns their number.
    // `single`: one-step examples, whatever n_step says.
    std::size_t gather(const std::uint64_t* slots, std::size_t begin, std::size_t end, const Outputs& out,
                       std::uint64_t* words, std::uint32_t* missed, bool single = false) const;

    // Asks for what an example that starts here reads; costs next to nothing.
    void prefetch(std::uint64_t slot) const { fetched_.fetch(rows_.rows + slot * rows_.stride); }

    // Whether some leaf is a mutable field: its values do not stand in the row.
    bool has_mutables() const { return !mutable_leaves_.empty(); }

    // Where examples are rows as they stand: `count` of them, each `step` slots after the one before, from `slot` on,
    // to positions place.. of `out`. Their words are the caller's to check.
    bool copies_rows() const { return is_plain_; }
    void copy_run(std::uint64_t slot, std::uint64_t step, std::size_t count, std::size_t place, const Outputs& out,
                  bool streaming) const;

private:
    struct Moves;
    // A leaf whose value stands in the row, or among the row's mutable values.
    struct LeafPlace {
        std::size_t leaf;
        std::uint64_t offset, bytes;
        Role role;
    };
    std::size_t gather_pieces(const std::uint64_t* slots, std::size_t begin, std::size_t end, const Outputs& out,
                              std::uint64_t* words, std::uint32_t* missed, bool single) const;
    std::size_t gather_steps(const std::uint64_t* slots, std::size_t begin, std::size_t end, const Outputs& out,
                             std::uint64_t* words, std::uint32_t* missed, bool single) const;
    std::size_t gather_part(const std::uint64_t* slots, std::size_t begin, std::size_t end, const Outputs& out,
                            std::uint64_t* words, std::uint32_t* missed, bool single, std::size_t fetch_end) const;
    std::size_t gather_plain(const std::uint64_t* slots, std::size_t begin, std::size_t end, const Outputs& out,
                             std::uint64_t* words, std::uint32_t* missed) const;
    std::size_t gather_neighbours(std::uint64_t slot, std::size_t begin, std::size_t end, const Outputs& out,
                                  std::uint64_t* words, std::uint32_t* missed) const;
    void copy_mutables(std::uint64_t slot, std::size_t place, const Outputs& out) const;
    std::size_t gather_mutables(const std::uint64_t* slots, std::size_t begin, std::size_t end, const Outputs& out,
                                const std::uint64_t* words, std::uint32_t* missed, std::size_t misses) const;
    const std::byte* walk_mutables(ExampleWork& work, std::uint64_t slot, std::size_t place, bool is_first,
                                   const Outputs& out) const;
    void stand_in(ExampleWork& work, const std::uint64_t* slots, std::size_t count) const;
    void name_frames(const ExampleWork& work, std::size_t i, Places& places) const;
    void copy_fixed(Role role, const std::uint64_t* from, std::size_t begin, std::size_t count, std::uint32_t n_step,
                    const Outputs& out, bool streaming) const;
    bool gather_one(std::uint64_t slot, std::size_t position, std::uint32_t n_step, const Outputs& out,
                    std::uint64_t* words) const;
    void check_again(ExampleWork& work) const;
    void name_rows(const ExampleWork& work, const std::uint64_t* slots, std::size_t count, Places& places) const;
    bool walk(ExampleWork& work, std::size_t position, std::uint64_t slot, std::uint32_t n_step, std::uint64_t least,
              const Outputs& out) const;
    std::uint32_t sum_rewards(ExampleWork& work, std::size_t position, std::uint64_t& slot, std::uint64_t& word,
                              std::uint32_t n_step, const Outputs& out) const;
    std::uint32_t sum_agents(ExampleWork& work, std::size_t position, std::uint64_t& slot, std::uint64_t& word,
                             std::uint32_t n_step, const Outputs& out) const;
    bool can_be_short() const;
    bool has_small_rows() const;

    const Table& table_;
    const RowView rows_;
    const std::uint64_t width_;
    const ViewConfig config_;
    const std::uint32_t stack_;  // frames of the longest stack
    const StackCopy stacks_;
    const NextCopy next_;
    const MutableValues mutables_;
    std::vector<LeafPlace> row_leaves_, mutable_leaves_;
    const AgentSums agents_;
    RewardSums rewards_;  // unless agents have their own
    PrefetchPlan fetched_;
    bool is_plain_;          // every leaf is a fixed field of the row drawn
    bool is_short_ = false;  // examples that gather_steps() makes
    bool derives_ = false;
    bool pads_zero_ = false;  // some stack does
    std::uint64_t example_bytes_ = 0;
    std::vector<double> powers_;    // of gamma
    std::vector<float> discounts_;  // the same, as batches give them
};

}  // namespace sharpwave
