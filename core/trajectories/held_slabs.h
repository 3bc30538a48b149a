// The slabs of trajectories that are in memory or mapped, by place.
//
// A draw points into slabs without taking a reference to each one: a thousand reference counts that no cache holds cost
// more than copying the rows. So a slab that is let go while draws run is kept until every draw that began before is
// done. The caller's lock guards all of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "trajectories/rows.h"

namespace sharpwave {

struct HeldSlab {
    std::shared_ptr<const void> owner;  // keeps the bytes and the layout; null: there is no slab
    const std::byte* data = nullptr;
    const SlabLayout* layout = nullptr;
};

class HeldSlabs {
public:
    // What a draw has to know of one: 16 bytes, so that those of many trajectories stay in the caches.
    struct Spot {
        const std::byte* data = nullptr;
        const SlabLayout* layout = nullptr;
    };

    const Spot& spot(std::size_t place) const { return spots_[place]; }
    const HeldSlab& operator[](std::size_t place) const { return held_[place]; }

    void append() {
        spots_.emplace_back();
        held_.emplace_back();
    }
    void set(std::size_t place, HeldSlab slab) {
        spots_[place] = {slab.data, slab.layout};
        std::swap(held_[place], slab);
        if (slab.owner && !running_.empty()) let_go_.emplace_back(clock_++, std::move(slab));
    }
    void drop_front(std::size_t count) {
        spots_.erase(spots_.begin(), spots_.begin() + static_cast<std::ptrdiff_t>(count));
        held_.erase(held_.begin(), held_.begin() + static_cast<std::ptrdiff_t>(count));
    }

    // Around a draw; begin() gives what end() takes.
    std::uint64_t begin_draw() { return *running_.insert(clock_++); }
    void end_draw(std::uint64_t began) {
        running_.erase(running_.find(began));
        while (!let_go_.empty() && (running_.empty() || let_go_.front().first < *running_.begin())) let_go_.pop_front();
    }

private:
    std::vector<Spot> spots_;
    std::vector<HeldSlab> held_;
    std::uint64_t clock_ = 0;
    std::multiset<std::uint64_t> running_;                   // when the draws that run began
    std::deque<std::pair<std::uint64_t, HeldSlab>> let_go_;  // and since when slabs wait for their end
};

}  // namespace sharpwave
