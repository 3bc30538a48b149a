// Where a table's serials and counters stand: what a table that lives elsewhere, on a GPU, brings along when it is
// saved through one of the engine's, and takes along when it is loaded from one.
#pragma once

#include <cstdint>

#include "table/table.h"

namespace sharpwave {

struct History {
    std::uint64_t next = 0;    // the serial behind the newest row; of several writers the largest
    std::uint64_t origin = 0;  // rows with smaller serials were cleared
    std::uint64_t writers = 0;
    std::uint64_t calls = 0, sampled = 0, redraws = 0;
    std::uint64_t added = 0, voided = 0, episodes = 0;
    std::uint64_t applied = 0, stale = 0;
    double running_max = 1;
};

History history_of(Table& table);

// A table without writers yet: its first row gets the serial `first`, the start of a block; smaller ones than
// `origin`, the start of a lap, were cleared. ErrorKind::schema if it cannot be.
void begin_at(Table& table, std::uint64_t origin, std::uint64_t first);

// Gives it the counters of another; its writers are closed.
void take_counters(Table& table, const History& history);

}  // namespace sharpwave
