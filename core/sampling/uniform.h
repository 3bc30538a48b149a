// Uniform draws over the live rows, with replacement. Needs no index and takes no lock.
//
// Where most slots hold a row they are drawn blindly: the copy finds out which held none, and those positions are drawn
// again inside the call's own random substream. Elsewhere, and for a position that was missed often, LiveRows knows
// which slots do.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/random.h"
#include "sampling/live_rows.h"
#include "table/table.h"

namespace sharpwave {

// A slot drawn blindly may hold no row that can be drawn. After so many of them a position is drawn by counting.
inline constexpr std::uint64_t kBlindAttempts = 16;

class UniformDraw {
public:
    // Draws `count` slots and counts them as sampled. An empty table is ErrorKind::not_ready and takes nothing from the
    // random stream.
    UniformDraw(Table& table, LiveRows& live, std::uint64_t* slots, std::size_t count);

    // One position once more; attempt >= 1. May give the same slot where rows move under it.
    void again(std::uint64_t* slots, std::size_t position, std::uint64_t attempt);

private:
    LiveRows& live_;
    std::uint64_t reach_;
    bool is_dense_;
    Substream stream_;
};

// The newest rows, newest first; where there are fewer, they come again. With several writers exact to a block. An
// empty table is ErrorKind::not_ready.
void newest_rows(const Table& table, std::uint64_t* slots, std::size_t count);

// What an empty table answers.
[[noreturn]] void refuse_empty();

}  // namespace sharpwave
