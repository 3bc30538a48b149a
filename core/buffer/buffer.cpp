#include "sharpwave/buffer.h"

#include <cmath>

#include "buffer/address.h"
#include "buffer/buffer_rows.h"
#include "buffer/given_rows.h"
#include "buffer/remote.h"
#include "buffer/table_rows.h"
#include "storage/storage.h"

namespace sharpwave {
namespace {

Deadline deadline_of(const char* where, std::optional<double> timeout_s) {
    if (!timeout_s) return Deadline::never();
    if (!(*timeout_s >= 0)) {
        throw Error(ErrorKind::schema, std::string(where) +
                                           ": timeout_s: expected seconds, at least 0, or nothing, got " +
                                           std::to_string(*timeout_s));
    }
    return Deadline::in(*timeout_s);
}

void check_size(const RowSpec& spec, std::size_t examples) {
    if (examples >= spec.least_batch && examples <= spec.most_batch) return;
    const bool is_small = examples < spec.least_batch;
    const bool is_newest = is_small && examples > 0;
    const std::uint64_t bound = is_small ? spec.least_batch : spec.most_batch;
    const char* const which = is_newest ? "least newest=" : is_small ? "least " : "most ";
    const bool is_once = !is_small && bound == spec.capacity;
    throw Error(ErrorKind::schema, std::string("sample(): batch_size: expected at ") + which +
                                       (is_once ? "capacity=" : "") + std::to_string(bound) + ", got " +
                                       std::to_string(examples) + (is_once ? ": each row is given once" : ""));
}

}  // namespace

BufferRows::BufferRows(std::string address, RowSpec spec)
    : address_(std::move(address)), spec_(std::make_shared<const RowSpec>(std::move(spec))) {
    for (const RowLeaf& leaf : spec_->leaves) {
        const Field& field = leaf.field;
        fields_.push_back({field.name, field.dtype, field.shape, field.stack, field.is_ragged});
    }
}

Buffer::Buffer(std::shared_ptr<BufferRows> rows) : rows_(std::move(rows)) {}

void Buffer::add_given(std::span<const Given> values, std::optional<double> timeout_s) {
    thread_local GivenRows given;
    const RowBatch& batch = given.read(*rows_->spec(), values);
    rows_->add(batch, deadline_of("add()", timeout_s));
}

Batch Buffer::batch(std::size_t examples) const {
    check_size(*rows_->spec(), examples);
    return Batch(rows_->spec(), examples);
}

Batch Buffer::sample(std::size_t examples, std::optional<double> timeout_s) {
    Batch made = batch(examples);
    rows_->sample(made, deadline_of("sample()", timeout_s));
    return made;
}

void Buffer::sample_into(Batch& batch, std::optional<double> timeout_s) {
    if (batch.spec_ != rows_->spec()) {
        throw Error(ErrorKind::schema,
                    "sample_into(): expected a batch of this buffer, got another's; make it with batch()");
    }
    rows_->sample(batch, deadline_of("sample_into()", timeout_s));
}

Updated Buffer::update_priorities(std::span<const std::int64_t> indices, std::span<const float> priorities,
                                  std::optional<double> timeout_s) {
    const char* const where = "update_priorities()";
    if (!rows_->spec()->is_prioritized) {
        throw Error(ErrorKind::schema,
                    std::string(where) + ": rows are not drawn by priority; give the buffer sampler=Prioritized()");
    }
    if (indices.size() != priorities.size()) {
        throw Error(ErrorKind::schema, std::string(where) + ": expected " + std::to_string(indices.size()) +
                                           " priorities, one per index, got " + std::to_string(priorities.size()));
    }
    thread_local std::vector<float> magnitudes;
    magnitudes.resize(priorities.size());
    for (std::size_t i = 0; i < priorities.size(); ++i) {
        magnitudes[i] = std::fabs(priorities[i]);
        if (!std::isfinite(magnitudes[i])) {
            throw Error(ErrorKind::schema, std::string(where) + ": priorities: expected finite numbers, got " +
                                               std::to_string(priorities[i]) + " at position " + std::to_string(i) +
                                               "; nothing was changed");
        }
    }
    return rows_->update_priorities(indices, magnitudes, deadline_of(where, timeout_s));
}

std::size_t Buffer::size() const { return rows_->size(); }
std::size_t Buffer::capacity() const { return rows_->spec()->capacity; }
const std::vector<FieldInfo>& Buffer::fields() const { return rows_->fields(); }
std::optional<std::size_t> Buffer::num_envs() const { return rows_->spec()->num_envs; }
const std::string& Buffer::address() const { return rows_->address(); }
std::map<std::string, double> Buffer::stats() const { return rows_->stats(); }
void Buffer::clear() { rows_->clear(); }
void Buffer::flush() { rows_->flush(); }
void Buffer::close() { rows_->close(); }

Buffer open(const std::string& address, const OpenOptions& options) {
    const Deadline deadline = deadline_of("open()", options.timeout_s);
    if (is_remote(address)) return Buffer(open_remote(address, options, deadline));
    const std::string path = path_of(address);
    if (options.wait && !wait_for_file(path, deadline)) {
        throw Error(ErrorKind::not_ready, "open(): '" + address + "' was not created in time; give a longer timeout_s");
    }
    return Buffer(
        std::make_shared<TableRows>(address, Table::attach(path, {options.recover, options.verify, deadline})));
}

}  // namespace sharpwave
