// The exponents of prioritized sampling: alpha of the masses, and beta of the importance weights, which goes from a
// start to an end. They stand in the table's counters, so that every process sees a change at once and a snapshot keeps
// them.
#pragma once

#include <bit>
#include <functional>

#include "storage/format.h"

namespace sharpwave {

struct Exponents {
    double alpha = 0.6;
    double beta_start = 0.4, beta_end = 0.4;
    double beta_steps = 0;  // sample calls from start to end; 0: always the end

    static Exponents of(const format::Counters& counters);
    void write_to(format::Counters& counters) const;

    // For TableConfig::set_counters: a new table starts with these.
    std::function<void(format::Counters&)> writer() const {
        return [made = *this](format::Counters& counters) { made.write_to(counters); };
    }
};

// Counters that hold the bits of a double.
inline double load_real(const format::Counter& counter) {
    return std::bit_cast<double>(counter.value.load(std::memory_order_relaxed));
}

inline void store_real(format::Counter& counter, double value) {
    counter.value.store(std::bit_cast<std::uint64_t>(value), std::memory_order_relaxed);
}

}  // namespace sharpwave
