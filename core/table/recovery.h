// Mends a table after a crash, a power loss, damage, or a load: records are made anew from the words, rows that are not
// whole are dropped, counts are made to agree. What is wrong is found by TableCheck (table/check.h).
#pragma once

#include <cstdint>
#include <set>
#include <vector>

#include "table/check.h"
#include "table/table.h"

namespace sharpwave {

class Recovery {
public:
    explicit Recovery(Table& table) : table_(table), check_(table) {}

    // Makes words, counts and writers agree. Drops rows that were being written and, with `verify`, rows whose checksum
    // is wrong; returns how many. `dropped`: serials of rows that are gone already.
    std::uint64_t run(bool verify, std::vector<std::uint64_t> dropped = {});

    // Its two parts: each block by itself, in any order and by any thread; then what looks across blocks. `dropped`
    // gets the serials of rows that are gone: their runs end before them.
    std::uint64_t mend_block(std::uint64_t block, bool verify, std::vector<std::uint64_t>& dropped);
    std::uint64_t finish(std::uint64_t lost, const std::vector<std::uint64_t>& dropped);
    void note_dropped(std::uint64_t block, std::uint64_t offset, std::vector<std::uint64_t>& dropped) const;

    // Makes the records of writers and blocks anew, from the words alone.
    void remake_records();

    // After remake_records(): blocks without a word that makes sense. Their rows are lost if they ever had any, since
    // nothing else would count them; returns how many.
    std::uint64_t drop_unnamed_rows();

    // After a power loss the pages of counters, records and blocks may be older than those of rows. Afterwards no
    // ticket is given twice, and rows that are whole are seen.
    void catch_up_with_words();

    // And rows whose selectors and places are of different moments take the place that is whole.
    void choose_whole_places();

    void drop_wrong_waiting();  // next observations that wait and have a wrong checksum
    void forget_index();        // all rows are new to it

private:
    std::uint64_t mend_laps();
    std::uint64_t newest_whole_lap(std::uint64_t block) const;
    void cut_run(std::uint64_t serial);
    std::uint64_t retire_without_history();
    std::uint64_t retire_without_next(std::set<std::uint64_t>& needed);
    std::uint64_t count_blocks();
    void reset_writers(std::uint64_t live, const std::set<std::uint64_t>& needed);

    Table& table_;
    TableCheck check_;
};

}  // namespace sharpwave
