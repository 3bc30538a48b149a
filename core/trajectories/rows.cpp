#include "trajectories/rows.h"

#include <algorithm>
#include <cstring>

#include <string>

#include "base/error.h"
#include "base/random.h"
#include "base/wide.h"

namespace sharpwave {
namespace {

// Slabs are far apart: every row is a cache miss, and this many of them wait at the same time.
constexpr std::size_t kAhead = 16;
constexpr std::size_t kLine = 64;
constexpr std::uint64_t kFetched = 16 * kLine;  // of a record; behind that the processor sees the run by itself

const std::byte* find(const RowPlace& row, std::size_t leaf) {
    const LeafPlace& place = row.leaves[leaf];
    const std::uint64_t step = row.step + (place.period ? row.step / place.period + place.shift : 0);
    return row.slab + place.offset + step * place.step_bytes + row.env * place.env_bytes;
}

// A size known to the compiler is a load and a store.
inline void copy(std::byte* to, const std::byte* from, std::size_t bytes) {
    switch (bytes) {
        case 1:
            *to = *from;
            return;
        case 4:
            std::memcpy(to, from, 4);
            return;
        case 8:
            std::memcpy(to, from, 8);
            return;
        default:
            std::memcpy(to, from, bytes);
    }
}

void fetch(const RowPlace& row, std::size_t leaf_count) {
    if (!row.record_bytes) {
        for (std::size_t leaf = 0; leaf < leaf_count; ++leaf) __builtin_prefetch(find(row, leaf));
        return;
    }
    const std::byte* record = row.slab + (row.step * row.envs + row.env) * row.record_bytes;
    for (std::uint64_t at = 0; at < std::min(row.record_bytes, kFetched); at += kLine) __builtin_prefetch(record + at);
}

}  // namespace

void gather_rows(const RowPlace* rows, std::size_t count, const LeafTarget* leaves, std::size_t leaf_count) {
    for (std::size_t i = 0; i < std::min(count, kAhead); ++i) fetch(rows[i], leaf_count);
    for (std::size_t i = 0; i < count; ++i) {
        if (i + kAhead < count) fetch(rows[i + kAhead], leaf_count);
        const RowPlace& row = rows[i];
        if (row.record_bytes) {
            const std::byte* record = row.slab + (row.step * row.envs + row.env) * row.record_bytes;
            for (std::size_t leaf = 0; leaf < leaf_count; ++leaf) {
                const std::size_t bytes = leaves[leaf].row_bytes;
                copy(leaves[leaf].to + i * bytes, record + row.leaves[leaf].offset, bytes);
            }
        } else {
            for (std::size_t leaf = 0; leaf < leaf_count; ++leaf) {
                const std::size_t bytes = leaves[leaf].row_bytes;
                copy(leaves[leaf].to + i * bytes, find(row, leaf), bytes);
            }
        }
    }
}

void SlabLayout::check() const {
    constexpr std::uint64_t most = std::uint64_t{1} << 62;
    const auto fail = [](const std::string& what) { throw Error(ErrorKind::storage, "the layout of a slab: " + what); };
    if (steps == 0 || envs == 0 || steps > most || envs > most || Wide{steps} * envs > most) {
        fail("expected at least one step and one environment, and less than 2^62 rows, got " + std::to_string(steps) +
             " steps of " + std::to_string(envs));
    }
    if (bytes > most || record_bytes > most || Wide{steps} * envs * record_bytes > bytes) {
        fail("its records need more than its " + std::to_string(bytes) + " bytes");
    }
    for (std::size_t number = 0; number < leaves.size(); ++number) {
        const LeafPlace& leaf = leaves[number];
        const Wide row = Wide{leaf.offset} + leaf.row_bytes;
        bool is_inside = leaf.row_bytes <= most && leaf.offset <= most && leaf.shift <= 1;
        if (record_bytes) {
            is_inside = is_inside && row <= record_bytes;
        } else {
            is_inside = is_inside && leaf.step_bytes <= most && leaf.env_bytes <= most;
            const std::uint64_t last = steps - 1 + (leaf.period ? (steps - 1) / leaf.period + leaf.shift : 0);
            is_inside = is_inside && row + Wide{last} * leaf.step_bytes + Wide{envs - 1} * leaf.env_bytes <= bytes;
        }
        if (!is_inside) fail("leaf " + std::to_string(number) + " ends behind its " + std::to_string(bytes) + " bytes");
    }
}

void make_records(const std::byte* slab, const SlabLayout& arrays, const SlabLayout& records, std::byte* to) {
    RowPlace row;
    row.slab = slab;
    row.leaves = arrays.leaves.data();
    for (row.step = 0; row.step < arrays.steps; ++row.step) {
        for (row.env = 0; row.env < arrays.envs; ++row.env) {
            for (std::size_t leaf = 0; leaf < arrays.leaves.size(); ++leaf)
                copy(to + records.leaves[leaf].offset, find(row, leaf), arrays.leaves[leaf].row_bytes);
            to += records.record_bytes;
        }
    }
}

void TrajectorySizes::append(std::uint64_t steps, std::uint64_t envs) {
    constexpr std::uint64_t most = std::uint64_t{1} << 62;
    if (steps == 0 || envs == 0 || Wide{steps} * envs + starts_.back() > most) {
        throw Error(ErrorKind::storage, "a trajectory of " + std::to_string(steps) + " steps and " +
                                            std::to_string(envs) +
                                            " environments: none, or more rows than can be counted");
    }
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

std::uint64_t TrajectorySizes::steps_of(std::uint64_t number) const {
    const std::size_t place = number - base_;
    return (starts_[place + 1] - starts_[place]) / envs_[place];
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
