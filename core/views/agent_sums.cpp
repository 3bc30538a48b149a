#include "views/agent_sums.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/error.h"
#include "table/racy.h"

namespace sharpwave {
namespace {

bool is_real(const Field& field) { return field.dtype == "<f4" || field.dtype == "<f8"; }

bool is_plain(const Field& field) { return !field.is_in_heap() && field.stack == 1; }

}  // namespace

AgentSums::AgentSums(const Table& table, const ViewConfig& config) : rows_(table.view()) {
    const std::vector<Field>& fields = table.layout().fields();
    for (const AgentLeaves& leaves : config.agents) {
        const Field& done = fields.at(config.leaves.at(leaves.done).field);
        const Field& reward = fields.at(config.leaves.at(leaves.reward).field);
        const std::uint64_t agents = done.full_bytes / done.item_bytes, items = reward.full_bytes / reward.item_bytes;
        if (!is_plain(done) || !is_plain(reward) || !is_real(reward) || items % agents != 0) {
            throw Error(ErrorKind::schema, "fields '" + done.name + "' and '" + reward.name +
                                               "': n_step > 1 needs rewards in float32 or float64, for each agent");
        }
        groups_.push_back({leaves.done, leaves.reward, done.offset, reward.offset, agents, items / agents,
                           done.item_bytes, is_real(done), reward.item_bytes == 8, reward.is_mutable});
        agents_ += agents;
        rewards_ += items;
        done_bytes_ += done.full_bytes;
    }
}

// Everything but zero, as Python has it. (A float's zero has two signs.)
inline bool AgentSums::is_done(const Group& group, const std::byte* value) {
    if (!group.done_is_real)
        return std::any_of(value, value + group.done_bytes, [](std::byte part) { return part != std::byte{0}; });
    float narrow;
    double wide;
    if (group.done_bytes == 8) return std::memcpy(&wide, value, 8), wide != 0;
    return std::memcpy(&narrow, value, 4), narrow != 0;
}

void AgentSums::begin(ExampleWork& work) const {
    work.sums.assign(rewards_, 0.0);
    work.agent_steps.assign(agents_, 0);
    work.is_out.assign(agents_, 0);
    work.agent_dones.resize(done_bytes_);
}

void AgentSums::add(ExampleWork& work, std::uint64_t slot, const std::byte* mutables, double factor) const {
    const std::byte* row = rows_.rows + slot * rows_.stride;
    double* sums = work.sums.data();
    std::byte* dones = work.agent_dones.data();
    std::size_t agent = 0;
    for (const Group& group : groups_) {
        const std::uint64_t item = group.reward_is_double ? 8 : 4;
        const std::byte* reward = (group.reward_is_mutable ? mutables : row) + group.reward_offset;
        const std::byte* done = row + group.done_offset;
        for (std::uint64_t a = 0; a < group.agents; ++a, ++agent, dones += group.done_bytes, done += group.done_bytes) {
            for (std::uint64_t k = 0; k < group.rewards_each; ++k, reward += item, ++sums) {
                if (work.is_out[agent]) continue;
                float narrow;
                double wide;
                racy_copy(group.reward_is_double ? reinterpret_cast<std::byte*>(&wide)
                                                 : reinterpret_cast<std::byte*>(&narrow),
                          reward, item);
                *sums += factor * (group.reward_is_double ? wide : static_cast<double>(narrow));
            }
            if (work.is_out[agent]) continue;
            racy_copy(dones, done, group.done_bytes);
            ++work.agent_steps[agent];
            work.is_out[agent] = is_done(group, dones);
        }
    }
}

void AgentSums::put(ExampleWork& work, std::size_t place, const float* discounts, const Outputs& out) const {
    const double* sums = work.sums.data();
    const std::byte* dones = work.agent_dones.data();
    for (const Group& group : groups_) {
        const std::uint64_t items = group.agents * group.rewards_each, bytes = group.agents * group.done_bytes;
        std::byte* to = out.flats[group.reward_leaf] + place * items * (group.reward_is_double ? 8 : 4);
        for (std::uint64_t k = 0; k < items; ++k) {
            const float narrow = static_cast<float>(sums[k]);
            if (group.reward_is_double) {
                std::memcpy(to + 8 * k, sums + k, 8);
            } else {
                std::memcpy(to + 4 * k, &narrow, 4);
            }
        }
        std::memcpy(out.flats[group.done_leaf] + place * bytes, dones, bytes);
        sums += items;
        dones += bytes;
    }
    for (std::uint64_t a = 0; out.discounts && a < agents_; ++a)
        out.discounts[place * agents_ + a] = discounts[work.agent_steps[a]];
}

}  // namespace sharpwave
