// How rows are drawn through the index: by priority or in an order, and which rows may start an example.
#pragma once

#include <cstdint>

#include "sampling/starts.h"

namespace sharpwave {

enum class Normalize { batch, buffer, none };
enum class NewRows { live_max, running_max, constant };

// How rows follow each other.
enum class Order {
    weighted,  // by mass, with replacement
    recent,    // the same over the newest ones only
    shuffle,   // each once an epoch
    fifo,      // oldest first
    lifo,      // newest first
};

// What does not change while the index is used. What does: sampling/exponents.h.
struct RowIndexConfig {
    double eps = 1e-6;
    bool rank_based = false;
    bool stratified = true;
    Normalize normalize = Normalize::batch;
    double mix = 0;  // share of draws that are uniform
    NewRows new_rows = NewRows::live_max;
    float new_priority = 1;  // with NewRows::constant
    Order order = Order::weighted;
    std::uint64_t recent = 0;     // with Order::recent: so many
    std::uint64_t newest = 0;     // the first positions of a batch are the newest rows
    std::uint64_t max_reads = 0;  // a row leaves after so many; 0: never
    StartRule starts;
};

}  // namespace sharpwave
