#include "views/prefetch_plan.h"

#include <algorithm>
#include <utility>

namespace sharpwave {

namespace {

constexpr std::size_t kMostOffsets = 16;  // lines of an example: eight steps or so

}  // namespace

void PrefetchPlan::want(std::uint64_t from, std::uint64_t to) {
    for (std::uint64_t at = from;; at += 64) {
        const std::uint64_t point = std::min(at, to - 1);
        // Rows start at multiples of 8.
        const auto is_near = [&](std::uint64_t other) { return other / 8 == point / 8; };
        if (offsets_.size() < kMostOffsets && std::none_of(offsets_.begin(), offsets_.end(), is_near))
            offsets_.push_back(point);
        if (point == to - 1) return;
    }
}

PrefetchPlan::PrefetchPlan(const Table& table, const ViewConfig& config, bool is_small, bool derives) {
    if (!is_small) {
        want(0, std::min<std::uint64_t>(table.header().row_bytes, 256));
        return;
    }
    const std::uint64_t step = table.header().row_bytes * table.width();
    for (std::uint32_t k = 0; k < config.n_step + derives; ++k) {
        std::vector<std::pair<std::uint64_t, std::uint64_t>> parts = {{0, 8}};  // the word
        for (const ViewLeaf& leaf : config.leaves) {
            const Field& field = table.layout().fields()[leaf.field];
            const bool is_read = leaf.role == Role::reward ? k < config.n_step
                                 : leaf.role == Role::own  ? k == 0
                                 : leaf.role == Role::last ? k + 1 == config.n_step
                                                           : k == config.n_step;
            if (is_read && !field.is_mutable) parts.emplace_back(field.offset, field.offset + field.bytes);
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

}  // namespace sharpwave
