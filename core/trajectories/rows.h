// Rows of trajectories. A trajectory is a slab of (steps, envs) arrays, one a leaf, in memory or in a mapped file: both
// have the same layout, so one gather reads both. Nothing here owns a slab.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace sharpwave {

// Where a leaf stands in its slab. Flags bring one row more at the start of every epoch, values one at its end:
// step t stands at row t + t / period + shift. A period of 0: no such rows.
struct LeafPlace {
    std::uint64_t offset = 0, period = 0, shift = 0;
};

// One drawn row and the slab that it is in.
struct RowPlace {
    const std::byte* slab = nullptr;
    const LeafPlace* leaves = nullptr;
    std::uint64_t envs = 1;
    std::uint64_t step = 0, env = 0;
};

// Copies leaf number `leaf` of every row, `row_bytes` each, to `to`, one after the other.
void gather_leaf(const RowPlace* rows, std::size_t count, std::size_t leaf, std::size_t row_bytes, std::byte* to);

// How many rows each trajectory has, oldest first. Trajectories are known by their number, which counts every one that
// ever came. Dropping and appending cost O(1) (amortised); a draw costs O(log(trajectories)) a row.
class TrajectorySizes {
public:
    void append(std::uint64_t steps, std::uint64_t envs);
    void drop_oldest(std::size_t count);
    void clear() { drop_oldest(size()); }

    std::uint64_t first() const { return base_ + first_; }  // number of the oldest
    std::size_t size() const { return envs_.size() - first_; }

    // Rows of the newest `window` trajectories; 0: of all.
    std::uint64_t rows(std::size_t window) const;

    // Draws rows of that window uniformly, with replacement. There must be one.
    void draw(std::uint64_t seed, std::uint64_t call, std::size_t window, std::size_t count, std::int64_t* numbers,
              std::int64_t* steps, std::int64_t* envs) const;

private:
    std::size_t oldest(std::size_t window) const;

    std::vector<std::uint64_t> starts_{0};  // row at which each trajectory starts; one more than trajectories
    std::vector<std::uint64_t> envs_;
    std::size_t first_ = 0;    // trajectories in front that were dropped and still have their place
    std::uint64_t base_ = 0;  // number of the trajectory at place 0
};

}  // namespace sharpwave
