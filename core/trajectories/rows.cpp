#include "trajectories/rows.h"

#include <algorithm>
#include <cstring>

#include "base/random.h"

namespace sharpwave {
namespace {

// Slabs are far apart: every row is a cache miss, and this many of them wait at the same time.
constexpr std::size_t kAhead = 16;
constexpr std::size_t kLine = 64;
constexpr std::uint64_t kFetched = 16 * kLine;  // of a record; behind that the processor sees the run by itself

const std::byte* find(const RowPlace& row, std::size_t leaf) {
    const LeafPlace& place = row.leaves[leaf];
    const std::uint64_t step = row.step + (place.period ? row.step / place.period + place.shift : 0);
    return row.slab + place.offset + (step * row.envs + row.env) * place.stride;
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

void make_records(const RowPlace& from, std::uint64_t steps, const LeafPlace* record, std::byte* to,
                  const std::size_t* row_bytes, std::size_t leaf_count) {
    RowPlace row = from;
    for (row.step = 0; row.step < steps; ++row.step) {
        for (row.env = 0; row.env < row.envs; ++row.env) {
            for (std::size_t leaf = 0; leaf < leaf_count; ++leaf)
                copy(to + record[leaf].offset, find(row, leaf), row_bytes[leaf]);
            to += from.record_bytes;
        }
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
