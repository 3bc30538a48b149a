// One stream of rows into a table. A writer owns the block it fills: nobody else writes there.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "table/copy.h"
#include "table/table.h"

namespace sharpwave {

enum RowFlag : std::uint8_t { kRowTerminated = 1, kRowTruncated = 2, kRowVoid = 4 };

// Rows to append: flat arrays, one a field of the layout and in its order, time-major over the table's width.
struct RowBatch {
    const FieldMove* fields;
    std::size_t rows;           // a multiple of the table's width
    const std::uint8_t* flags;  // RowFlag bits, one byte a row; null: none set
};

class Writer {
public:
    Writer(std::shared_ptr<Table> table, std::uint64_t record_index);
    ~Writer();
    Writer(const Writer&) = delete;
    Writer& operator=(const Writer&) = delete;

    // Returns when every row is committed. Threads that share a writer take turns. The caller has checked shapes and
    // that rows is a multiple of the width and at most the capacity.
    void append(const RowBatch& batch);

    // The same, but gives up at once where another thread has its turn; then nothing was written.
    bool try_append(const RowBatch& batch);

    // Ends open episodes as truncated and gives the record back. A second call does nothing.
    void close();

    Table& table() const { return *table_; }

private:
    void append_locked(const RowBatch& batch);
    void claim_block();
    void notice_clear();
    void take_block(std::uint64_t ticket, std::uint64_t head);
    void write_group(const RowBatch& batch, std::size_t first, std::size_t count);
    void end_open_episodes();

    std::shared_ptr<Table> table_;
    format::WriterRecord& record_;
    std::uint32_t owner_;  // record index plus 1
    std::mutex mutex_;
    bool closed_ = false;

    std::uint64_t ticket_ = format::kNone;
    std::uint64_t block_ = 0;   // ticket_ mod blocks
    std::uint64_t head_ = 0;    // next row in the block
    std::uint64_t length_ = 0;  // rows of the block; 0: none held
    std::uint64_t epoch_ = 0;
    // One an env: the serial plus 1 of the newest row of its open episode; 0 while none is open.
    std::vector<std::uint64_t> open_rows_;
};

}  // namespace sharpwave
