// How a writer gets the block that it fills and gives it back. A claim takes a ticket by one atomic increment; the
// block of that ticket is the writer's until it is full. Blocks of one record form a chain, which the index follows.
#pragma once

#include <cstdint>

#include "table/next_observations.h"
#include "table/writer_place.h"

namespace sharpwave {

class BlockClaim {
public:
    BlockClaim(WriterPlace& place, NextObservations& next) : at_(place), next_(next) {}

    // Goes on in the block that the record's last writer left half full, if it is still worth filling and free.
    void resume();

    // Claims the next block. Blocks that other writers fill are passed over; their tickets stay without rows. All held
    // by others: ErrorKind::buffer_full. No space in a file: ErrorKind::storage, and a ticket stays without rows.
    //
    // `waits`: without it, a hold that begins in the middle of an add does not stop the add. Small adds come with the
    // interpreter's lock, which must not be kept during a wait; they looked before they began.
    void claim(bool waits);

    void let_go();

private:
    bool take(std::uint64_t ticket);
    void leave_last_lap(std::uint64_t block);
    void link(const format::Position& before, std::uint64_t ticket, std::uint64_t origin);
    void enter(std::uint64_t ticket, std::uint64_t head);

    WriterPlace& at_;
    NextObservations& next_;
};

}  // namespace sharpwave
