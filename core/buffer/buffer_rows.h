// What stands behind a Buffer: the rows of a table, or those of a server.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/wait.h"
#include "buffer/row_spec.h"
#include "sharpwave/buffer.h"
#include "table/row_batch.h"

namespace sharpwave {

// Threads: everything may be called from any thread. The caller has checked rows, sizes and numbers.
class BufferRows {
public:
    BufferRows(std::string address, RowSpec spec);
    virtual ~BufferRows() = default;
    BufferRows(const BufferRows&) = delete;
    BufferRows& operator=(const BufferRows&) = delete;

    const std::string& address() const { return address_; }
    const std::shared_ptr<const RowSpec>& spec() const { return spec_; }
    const std::vector<FieldInfo>& fields() const { return fields_; }

    virtual void add(const RowBatch& rows, Deadline deadline) = 0;
    virtual void sample(Batch& batch, Deadline deadline) = 0;
    virtual Updated update_priorities(std::span<const std::int64_t> indices, std::span<const float> magnitudes,
                                      Deadline deadline) = 0;
    virtual std::uint64_t size() = 0;
    virtual std::map<std::string, double> stats() = 0;
    virtual void clear() = 0;
    virtual void flush() = 0;
    virtual void close() = 0;

private:
    std::string address_;
    std::shared_ptr<const RowSpec> spec_;
    std::vector<FieldInfo> fields_;
};

}  // namespace sharpwave
