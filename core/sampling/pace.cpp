#include "sampling/pace.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "base/error.h"
#include "base/fault.h"
#include "base/futex.h"
#include "base/process.h"

namespace sharpwave {

using namespace format;

namespace {

// Which of Counters::pace holds what.
enum : std::size_t { kSamples, kInsertsBefore, kLastInsert, kLastSample };

std::string grouped(double value) {
    if (std::floor(value) != value || std::fabs(value) > 1e15) {
        char text[32];
        std::snprintf(text, sizeof text, "%g", value);
        return text;
    }
    const bool negative = value < 0;
    std::string digits = std::to_string(static_cast<std::uint64_t>(std::fabs(value)));
    for (std::size_t at = digits.size(); at > 3;) digits.insert(at -= 3, 1, ',');
    if (negative) digits.insert(0, 1, '-');
    return digits;
}

}  // namespace

Pace::Pace(std::shared_ptr<Table> table, std::shared_ptr<RowIndex> index, const PaceConfig& config)
    : table_(std::move(table)), index_(std::move(index)), config_(config) {}

// After a clear the pace starts anew: nothing was delivered, nothing added. The first call under the index lock takes
// notice; rows that were added since the clear and are still there count.
void Pace::notice_clear() const {
    Counters& counters = table_->counters();
    const std::uint64_t origin = counters.origin_ticket.value.load(std::memory_order_acquire);
    if (counters.pace_origin.value.load(std::memory_order_relaxed) == origin) return;
    counters.pace[kSamples].value.store(0, std::memory_order_relaxed);
    const std::uint64_t added = rows_added(), live = table_->size();
    counters.pace[kInsertsBefore].value.store(added > live ? added - live : 0, std::memory_order_relaxed);
    counters.pace_origin.value.store(origin, std::memory_order_release);
}

std::uint64_t Pace::rows_added() const {
    const std::uint64_t used = table_->counters().writers_used.value.load(std::memory_order_acquire);
    std::uint64_t added = 0;
    for (std::uint64_t i = 0; i < used; ++i) added += table_->writer_record(i).added.load(std::memory_order_acquire);
    return added;
}

// The caller holds the index lock, or wants figures for a message.
Pace::State Pace::state() const {
    const Counters& counters = table_->counters();
    const std::uint64_t added = rows_added();
    State now{};
    if (counters.pace_origin.value.load(std::memory_order_acquire) ==
        counters.origin_ticket.value.load(std::memory_order_acquire)) {
        now.inserts = static_cast<double>(added - counters.pace[kInsertsBefore].value.load(std::memory_order_relaxed));
        now.samples = static_cast<double>(counters.pace[kSamples].value.load(std::memory_order_relaxed));
    } else {
        now.inserts = static_cast<double>(table_->size());  // cleared, and not yet noticed
    }
    const Runtime& runtime = table_->runtime();
    const std::uint64_t seats = std::min<std::uint64_t>(runtime.seats_used.load(std::memory_order_relaxed), kSeats);
    for (std::uint64_t i = 0; i < seats; ++i) {
        now.adding += static_cast<double>(runtime.seats[i].reserved[0].load(std::memory_order_relaxed));
        now.sampling += static_cast<double>(runtime.seats[i].reserved[1].load(std::memory_order_relaxed));
    }
    return now;
}

// Rows that may be drawn. The caller holds the index lock.
double Pace::size() const {
    if (index_ && index_->config().max_reads) return static_cast<double>(index_->rows_locked());
    return static_cast<double>(table_->size());
}

// Reservations of processes that are gone.
void Pace::forget_the_dead() const {
    for (std::uint64_t i = 0; i < kSeats; ++i) {
        Seat& other = table_->runtime().seats[i];
        if (!other.reserved[0].load(std::memory_order_relaxed) && !other.reserved[1].load(std::memory_order_relaxed))
            continue;
        if (table_->is_alive(static_cast<std::uint32_t>(i), other.token[0].load(std::memory_order_acquire))) continue;
        other.reserved[0].store(0, std::memory_order_relaxed);
        other.reserved[1].store(0, std::memory_order_relaxed);
    }
}

// Whether a draw of so many would find them. The caller holds the index lock.
bool Pace::has_examples(std::uint64_t rows) const {
    if (!index_ || index_->config().starts.is_any()) return true;
    const std::uint64_t needed = index_->rows_needed(rows);
    return needed > table_->capacity() || index_->rows_locked() >= needed;  // more than ever can be: the draw says so
}

bool Pace::try_reserve(Side side, std::uint64_t rows, Deadline deadline) {
    const auto n = static_cast<double>(rows);
    const double room = config_.max_diff - config_.min_diff;
    const Table::IndexLock lock(*table_, deadline);
    notice_clear();
    for (const bool again : {false, true}) {
        // Rows on their way in count for adding only, batches on their way out for sampling only: no call acts on what
        // may yet come to nothing.
        const State now = state();
        bool may;
        if (side == Side::add) {
            const double inserts = now.inserts + now.adding + n;
            may = inserts * config_.ratio - now.samples <= config_.max_diff ||
                  size() + now.adding + n <= config_.min_size || !has_examples(1);
            if (!may && n * config_.ratio > room) {
                throw Error(ErrorKind::schema,
                            "add(): got " + grouped(n) + " rows; the pace lets at most " +
                                grouped(std::floor(room / config_.ratio)) +
                                " through at once (max_diff - min_diff, over samples_per_insert); add fewer at a time");
            }
        } else {
            const double samples = now.samples + now.sampling + n;
            may = now.inserts * config_.ratio - samples >= config_.min_diff && size() >= config_.min_size;
            if (!may && n > room) {
                throw Error(ErrorKind::schema, "sample(): got batch_size " + grouped(n) + "; the pace lets at most " +
                                                   grouped(std::floor(room)) +
                                                   " rows through at once (max_diff - min_diff); ask for fewer");
            }
            may = may && has_examples(rows);
        }
        if (may) {
            const std::uint32_t number = table_->seat();
            Runtime& runtime = table_->runtime();
            if (runtime.seats_used.load(std::memory_order_relaxed) <= number) {
                runtime.seats_used.store(number + 1, std::memory_order_relaxed);
            }
            runtime.seats[number].reserved[static_cast<int>(side)].fetch_add(rows, std::memory_order_relaxed);
            SHARPWAVE_FAULT(pace_reserved);
            return true;
        }
        if (!again) forget_the_dead();
    }
    return false;
}

void Pace::settle(Side side, std::uint64_t rows, bool done) {
    Counters& counters = table_->counters();
    if (done) {
        if (side == Side::sample) counters.pace[kSamples].value.fetch_add(rows, std::memory_order_relaxed);
        counters.pace[side == Side::add ? kLastInsert : kLastSample].value.store(rough_wall_ns(),
                                                                                 std::memory_order_relaxed);
    }
    table_->runtime().seats[table_->seat()].reserved[static_cast<int>(side)].fetch_sub(rows, std::memory_order_release);
    ring();
}

void Pace::ring() {
    table_->runtime().rings.fetch_add(1, std::memory_order_seq_cst);
    if (table_->runtime().waiting.load(std::memory_order_seq_cst)) wake_all(table_->runtime().rings);
}

std::uint32_t Pace::mark() const { return table_->runtime().rings.load(std::memory_order_seq_cst); }

void Pace::wait(std::uint32_t mark, double seconds) {
    table_->runtime().waiting.fetch_add(1, std::memory_order_seq_cst);
    wait_for_change(table_->runtime().rings, mark, seconds);
    table_->runtime().waiting.fetch_sub(1, std::memory_order_seq_cst);
}

std::string Pace::reason(Side side, std::uint64_t rows) const {
    State now = state();
    now.inserts += side == Side::add ? now.adding : 0;
    now.samples += side == Side::sample ? now.sampling : 0;
    const auto rows_now = static_cast<double>(table_->size());
    const auto n = static_cast<double>(rows);
    const std::string ratio = grouped(config_.ratio);
    std::string why;
    if (side == Side::add) {
        why = "adding waits: (" + grouped(now.inserts) + " inserts + " + grouped(n) + ") x " + ratio + " - " +
              grouped(now.samples) + " samples > max_diff " + grouped(config_.max_diff);
    } else if (rows_now < config_.min_size) {
        why = "sampling waits: " + grouped(rows_now) + " rows < min_size " + grouped(config_.min_size);
    } else if (index_ && now.inserts * config_.ratio - now.samples - n >= config_.min_diff) {
        why = "sampling waits: " + std::to_string(index_->rows_known()) + " of " + grouped(rows_now) +
              " rows can start an example of the view, " + std::to_string(index_->rows_needed(rows)) + " must";
    } else {
        why = "sampling waits: " + grouped(now.inserts) + " inserts x " + ratio + " - " + grouped(now.samples) +
              " samples - " + grouped(n) + " < min_diff " + grouped(config_.min_diff);
    }
    std::uint64_t writers = 0;
    const std::uint64_t used = table_->counters().writers_used.value.load(std::memory_order_acquire);
    for (std::uint64_t i = 0; i < used; ++i) writers += table_->writer_record(i).owner.load() != 0;
    why += "; " + std::to_string(writers) + (writers == 1 ? " writer" : " writers") + " attached";
    const auto last = [&](std::size_t which, const char* what) {
        const std::uint64_t when = table_->counters().pace[which].value.load(std::memory_order_relaxed);
        char text[64];
        if (when == 0) {
            std::snprintf(text, sizeof text, ", last %s: none yet", what);
            return std::string(text);
        }
        const double ago = (static_cast<double>(wall_ns()) - static_cast<double>(when)) * 1e-9;
        std::snprintf(text, sizeof text, ", last %s %.1f s ago", what, ago > 0 ? ago : 0);
        return std::string(text);
    };
    return why + (side == Side::add ? last(kLastSample, "sample") : last(kLastInsert, "insert"));
}

Pace::Counts Pace::counts() const {
    const State now = state();
    return {static_cast<std::uint64_t>(now.inserts), static_cast<std::uint64_t>(now.samples),
            table_->runtime().waiting.load(std::memory_order_relaxed)};
}

}  // namespace sharpwave
