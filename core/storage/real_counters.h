// The counters that hold the bits of a double: what a new table starts with, and the largest value that a sound file
// has. The table room checks and repairs them by this list, without knowing what they are for.
#pragma once

#include <bit>
#include <limits>

#include "storage/format.h"

namespace sharpwave::format {

struct RealCounter {
    Counter Counters::* counter;
    double start;
    double most;  // the least is 0
};

inline constexpr RealCounter kRealCounters[] = {
    {&Counters::alpha, 0.6, 1},
    {&Counters::beta_start, 0.4, 1},
    {&Counters::beta_end, 0.4, 1},
    {&Counters::beta_steps, 0, 1e18},
    {&Counters::running_max, 1, std::numeric_limits<float>::max()},
};

inline bool is_within(const Counter& counter, double most) {
    const auto number = std::bit_cast<double>(counter.value.load(std::memory_order_acquire));
    return number >= 0 && number <= most;
}

}  // namespace sharpwave::format
