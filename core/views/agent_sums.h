// N-step rewards of agents that end by themselves: each agent's rewards are summed up to its own done, and its discount
// tells over how many steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "table/table.h"
#include "views/example_work.h"
#include "views/view_config.h"

namespace sharpwave {

class AgentSums {
public:
    // Leaves that cannot be summed, or do not belong together, are ErrorKind::schema.
    AgentSums(const Table& table, const ViewConfig& config);

    bool is_empty() const { return groups_.empty(); }
    std::uint64_t agents() const { return agents_; }

    // One example: its rows in turn (with their mutable values, where they have any), then its rewards, dones and
    // discounts to position `place`.
    void begin(ExampleWork& work) const;
    void add(ExampleWork& work, std::uint64_t slot, const std::byte* mutables, double factor) const;
    void put(ExampleWork& work, std::size_t place, const float* discounts, const Outputs& out) const;

private:
    struct Group {
        std::size_t done_leaf, reward_leaf;
        std::uint64_t done_offset, reward_offset;  // in the row
        std::uint64_t agents, rewards_each;
        std::uint32_t done_bytes;  // of one agent's
        bool done_is_real, reward_is_double, reward_is_mutable;
    };
    static bool is_done(const Group& group, const std::byte* value);

    const RowView rows_;
    std::vector<Group> groups_;
    std::uint64_t agents_ = 0, rewards_ = 0, done_bytes_ = 0;  // of all groups
};

}  // namespace sharpwave
