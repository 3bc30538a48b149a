// The rewards of an example's steps, each times a power of gamma, summed over whole rows. (Where agents end by
// themselves: AgentSums.)
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "table/racy.h"
#include "table/table.h"
#include "views/view_config.h"

namespace sharpwave {

class RewardSums {
public:
    explicit RewardSums(const RowView& rows) : rows_(rows) {}

    void include(std::size_t leaf, const Field& field) {
        rewards_.push_back(
            {leaf, field.offset, field.full_bytes / field.item_bytes, field.item_bytes == 8, field.is_mutable});
        items_ += rewards_.back().items;
        is_one_float_ = items_ == 1 && !rewards_[0].is_double && !rewards_[0].is_mutable;
    }

    std::uint64_t items() const { return items_; }  // numbers of one example
    bool is_one_float() const { return is_one_float_; }
    std::uint64_t offset() const { return rewards_.empty() ? 0 : rewards_[0].offset; }  // of the first in a row
    std::size_t leaf() const { return rewards_.empty() ? 0 : rewards_[0].leaf; }

    // The rewards of a row, times a factor, into the sums. `mutables`: the row's mutable values, if it has any.
    void add(std::uint64_t slot, const std::byte* mutables, double factor, double* sums) const {
        const std::byte* row = rows_.rows + slot * rows_.stride;
        if (is_one_float_) [[likely]] {
            *sums += factor * number<float>(row + rewards_[0].offset);
            return;
        }
        for (const Reward& reward : rewards_) {
            const std::byte* from = (reward.is_mutable ? mutables : row) + reward.offset;
            for (std::uint64_t k = 0; k < reward.items; ++k)
                sums[k] += factor * (reward.is_double ? number<double>(from + 8 * k) : number<float>(from + 4 * k));
            sums += reward.items;
        }
    }

    // The sums to position `place` of a batch.
    void put(const double* sums, std::size_t place, const Outputs& out) const {
        for (const Reward& reward : rewards_) {
            std::byte* to = out.flats[reward.leaf] + place * reward.items * (reward.is_double ? 8 : 4);
            for (std::uint64_t k = 0; k < reward.items; ++k) {
                const float narrow = static_cast<float>(sums[k]);
                if (reward.is_double) {
                    std::memcpy(to + 8 * k, sums + k, 8);
                } else {
                    std::memcpy(to + 4 * k, &narrow, 4);
                }
            }
            sums += reward.items;
        }
    }

private:
    struct Reward {
        std::size_t leaf;
        std::uint64_t offset, items;  // where its numbers are in a row, or among its mutable values
        bool is_double, is_mutable;
    };
    template <class Number>
    static double number(const std::byte* from) {
        Number value;
        racy_copy(reinterpret_cast<std::byte*>(&value), from, sizeof value);
        return static_cast<double>(value);
    }

    const RowView rows_;
    std::vector<Reward> rewards_;
    std::uint64_t items_ = 0;
    bool is_one_float_ = false;
};

}  // namespace sharpwave
