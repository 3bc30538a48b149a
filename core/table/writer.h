// One stream of rows into a table. A writer owns the block that it fills: no other writer writes there.
//
// A plain row goes the shortest way, append_row(). Other rows go in groups: write_group() makes room, says WRITING in
// the words, copies the bytes and commits. What not every table needs stands in parts of its own: blocks (BlockClaim),
// stacks (StackHistory), derived next observations (NextObservations), values of no fixed size (HeapValues).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/wait.h"
#include "table/block_claim.h"
#include "table/heap_values.h"
#include "table/next_observations.h"
#include "table/row_batch.h"
#include "table/stack_history.h"
#include "table/writer_place.h"

namespace sharpwave {

class Writer {
public:
    Writer(std::shared_ptr<Table> table, std::uint64_t record_index, bool has_client = false);
    ~Writer();
    Writer(const Writer&) = delete;
    Writer& operator=(const Writer&) = delete;

    // Returns when every row is committed. Threads that share a writer take turns. The caller has checked shapes and
    // that rows is a multiple of the width and at most the capacity. Waits for other threads, and for a saver that
    // holds adds back, until the deadline: then nothing was written, and ErrorKind::not_ready says what for.
    void append(const RowBatch& batch, Deadline deadline = Deadline::never());

    // The same, but gives up at once where it would have to wait; then nothing was written.
    // (Hot: where the compiler puts these three among the others decides a twentieth of an add.)
    [[gnu::hot]] bool try_append(const RowBatch& batch);

    // Both again for a caller that wants the serials of its rows, one a row; kNone where a row was masked out. Apart
    // from the others, which pay nothing for it.
    void append(const RowBatch& batch, std::uint64_t* serials, Deadline deadline = Deadline::never());
    bool try_append(const RowBatch& batch, std::uint64_t* serials);

    // A client's rows, see table/client_rows.h: `first_row` is the number that the client gives to the first of them.
    // Those that were accepted before are skipped, their serials are kNone. Returns how many are accepted now. Rows
    // whose number is larger than that of the next one expected are ErrorKind::schema. Where an error comes in the
    // middle, accepted() counts the rows before it.
    std::uint64_t append_once(const RowBatch& batch, std::uint64_t first_row, std::uint64_t* serials = nullptr,
                              Deadline deadline = Deadline::never());
    bool try_append_once(const RowBatch& batch, std::uint64_t first_row, std::uint64_t* serials,
                         std::uint64_t& accepted);
    void check_once(const RowBatch& batch, std::uint64_t first_row) const;  // throws what append_once() would
    std::uint64_t accepted() const { return accepted_.load(std::memory_order_acquire); }
    bool has_client() const { return has_client_; }

    // Before an env's first row: it goes on in an episode whose earlier rows are not in the table.
    void go_on(std::uint64_t env) { at_.open_rows.at(env) = format::kMaxSerial + 1; }

    // Ends open episodes as truncated and gives the record back. A second call does nothing.
    void close();

    Table& table() const { return *table_; }

private:
    struct Group;
    void append_locked(const RowBatch& batch, bool waits);
    void append_named(const RowBatch& batch, std::uint64_t* serials, bool waits);
    void append_all(const RowBatch& batch, std::uint64_t* serials, bool waits);
    void wait_for_saver(Deadline deadline);
    void check_usable();
    bool is_held_back(const RowBatch& batch) const;
    std::unique_lock<std::timed_mutex> lock(Deadline deadline);
    void notice_clear();
    void follow_clear(std::uint64_t origin);
    [[gnu::hot, gnu::noinline]] void append_row(const RowBatch& batch);
    void append_groups(const RowBatch& batch, std::uint64_t* serials, std::size_t& done, std::size_t end, bool waits);
    std::uint64_t append_later(const RowBatch& batch, std::uint64_t first_row, std::uint64_t* serials, bool waits);
    void append_piece(const RowBatch& batch, std::uint64_t* serials, std::size_t& done, bool waits);
    void append_held(const RowBatch& batch, std::uint64_t* serials, std::size_t& done, std::size_t end, bool waits);
    bool hold_block(bool waits);
    std::size_t piece_rows() const;
    void ensure_step();
    void tell_serials(const RowBatch& batch, std::size_t first, std::size_t count, std::uint64_t* serials) const;
    void write_group(const RowBatch& batch, std::size_t first, std::size_t count);
    void make_room(const RowBatch& batch, Group& group, FieldMove* moves);
    void begin_rows(const RowBatch& batch, Group& group);
    // Not inlined: most tables have no mutable fields, and it would take registers from the copies of those.
    [[gnu::noinline, gnu::cold]] void copy_apart(const RowBatch& batch, const Group& group, FieldMove* moves) const;
    void retire_incomplete(Group& group);
    void finish_rows(const RowBatch& batch, Group& group);
    void count(std::int64_t gained);
    void end_open_episodes();

    std::shared_ptr<Table> table_;
    WriterPlace at_;
    NextObservations next_;
    StackHistory history_;
    HeapValues values_;
    BlockClaim claim_;
    const bool derives_;                 // next observations are derived
    const bool stacks_;                  // some field is stacked
    const bool has_mutables_;            // some field is mutable
    const bool is_plain_;                // rows of fixed fields, nothing derived, nothing stacked
    const std::uint64_t fetched_bytes_;  // of a row ahead; 0: rows so long that the processor fetches them by itself
    const bool is_bare_;                 // and one env, no priorities, no checksums: a row is its word and its bytes
    std::timed_mutex mutex_;
    bool closed_ = false;
    std::vector<FieldMove> row_moves_;  // append_row(): where each field stands in a row
    const bool has_client_;
    std::atomic<std::uint64_t> accepted_{0};  // the record's count, also after the record has gone to another writer
};

}  // namespace sharpwave
