// The rows of a table that this process has mapped: memory, shared memory or a file.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "buffer/buffer_rows.h"
#include "table/table.h"
#include "table/writer.h"

namespace sharpwave {

class TableRows final : public BufferRows {
public:
    TableRows(const std::string& address, std::shared_ptr<Table> table);
    ~TableRows() override;

    void add(const RowBatch& rows, Deadline deadline) override;
    void sample(Batch& batch, Deadline deadline) override;
    Updated update_priorities(std::span<const std::int64_t> indices, std::span<const float> magnitudes,
                              Deadline deadline) override;
    std::uint64_t size() override;
    std::map<std::string, double> stats() override;
    void clear() override;
    void flush() override;
    void close() override;

private:
    Writer& writer();

    std::shared_ptr<Table> table_;
    BatchMaker batches_;
    std::shared_ptr<Pace> pace_;  // null: no call waits for its turn
    std::mutex opening_;          // around the first writer
    std::unique_ptr<Writer> writer_;
    std::atomic<Writer*> opened_{nullptr};
};

}  // namespace sharpwave
