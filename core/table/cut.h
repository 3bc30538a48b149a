// A moment of a table that others go on writing: how far each block and each writer had come.
#pragma once

#include <cstdint>
#include <vector>

#include "storage/format.h"
#include "table/table.h"

namespace sharpwave {

// How far a block is: rows of the lap `ticket` below `head` are done, those behind are of the lap before.
struct Reach {
    std::uint64_t ticket = format::kNone, head = 0, changed = 0;
    bool operator==(const Reach&) const = default;
    std::uint64_t end(std::uint64_t block_rows) const {
        return ticket == format::kNone ? 0 : ticket * block_rows + head;
    }
};

// Where a block's writer came from and went on to.
struct Links {
    std::uint64_t previous = format::kNone, next = format::kNone, linked = format::kNone;
};

struct Cut {
    std::vector<Reach> reach;                 // one a block
    std::vector<Links> links;                 // one a block, of the lap in `reach`
    std::vector<format::Position> positions;  // one a writer record that has been used
};

// Rows that are done afterwards are not in it. Writers go on meanwhile.
Cut cut_of(const Table& table);

}  // namespace sharpwave
