// The rows of all trajectories of a buffer: how many each has, which slabs are in memory, and draws over them. The
// caller's lock guards all of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "trajectories/held_slabs.h"
#include "trajectories/rows.h"

namespace sharpwave {

// Some drawn rows. Slabs that were not in memory are missing until fill() brings them.
class TrajectoryDraw {
public:
    explicit TrajectoryDraw(std::shared_ptr<HeldSlabs> slabs)
        : slabs_(std::move(slabs)), began_(slabs_->begin_draw()) {}
    TrajectoryDraw(TrajectoryDraw&& other) noexcept = default;
    ~TrajectoryDraw() {
        if (slabs_) slabs_->end_draw(began_);
    }

    const std::vector<RowPlace>& rows() const { return rows_; }
    std::size_t hits() const { return rows_.size() - missing_.size(); }

    // The numbers of trajectories whose slabs are missing, ascending, each once.
    std::vector<std::int64_t> missing() const;

    // A slab that lacks a drawn row is ErrorKind::storage.
    void fill(std::int64_t number, HeldSlab slab);

    // Every row has its slab, of leaves with rows of these sizes; else ErrorKind::schema.
    void check(const std::vector<LeafTarget>& leaves) const;

private:
    friend class TrajectoryRows;
    std::vector<RowPlace> rows_;
    std::vector<HeldSlab> filled_;
    std::vector<std::pair<std::int64_t, std::size_t>> missing_;  // (number, row), sorted
    std::shared_ptr<HeldSlabs> slabs_;
    std::uint64_t began_;
};

class TrajectoryRows {
public:
    const TrajectorySizes& sizes() const { return sizes_; }

    void append(std::int64_t id, std::uint64_t steps, std::uint64_t envs);
    void drop(std::size_t count);  // the oldest

    // The slab of a trajectory. One of other steps or environments is ErrorKind::storage, a number that is not there
    // ErrorKind::stale_handle.
    void hold(std::uint64_t number, HeldSlab slab);
    void let_go(std::uint64_t number) { slabs_->set(place_of(number), {}); }
    const HeldSlab& slab(std::uint64_t number) const { return (*slabs_)[place_of(number)]; }

    // Draws rows of the newest `window` trajectories uniformly, with replacement; `ids`, `steps` and `envs` get what
    // they are.
    TrajectoryDraw draw(std::size_t count, std::size_t window, std::uint64_t seed, std::uint64_t call,
                        std::int64_t* ids, std::int64_t* steps, std::int64_t* envs) const;

private:
    std::size_t place_of(std::uint64_t number) const;

    TrajectorySizes sizes_;
    std::shared_ptr<HeldSlabs> slabs_ = std::make_shared<HeldSlabs>();  // of trajectories from number base_ on
    std::vector<std::int64_t> ids_;
    std::uint64_t base_ = 0;
};

}  // namespace sharpwave
