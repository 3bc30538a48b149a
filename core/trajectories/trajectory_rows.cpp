#include "trajectories/trajectory_rows.h"

#include <algorithm>
#include <string>

#include "base/error.h"

namespace sharpwave {

namespace {

void point_to(RowPlace& row, const std::byte* data, const SlabLayout& layout) {
    row.slab = data;
    row.leaves = layout.leaves.data();
    row.envs = layout.envs;
    row.record_bytes = layout.record_bytes;
    row.leaf_count = static_cast<std::uint32_t>(layout.leaves.size());
}

}  // namespace

std::vector<std::int64_t> TrajectoryDraw::missing() const {
    std::vector<std::int64_t> numbers;
    for (const auto& [number, row] : missing_) {
        if (numbers.empty() || numbers.back() != number) numbers.push_back(number);
    }
    return numbers;
}

void TrajectoryDraw::fill(std::int64_t number, HeldSlab slab) {
    auto at = std::lower_bound(missing_.begin(), missing_.end(), std::pair{number, std::size_t{0}});
    for (; at != missing_.end() && at->first == number; ++at) {
        RowPlace& row = rows_[at->second];
        if (row.step >= slab.layout->steps || row.env >= slab.layout->envs) {
            throw Error(ErrorKind::storage, "trajectory number " + std::to_string(number) + " has no step " +
                                                std::to_string(row.step) + " of environment " +
                                                std::to_string(row.env));
        }
        point_to(row, slab.data, *slab.layout);
    }
    filled_.push_back(std::move(slab));
}

void TrajectoryDraw::check(const std::vector<LeafTarget>& leaves) const {
    const LeafPlace* checked = nullptr;  // the rows of one layout mostly follow each other
    for (const RowPlace& row : rows_) {
        if (!row.slab) throw Error(ErrorKind::schema, "gather: a slab is missing; this is a defect of Sharpwave");
        if (row.leaves == checked) continue;
        checked = row.leaves;
        for (std::size_t leaf = 0; leaf < leaves.size(); ++leaf) {
            if (row.leaf_count != leaves.size() || checked[leaf].row_bytes != leaves[leaf].row_bytes)
                throw Error(ErrorKind::schema, "gather: rows of another kind; this is a defect of Sharpwave");
        }
    }
}

std::size_t TrajectoryRows::place_of(std::uint64_t number) const {
    if (number < sizes_.first() || number >= sizes_.first() + sizes_.size())
        throw Error(ErrorKind::stale_handle, "there is no trajectory number " + std::to_string(number));
    return number - base_;
}

void TrajectoryRows::append(std::int64_t id, std::uint64_t steps, std::uint64_t envs) {
    sizes_.append(steps, envs);
    slabs_->append();
    ids_.push_back(id);
}

void TrajectoryRows::drop(std::size_t count) {
    count = std::min(count, sizes_.size());
    const std::uint64_t first = sizes_.first();
    for (std::size_t i = 0; i < count; ++i) slabs_->set(first + i - base_, {});
    sizes_.drop_oldest(count);
    const std::uint64_t gone = sizes_.first() - base_;
    if (gone < 1'024 || gone < ids_.size() / 2) return;
    slabs_->drop_front(gone);
    ids_.erase(ids_.begin(), ids_.begin() + static_cast<std::ptrdiff_t>(gone));
    base_ += gone;
}

void TrajectoryRows::hold(std::uint64_t number, HeldSlab slab) {
    const std::size_t place = place_of(number);
    const SlabLayout& layout = *slab.layout;
    if (layout.steps != sizes_.steps_of(number) || layout.envs != sizes_.envs_of(number)) {
        throw Error(ErrorKind::storage, "trajectory number " + std::to_string(number) + ": expected a slab of " +
                                            std::to_string(sizes_.steps_of(number)) + " steps and " +
                                            std::to_string(sizes_.envs_of(number)) + " environments, got " +
                                            std::to_string(layout.steps) + " and " + std::to_string(layout.envs));
    }
    slabs_->set(place, std::move(slab));
}

TrajectoryDraw TrajectoryRows::draw(std::size_t count, std::size_t window, std::uint64_t seed, std::uint64_t call,
                                    std::int64_t* ids, std::int64_t* steps, std::int64_t* envs) const {
    TrajectoryDraw draw(slabs_);
    std::int64_t* numbers = ids;  // until the ids are known
    sizes_.draw(seed, call, window, count, numbers, steps, envs);
    draw.rows_.resize(count);
    for (std::size_t i = 0; i < count; ++i) {
        const std::size_t place = static_cast<std::uint64_t>(numbers[i]) - base_;
        const HeldSlabs::Spot& spot = slabs_->spot(place);
        RowPlace& row = draw.rows_[i];
        if (spot.data) {
            point_to(row, spot.data, *spot.layout);
        } else {
            draw.missing_.emplace_back(numbers[i], i);
        }
        row.step = static_cast<std::uint64_t>(steps[i]);
        row.env = static_cast<std::uint64_t>(envs[i]);
        ids[i] = ids_[place];
    }
    std::sort(draw.missing_.begin(), draw.missing_.end());
    return draw;
}

}  // namespace sharpwave
