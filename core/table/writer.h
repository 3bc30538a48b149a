// One stream of rows into a table. A writer owns the block it fills: nobody else writes there.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/wait.h"
#include "table/copy.h"
#include "table/heap.h"
#include "table/table.h"

namespace sharpwave {

enum RowFlag : std::uint8_t { kRowTerminated = 1, kRowTruncated = 2, kRowVoid = 4 };

// The values of one field, row by row.
struct FieldInput {
    const std::byte* flat = nullptr;        // the first row's; with `frames` its newest frame, the others before it
    std::uint64_t stride = 0;               // to the next row's
    std::uint32_t frames = 1;               // of a given stack, or 1
    const std::uint64_t* starts = nullptr;  // ragged: rows + 1 byte offsets into `flat` instead of a stride
};

// Rows to append, time-major over the table's width.
struct RowBatch {
    const FieldInput* fields;             // one a field of the layout, in its order
    std::size_t rows;                     // a multiple of the table's width
    const std::uint8_t* flags = nullptr;  // RowFlag bits, one byte a row; null: none set
    const FieldInput* next = nullptr;     // where next observations are derived: one a field that gives_next
    const float* priorities = nullptr;    // one a row, at least 0; null: none given
};

class Writer {
public:
    // Rows between two commits. Small, so that readers miss few rows and a kill loses few.
    static constexpr std::size_t kGroupRows = 16;

    Writer(std::shared_ptr<Table> table, std::uint64_t record_index);
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

    // Ends open episodes as truncated and gives the record back. A second call does nothing.
    void close();

    Table& table() const { return *table_; }

private:
    [[gnu::hot]] void append_locked(const RowBatch& batch, bool waits);
    bool is_held_back(const RowBatch& batch) const;
    std::unique_lock<std::timed_mutex> lock(Deadline deadline);
    void check_stacks(const RowBatch& batch);
    bool goes_on_from(const Field& field, std::uint64_t serial, const std::byte* newest, std::uint32_t count);
    void end_untold(std::uint64_t env);
    void claim_block(bool waits);
    void notice_clear();
    void take_block(std::uint64_t ticket, std::uint64_t head);
    void let_go_of_block();
    [[gnu::hot]] void append_row(const RowBatch& batch);
    void append_groups(const RowBatch& batch, std::size_t& done, bool waits);
    void write_group(const RowBatch& batch, std::size_t first, std::size_t count);
    void count(std::int64_t gained);
    void retire_ahead(std::size_t count);
    void pack(const RowBatch& batch, std::size_t first, std::size_t count);
    void place_in_heap(std::size_t count, FieldMove* moves);
    bool has_history(std::uint64_t serial) const;
    void leave_to_previous(std::uint64_t slot, BlockHeap& heap);
    void meet_previous(const RowBatch& batch, std::size_t row, std::uint64_t env);
    void keep_next(const RowBatch& batch, std::size_t row, std::uint64_t env, std::uint64_t slot, std::uint64_t serial,
                   std::uint64_t& flags);
    void end_open_episodes();

    std::shared_ptr<Table> table_;
    format::WriterRecord& record_;
    std::uint32_t owner_;  // record index plus 1
    const bool derives_;   // next observations are derived
    const bool stacks_;    // some field is stacked
    const bool is_plain_;  // rows of fixed fields, nothing derived, nothing stacked
    const bool is_bare_;   // and one env, no priorities, no checksums: a row is its word and its bytes
    std::timed_mutex mutex_;
    bool closed_ = false;

    std::uint64_t ticket_ = format::kNone;
    std::uint64_t block_ = 0;   // ticket_ mod blocks
    std::uint64_t head_ = 0;    // next row in the block
    std::uint64_t length_ = 0;  // rows of the block; 0: none held
    std::uint64_t origin_ = 0;  // of the table, when it last looked
    BlockHeap heap_;
    // One an env: the serial plus 1 of the newest row of its open episode; 0 while none is open.
    std::vector<std::uint64_t> open_rows_;
    std::vector<std::uint8_t> halves_;  // one an env: which of its two waiting places is the newer
    std::vector<std::uint8_t> resets_;  // one a row of the running add: its given stack starts an episode untold
    std::vector<std::byte> image_;      // of a waiting place
    std::vector<FieldMove> row_moves_;  // append_row(): where each field stands in a row
    std::vector<std::byte> packed_;     // a group's values on their way into the heap, one after the other
    std::vector<HeapPlace> places_;     // and where each stands, in packed_ and then in the heap
};

}  // namespace sharpwave
