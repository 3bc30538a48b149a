// Rows of trajectories. A trajectory is a slab: (steps, envs) arrays, one a leaf, as its file has them; or, in the
// cache, one record a row with all its leaves side by side, which a random read gets with a few cache lines and one
// page. Nothing here owns a slab.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace sharpwave {

// Where a leaf stands in its slab: its first row, the bytes of a row, and the bytes from one step and from one
// environment to the next (0 environments apart: all share one row). Flags bring one row more at the start of every
// epoch, values one at its end: step t stands at row t + t / period + shift. A period of 0: no such rows.
struct LeafPlace {
    std::uint64_t offset = 0, row_bytes = 0, step_bytes = 0, env_bytes = 0, period = 0, shift = 0;
};

// The layout of one kind of slab. record_bytes of 0: arrays; else records, and a leaf's offset is inside of its record.
struct SlabLayout {
    std::uint64_t steps = 0, envs = 0, bytes = 0, record_bytes = 0;
    std::vector<LeafPlace> leaves;

    // Throws ErrorKind::storage unless every row of every leaf lies within `bytes`. Layouts come from files: nothing
    // else stands between a forged number and the memory that gather_rows() reads.
    void check() const;
};

// One drawn row and the slab that it is in.
struct RowPlace {
    const std::byte* slab = nullptr;
    const LeafPlace* leaves = nullptr;
    std::uint32_t leaf_count = 0;
    std::uint64_t envs = 1;
    std::uint64_t record_bytes = 0;  // of a slab of records; 0: arrays
    std::uint64_t step = 0, env = 0;
};

// Where the rows of a leaf go, one after the other.
struct LeafTarget {
    std::byte* to;
    std::size_t row_bytes;
};

// Copies every leaf of every row.
void gather_rows(const RowPlace* rows, std::size_t count, const LeafTarget* leaves, std::size_t leaf_count);

// Makes records of a slab of arrays. The layouts must be of the same steps, environments and leaves.
void make_records(const std::byte* slab, const SlabLayout& arrays, const SlabLayout& records, std::byte* to);

// How many rows each trajectory has, oldest first. Trajectories are known by their number, which counts every one that
// ever came. Dropping and appending cost O(1) (amortised); a draw costs O(log(trajectories)) a row.
class TrajectorySizes {
public:
    // Throws ErrorKind::storage where there are no steps or environments, or more rows than can be counted.
    void append(std::uint64_t steps, std::uint64_t envs);
    void drop_oldest(std::size_t count);
    void clear() { drop_oldest(size()); }

    std::uint64_t first() const { return base_ + first_; }  // number of the oldest
    std::size_t size() const { return envs_.size() - first_; }

    // Steps and environments of a trajectory that is there.
    std::uint64_t steps_of(std::uint64_t number) const;
    std::uint64_t envs_of(std::uint64_t number) const { return envs_[number - base_]; }

    // Rows of the newest `window` trajectories; 0: of all.
    std::uint64_t rows(std::size_t window) const;

    // Draws rows of that window uniformly, with replacement. There must be one.
    void draw(std::uint64_t seed, std::uint64_t call, std::size_t window, std::size_t count, std::int64_t* numbers,
              std::int64_t* steps, std::int64_t* envs) const;

private:
    std::size_t oldest(std::size_t window) const;

    std::vector<std::uint64_t> starts_{0};  // row at which each trajectory starts; one more than trajectories
    std::vector<std::uint64_t> envs_;
    std::size_t first_ = 0;   // trajectories in front that were dropped and still have their place
    std::uint64_t base_ = 0;  // number of the trajectory at place 0
};

}  // namespace sharpwave
