// Masses by rank: (1 / rank) ^ alpha, the largest priority having rank 1. Made anew when a sixteenth of the rows has
// changed; rows that came since have rank 1. The caller holds the index lock.
#pragma once

#include "sampling/row_masses.h"

namespace sharpwave {

class Ranks {
public:
    explicit Ranks(RowMasses& masses) : masses_(masses) {}

    // Ranks every row and gives it its mass. Equal priorities stay in the ring's order.
    void make();

    // Whether so many rows came or changed that the ranks are to be made anew.
    bool are_due() const { return masses_.head->changes > masses_.head->rows / 16; }

    // Whether the masses are ranks already, also where a file was damaged.
    bool are_kept();

private:
    RowMasses& masses_;
};

}  // namespace sharpwave
