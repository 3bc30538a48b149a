// Rows that a client sends and may send again: each is taken once.
//
// A client numbers its rows from 0 and has a token of 16 random bytes. The record of the writer that takes its rows
// says how many were accepted. An append is cut into pieces within one block; before a piece the record says where it
// begins and how many rows will be accepted after it, so that the process that settles a dead writer finds out how much
// was written. Token and count stay in the record when the writer ends, until another writer takes the record.
//
// Live files keep both over kills. Snapshots, recovery of damaged files and power loss forget them.
#pragma once

#include <array>
#include <cstdint>

#include "storage/format.h"
#include "table/table.h"

namespace sharpwave {

// What a writer record says of its client.
class ClientRows {
public:
    explicit ClientRows(format::WriterRecord& record) : record_(record) {}

    bool has_client() const { return record_.client_used.load(std::memory_order_acquire) != 0; }
    bool is_of(const ClientToken& token) const { return has_client() && token == this->token(); }
    ClientToken token() const;
    std::uint64_t accepted() const { return record_.client_sequence.load(std::memory_order_acquire); }

    // By the owner of the record: of a client that is new here, with no rows accepted.
    void begin(const ClientToken& token, std::uint64_t stamp);
    void touch(std::uint64_t stamp) { record_.client_used.store(stamp, std::memory_order_release); }
    void forget() { record_.client_used.store(0, std::memory_order_release); }

    // Around the rows of a piece: `position` is packed, of its first row.
    void begin_piece(std::uint64_t position, std::uint64_t rows);
    void end_piece(std::uint64_t rows);  // so many were written, whole steps

    // Of a writer whose process died, before half-written steps become VOID: counts what its last piece had written.
    // May be done twice.
    static void settle(Table& table, std::uint64_t writer);

    // Larger than those of all records.
    static std::uint64_t next_stamp(const Table& table);

private:
    format::WriterRecord& record_;
};

}  // namespace sharpwave
