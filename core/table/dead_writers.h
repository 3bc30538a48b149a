// Finishes the work of writers whose process died: rows past the head, a half-written step, open episodes, counts.
// Every step may be done twice, because the process that does it may die as well.
#pragma once

#include <cstdint>

#include "table/table.h"

namespace sharpwave {

class DeadWriters {
public:
    explicit DeadWriters(Table& table) : table_(table) {}

    // Gives back the records of writers whose process died. One process at a time; does nothing where another one is
    // at it and takes long.
    void reclaim();

    // Settles a writer's rows and episodes. False: there was no space for the next observations of its newest rows, and
    // they still wait in its record's places.
    bool settle(std::uint64_t writer);

private:
    void finish_retiring(format::WriterRecord& record);
    std::uint64_t finish_steps(std::uint64_t ticket, std::uint64_t head);
    bool settle_next_observations(std::uint64_t writer, std::uint64_t near);
    void end_newest_rows(std::uint64_t ticket, std::uint64_t head);
    void recount(std::uint64_t writer);
    void recount_block(format::WriterRecord& record, std::uint64_t block);
    void free_blocks(std::uint64_t writer);

    Table& table_;
};

}  // namespace sharpwave
