#include "buffer/table_rows.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "sampling/uniform.h"

namespace sharpwave {
namespace {

RowSpec spec_of(const std::string& address, const Table& table) {
    const std::string where = "open(): '" + address + "'";
    RowSpec spec = RowSpec::parse(table.description(), table.capacity(), where);
    spec.check(table, where);
    return spec;
}

// A call's turn by the pace: its rows are reserved while it lives.
class Turn {
public:
    Turn(Pace* pace, Pace::Side side, std::uint64_t rows, Deadline deadline)
        : pace_(rows ? pace : nullptr), side_(side), rows_(rows) {
        if (!pace_) return;
        std::uint32_t mark = pace_->mark();
        while (!pace_->try_reserve(side, rows, deadline)) {
            if (deadline.is_over()) {
                const std::string reason = pace_->reason(side, rows);
                throw Error(ErrorKind::not_ready, reason + "; give a longer timeout_s");
            }
            pace_->wait(mark, std::min(deadline.left_s(), kWaitSlice));
            mark = pace_->mark();
            pace_->check_open();
            check_interrupt();
        }
    }
    ~Turn() {
        if (pace_) pace_->settle(side_, rows_, is_done_);
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    void done() { is_done_ = true; }

private:
    Pace* pace_;
    Pace::Side side_;
    std::uint64_t rows_;
    bool is_done_ = false;
};

}  // namespace

TableRows::TableRows(const std::string& address, std::shared_ptr<Table> table)
    : BufferRows(address, spec_of(address, *table)), table_(std::move(table)), batches_(table_, spec()->config) {
    if (spec()->pace) pace_ = std::make_shared<Pace>(table_, batches_.shared_index(), *spec()->pace);
}

TableRows::~TableRows() { close(); }

Writer& TableRows::writer() {
    Writer* found = opened_.load(std::memory_order_acquire);
    if (!found) {
        const std::scoped_lock lock(opening_);
        table_->check_open();
        if (!writer_) writer_ = table_->writer();
        found = writer_.get();
        opened_.store(found, std::memory_order_release);
    }
    return *found;
}

void TableRows::add(const RowBatch& rows, Deadline deadline) {
    table_->check_open();
    Writer& to = writer();
    std::uint64_t counted = pace_ ? rows.rows : 0;
    for (std::size_t i = 0; counted && rows.flags && i < rows.rows; ++i) counted -= is_void(rows, i);
    Turn turn(pace_.get(), Pace::Side::add, counted, deadline);
    to.append(rows, deadline);
    turn.done();
}

void TableRows::sample(Batch& batch, Deadline deadline) {
    table_->check_open();
    if (!pace_ && table_->size() == 0) refuse_empty();
    Turn turn(pace_.get(), Pace::Side::sample, batch.size(), deadline);
    const auto data = [&]<class T>(const char* name, T) {
        for (const Batch::Array& array : batch.arrays_) {
            if (array.name == name) return reinterpret_cast<T*>(array.data);
        }
        return static_cast<T*>(nullptr);
    };
    const RowSpec& rows = *spec();
    Outputs out{batch.flats_.data(), batch.lengths_.empty() ? nullptr : batch.lengths_.data()};
    BatchExtras drawn{reinterpret_cast<std::uint64_t*>(batch.indices_), batch.weights_};
    if (rows.discounts) out.discounts = data("discount", float{});
    if (rows.has_truncated) out.truncated = data("truncated", std::uint8_t{});
    if (rows.is_prioritized) drawn.probabilities = data("probabilities", double{});
    if (rows.places) {
        drawn.masks = {data("valid", std::uint8_t{}), data("mask", std::uint8_t{}), data("first", std::uint8_t{}),
                       rows.has_place_indices ? data("place_indices", std::int64_t{}) : nullptr};
    }
    batches_.sample(batch.size(), out, drawn, deadline);
    turn.done();
}

Updated TableRows::update_priorities(std::span<const std::int64_t> indices, std::span<const float> magnitudes,
                                     Deadline deadline) {
    table_->check_open();
    const RowIndex::Updated done = batches_.index()->update(reinterpret_cast<const std::uint64_t*>(indices.data()),
                                                            magnitudes.data(), indices.size(), deadline);
    return {done.applied, done.stale};
}

std::uint64_t TableRows::size() {
    table_->check_open();
    return table_->size();
}

std::map<std::string, double> TableRows::stats() {
    table_->check_open();
    const TableStats s = table_->stats();
    const std::pair<const char*, std::uint64_t> numbers[] = {
        {"size", s.size},
        {"capacity", s.capacity},
        {"rows_added", s.rows_added},
        {"rows_voided", s.rows_voided},
        {"episodes", s.episodes},
        {"rows_sampled", s.rows_sampled},
        {"sample_calls", s.sample_calls},
        {"redraws", s.redraws},
        {"writers", s.writers_taken},
        {"max_writers", s.max_writers},
        {"blocks", s.blocks},
        {"block_rows", s.block_rows},
        {"row_bytes", s.row_bytes},
        {"payload_bytes", s.payload_bytes},
        {"storage_bytes", s.storage_bytes},
        {"incarnation", s.incarnation},
        {"recoveries", s.recoveries},
        {"writers_reclaimed", s.writers_reclaimed},
        {"index_takeovers", s.index_takeovers},
        {"rows_lost", s.rows_lost},
        {"seed", s.seed},
        {"resets_unflagged", s.resets_unflagged},
        {"rows_retired", s.rows_retired},
        {"heap_bytes", s.heap_bytes},
        {"updates_applied", s.updates_applied},
        {"updates_stale", s.updates_stale},
    };
    std::map<std::string, double> told;
    for (const auto& [name, number] : numbers) told[name] = static_cast<double>(number);
    if (pace_) {
        const Pace::Counts counts = pace_->counts();
        told["pace_inserts"] = static_cast<double>(counts.inserts);
        told["pace_samples"] = static_cast<double>(counts.samples);
        told["pace_waiting"] = static_cast<double>(counts.waiting);
    }
    if (table_->has_index()) {
        told["epoch"] = static_cast<double>(s.shuffle_epoch);
        told["rows_consumed"] = static_cast<double>(s.rows_consumed);
    }
    if (spec()->is_prioritized) {
        told["alpha"] = batches_.index()->alpha();
        told["beta"] = batches_.index()->beta();
    }
    return told;
}

void TableRows::clear() {
    table_->check_open();
    table_->clear();
    if (pace_) pace_->ring();
}

void TableRows::flush() {
    table_->check_open();
    table_->flush();
}

void TableRows::close() {
    {
        const std::scoped_lock lock(opening_);
        if (writer_) writer_->close();
    }
    table_->close();
    if (pace_) pace_->ring();
}

}  // namespace sharpwave
