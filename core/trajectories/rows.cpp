#include "trajectories/rows.h"

#include <algorithm>
#include <cstring>

#include "base/random.h"

namespace sharpwave {
namespace {

// Slabs are far apart: every row is a cache miss, and this many of them wait at the same time.
constexpr std::size_t kAhead = 16;

const std::byte* find(const RowPlace& row, std::size_t leaf, std::size_t row_bytes) {
    const LeafPlace& place = row.leaves[leaf];
    const std::uint64_t step = row.step + (place.period ? row.step / place.period + place.shift : 0);
    return row.slab + place.offset + (step * row.envs + row.env) * row_bytes;
}

// A size known to the compiler is a load and a store; 0: any size.
template <std::size_t kBytes>
void copy(const RowPlace* rows, std::size_t count, std::size_t leaf, std::size_t row_bytes, std::byte* to) {
    const std::size_t bytes = kBytes ? kBytes : row_bytes;
    for (std::size_t i = 0; i < count; ++i) {
        if (i + kAhead < count) {
            const std::byte* next = find(rows[i + kAhead], leaf, bytes);
            __builtin_prefetch(next);
            if (bytes > 64) __builtin_prefetch(next + 64);
        }
        std::memcpy(to + i * bytes, find(rows[i], leaf, bytes), bytes);
    }
}

}  // namespace

void gather_leaf(const RowPlace* rows, std::size_t count, std::size_t leaf, std::size_t row_bytes, std::byte* to) {
    switch (row_bytes) {
        case 0:
            return;
        case 1:
            return copy<1>(rows, count, leaf, row_bytes, to);
        case 4:
            return copy<4>(rows, count, leaf, row_bytes, to);
        case 8:
            return copy<8>(rows, count, leaf, row_bytes, to);
        case 16:
            return copy<16>(rows, count, leaf, row_bytes, to);
        default:
            return copy<0>(rows, count, leaf, row_bytes, to);
    }
}

void TrajectorySizes::append(std::uint64_t steps, std::uint64_t envs) {
    envs_.push_back(envs);
    starts_.push_back(starts_.back() + steps * envs);
}

void TrajectorySizes::drop_oldest(std::size_t count) {
    first_ += std::min(count, size());
    if (first_ < 1'024 || first_ < envs_.size() / 2) return;
    envs_.erase(envs_.begin(), envs_.begin() + static_cast<std::ptrdiff_t>(first_));
    starts_.erase(starts_.begin(), starts_.begin() + static_cast<std::ptrdiff_t>(first_));
    base_ += first_;
    first_ = 0;
}

std::size_t TrajectorySizes::oldest(std::size_t window) const {
    return window == 0 || window >= size() ? first_ : envs_.size() - window;
}

std::uint64_t TrajectorySizes::rows(std::size_t window) const { return starts_.back() - starts_[oldest(window)]; }

void TrajectorySizes::draw(std::uint64_t seed, std::uint64_t call, std::size_t window, std::size_t count,
                           std::int64_t* numbers, std::int64_t* steps, std::int64_t* envs) const {
    const Substream stream(seed, call);
    const std::size_t from = oldest(window);
    const auto begin = starts_.begin() + static_cast<std::ptrdiff_t>(from);
    const std::uint64_t range = starts_.back() - *begin;
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint64_t row = *begin + stream.below(range, i);
        const auto after = std::upper_bound(begin, starts_.end(), row);
        const auto place = static_cast<std::size_t>(after - starts_.begin()) - 1;
        const std::uint64_t inside = row - starts_[place];
        numbers[i] = static_cast<std::int64_t>(base_ + place);
        steps[i] = static_cast<std::int64_t>(inside / envs_[place]);
        envs[i] = static_cast<std::int64_t>(inside % envs_[place]);
    }
}

}  // namespace sharpwave
