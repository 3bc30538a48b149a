// Uniform draws over the committed rows, with replacement. Needs no index and takes no lock.
#pragma once

#include <cstddef>
#include <cstdint>

#include "table/table.h"

namespace sharpwave {

// Fills the flat arrays with `count` rows and `serials` with their serials. Every committed row is equally likely,
// whatever the ring's state. An empty table is ErrorKind::not_ready and takes nothing from the random stream.
//
// Draws slots blindly and lets the copy find out which held no row: those positions are drawn again inside the call's
// own random substream. After 16 misses a position is drawn from the blocks' counts instead, which is exact and slow.
void sample_uniform(Table& table, std::size_t count, const FieldMove* fields, std::uint64_t* serials);

// What an empty table answers.
[[noreturn]] void refuse_empty();

}  // namespace sharpwave
