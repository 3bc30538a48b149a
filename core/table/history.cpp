#include "table/history.h"

#include <algorithm>
#include <bit>

#include "base/error.h"

namespace sharpwave {

using namespace format;

History history_of(Table& table) {
    const TableStats stats = table.stats();
    const Counters& counters = table.counters();
    History history;
    history.origin = counters.origin_ticket.value.load(std::memory_order_acquire) * table.block_rows();
    history.next = history.origin;
    history.writers = counters.writers_used.value.load(std::memory_order_acquire);
    for (std::uint64_t i = 0; i < history.writers; ++i) {
        const Position at = table.position(i);
        if (at.ticket == kNone) continue;
        history.next = std::max(history.next, at.ticket * table.block_rows() + at.head);
    }
    history.calls = stats.sample_calls;
    history.sampled = stats.rows_sampled;
    history.redraws = stats.redraws;
    history.added = stats.rows_added;
    history.voided = stats.rows_voided;
    history.episodes = stats.episodes;
    history.applied = stats.updates_applied;
    history.stale = stats.updates_stale;
    history.running_max = std::bit_cast<double>(counters.running_max.value.load(std::memory_order_relaxed));
    return history;
}

void begin_at(Table& table, std::uint64_t origin, std::uint64_t first) {
    table.check_open();
    Counters& counters = table.counters();
    const std::uint64_t rows = table.block_rows(), lap = rows * table.blocks();
    const bool is_new = counters.next_ticket.value.load() == 0 && counters.writers_used.value.load() == 0;
    if (!is_new || origin % lap || first % rows || first < origin || first > kMaxSerial)
        throw Error(ErrorKind::schema, "begin_at(): expected a new table and the serials of a lap and of a block");
    counters.origin_ticket.value.store(origin / rows, std::memory_order_release);
    counters.next_ticket.value.store(first / rows, std::memory_order_release);
}

void take_counters(Table& table, const History& history) {
    table.check_open();
    Counters& counters = table.counters();
    counters.call_number.value.store(history.calls);
    counters.rows_sampled.value.store(history.sampled);
    counters.redraws.value.store(history.redraws);
    counters.updates_applied.value.store(history.applied);
    counters.updates_stale.value.store(history.stale);
    counters.running_max.value.store(std::bit_cast<std::uint64_t>(history.running_max));
    const std::uint64_t used = counters.writers_used.value.load();
    for (std::uint64_t i = 0; i < std::max<std::uint64_t>(used, 1); ++i) {
        WriterRecord& record = table.writer_record(i);
        record.added.store(i ? 0 : history.added);
        record.voided.store(i ? 0 : history.voided);
        record.episodes.store(i ? 0 : history.episodes);
    }
}

}  // namespace sharpwave
