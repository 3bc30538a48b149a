// What is verified in a table's bytes, and changes nothing: records that make sense, rows and next observations with
// their checksums, counts, links between blocks, and the seal of a file that was closed. Recovery mends
// (table/recovery.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "table/table.h"

namespace sharpwave {

class TableCheck {
public:
    explicit TableCheck(const Table& table) : table_(table) {}

    // The numbers that decide where memory is touched: a damaged file must not crash us. Wrong ones are
    // ErrorKind::storage.
    bool are_records_sane() const;
    void check_records() const;

    // Whether a committed or void row is not what was written.
    bool is_damaged(std::uint64_t slot, std::uint64_t word) const;

    // The first slot with a damaged row, or with a row whose waiting next observation is damaged.
    std::optional<std::uint64_t> first_damaged_slot() const;

    // Whether as many rows are there as were counted. A process that was killed in the middle of an add, or of settling
    // a dead writer, leaves a difference of at most the rows that it was writing.
    bool are_counts_plausible() const;

    // So many serials were handed out at most, and no writer has added more rows.
    std::uint64_t serials_given() const;

    // Rows as counted, also where records make no sense.
    std::uint64_t rows_counted() const;

    // Links between blocks that one side does not confirm: rows would find wrong neighbours there. `each` gets the
    // numbers of the two blocks.
    template <class Each>
    void each_wrong_link(Each each) const;
    bool has_wrong_link() const;

    // Next observations that wait for their row and have a wrong checksum. `each` gets the row's serial, the pair and
    // the half of the waiting place.
    template <class Each>
    void each_wrongly_waiting(Each each) const;

    // Over everything in a file that rows do not cover with their own checksums.
    std::uint32_t seal() const;

private:
    bool is_mutable_damaged(std::uint64_t slot, std::uint64_t word) const;
    bool is_heap_damaged(std::uint64_t slot, std::uint64_t word) const;
    bool is_piece_of(std::uint64_t place, std::uint64_t bytes, std::uint64_t serial) const;
    std::optional<std::uint64_t> wrongly_waiting(std::uint64_t pair, std::uint64_t half) const;
    std::uint64_t live_rows() const;
    std::uint64_t rows_past(const format::Position& position) const;

    const Table& table_;
};

template <class Each>
void TableCheck::each_wrong_link(Each each) const {
    for (std::uint64_t b = 0; b < table_.blocks(); ++b) {
        const std::uint64_t lap = table_.block_record(b).linked_ticket.load();
        const std::uint64_t next = table_.block_record(b).next_ticket.load();
        if (lap == format::kNone || next == format::kNone) continue;
        const format::BlockRecord& after = table_.block_record(next % table_.blocks());
        // A claim that was cut off left no way back.
        const std::uint64_t back = after.previous_ticket.load();
        const bool is_wrong = after.ticket.load() == next && back != lap && back != format::kNone;
        if (is_wrong || lap % table_.blocks() != b || next <= lap) each(b, next % table_.blocks());
    }
}

template <class Each>
void TableCheck::each_wrongly_waiting(Each each) const {
    if (!table_.layout().gives_next() || !table_.checksums()) return;
    for (std::uint64_t pair = 0; pair < table_.max_writers() * table_.width(); ++pair) {
        for (std::uint64_t half = 0; half < 2; ++half) {
            if (const auto serial = wrongly_waiting(pair, half)) each(*serial, pair, half);
        }
    }
}

}  // namespace sharpwave
