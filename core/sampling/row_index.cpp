#include "sampling/row_index.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "base/error.h"
#include "base/fault.h"
#include "sampling/uniform.h"

namespace sharpwave {

using namespace format;

RowIndex::RowIndex(Table& table, const RowIndexConfig& config)
    : table_(table), masses_(table, config), waiting_(masses_), catch_up_(masses_, waiting_) {}

double RowIndex::alpha() const { return masses_.alpha(); }

Exponents RowIndex::exponents() const { return Exponents::of(table_.counters()); }

double RowIndex::beta() const {
    const Exponents now = exponents();
    if (now.beta_steps <= 0) return now.beta_end;
    const auto calls = static_cast<double>(table_.counters().call_number.value.load(std::memory_order_relaxed));
    return now.beta_start + (now.beta_end - now.beta_start) * std::min(1.0, calls / now.beta_steps);
}

void RowIndex::set_beta(double start, double end, double steps) {
    const Table::IndexLock lock(table_);
    Exponents made = exponents();
    made.beta_start = start;
    made.beta_end = end;
    made.beta_steps = steps;
    made.write_to(table_.counters());
}

void RowIndex::set_alpha(double alpha) {
    const Table::IndexLock lock(table_);
    catch_up();
    store_real(table_.counters().alpha, alpha);
    masses_.head->ranked = 0;
    masses_.remake();
}

std::uint64_t RowIndex::updates_applied() const { return table_.counters().updates_applied.value.load(); }
std::uint64_t RowIndex::updates_stale() const { return table_.counters().updates_stale.value.load(); }

double RowIndex::total() {
    const Table::IndexLock lock(table_);
    catch_up();
    return masses_.tree.total();
}

std::uint64_t RowIndex::rows() {
    const Table::IndexLock lock(table_);
    return rows_locked();
}

std::uint64_t RowIndex::rows_locked() {
    catch_up();
    return masses_.head->rows;
}

std::uint64_t RowIndex::rows_known() const {
    return std::atomic_ref<std::uint64_t>(masses_.head->rows).load(std::memory_order_relaxed);
}

double RowIndex::recomputed_total() {
    const Table::IndexLock lock(table_);
    long double total = 0;
    for (std::uint64_t slot = 0; slot < masses_.tree.leaf_count; ++slot) total += masses_.tree.mass(slot);
    return static_cast<double>(total);
}

RowIndex::Updated RowIndex::update(const std::uint64_t* serials, const float* priorities, std::size_t count,
                                   Deadline deadline) {
    const Table::IndexLock lock(table_, deadline);
    table_.check_open();
    catch_up();
    Counters& counters = table_.counters();
    const std::uint64_t lap = table_.blocks() * table_.block_rows(), least = table_.least_word();
    leaves_.resize(count);
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint64_t slot = serials[i] % lap;
        leaves_[i] = slot;
        if (slot >= masses_.tree.leaf_count) continue;
        const MassGroup& group = masses_.tree.leaves[slot / SumTree::kFan];
        __builtin_prefetch(group.stored, 1);
        __builtin_prefetch(group.masses, 1);
        __builtin_prefetch(&table_.word(slot));
    }
    stored_.resize(count);
    new_masses_.resize(count);
    for (std::size_t i = 0; i < count; ++i) stored_[i] = stored_priority(std::fabs(priorities[i]));
    if (!masses_.config.rank_based)
        masses_.kernels.masses(stored_.data(), new_masses_.data(), count, masses_.config.eps, masses_.alpha());
    float largest = -1;
    std::size_t applied = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint64_t serial = serials[i], slot = leaves_[i];
        if (slot >= masses_.tree.leaf_count || (masses_.tree.stored(slot) == 0 && !is_row(masses_.tree.stored(slot))))
            continue;
        const std::uint64_t word = std::atomic_ref<std::uint64_t>(table_.word(slot)).load(std::memory_order_relaxed);
        if (serial_of(word) != serial || !is_live(word, least) || serial >= masses_.cursors[table_.block_of(slot)])
            continue;
        if (is_waiting(masses_.tree.stored(slot))) {
            masses_.tree.stored(slot) = waiting_priority(stored_[i]);
        } else {
            masses_.set_leaf(slot, -stored_[i], masses_.config.rank_based ? masses_.tree.mass(slot) : new_masses_[i]);
        }
        largest = std::max(largest, -stored_[i]);
        leaves_[applied++] = slot;
        SHARPWAVE_FAULT(index_half_updated);
    }
    SHARPWAVE_FAULT(index_updated);
    masses_.kernels.refresh(masses_.tree, leaves_.data(), applied);
    masses_.head->changes += applied;
    if (largest >= 0) masses_.raise_running_max(largest);
    const std::uint64_t stale = count - applied;
    counters.updates_applied.value.fetch_add(applied, std::memory_order_relaxed);
    if (stale) counters.updates_stale.value.fetch_add(stale, std::memory_order_relaxed);
    return {applied, stale};
}

void RowIndex::priorities(const std::uint64_t* serials, float* priorities, std::size_t count) {
    const Table::IndexLock lock(table_);
    table_.check_open();
    catch_up();
    const std::uint64_t least = table_.least_word();
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint64_t slot = serials[i] > kMaxSerial ? masses_.tree.leaf_count : table_.slot_of(serials[i]);
        priorities[i] = -1;
        if (slot >= masses_.tree.leaf_count) continue;
        const std::uint64_t word = table_.load_word(slot);
        if (serial_of(word) == serials[i] && is_live(word, least) && is_row(masses_.tree.stored(slot)))
            priorities[i] = std::fabs(masses_.tree.stored(slot));
    }
}

void RowIndex::give_back(const std::uint64_t* serials, std::size_t count) {
    const bool is_shuffled = masses_.config.order == Order::shuffle;
    if (masses_.config.max_reads == 0 && !is_shuffled) return;
    const Table::IndexLock lock(table_);
    catch_up();
    const std::uint64_t least = table_.least_word();
    masses_.changed.clear();
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint64_t slot = table_.slot_of(serials[i]);
        if (slot >= masses_.tree.leaf_count) continue;
        const std::uint64_t word = table_.load_word(slot);
        if (serial_of(word) != serials[i] || !is_live(word, least)) continue;
        if (masses_.reads && masses_.reads[slot] > 0) --masses_.reads[slot];
        const bool was_consumed =
            masses_.config.max_reads && masses_.tree.stored(slot) == 0 && !is_row(masses_.tree.stored(slot));
        if (!was_consumed && !is_shuffled) continue;
        const float priority = is_shuffled ? 1 : masses_.fallback_priority(-1);
        masses_.set_leaf(slot, priority, masses_.mass_of(priority));
        masses_.changed.push_back(slot);
        if (was_consumed) table_.counters().rows_consumed.value.fetch_sub(1, std::memory_order_relaxed);
    }
    waiting_.share_changed();
    masses_.refresh_changed();
}

void RowIndex::refuse(std::uint64_t asked) const {
    const std::uint64_t rows = masses_.head->rows;
    if (rows > 0) {
        throw Error(ErrorKind::not_ready, "sample(): expected at most " + std::to_string(rows) + " rows, got " +
                                              std::to_string(asked) + ": each is given once; ask for fewer");
    }
    if (table_.size() == 0) refuse_empty();
    if (masses_.config.starts.needs == StartRule::Needs::end) {
        throw Error(ErrorKind::not_ready, "sample(): hindsight draws from finished episodes and none has ended yet");
    }
    if (masses_.config.max_reads && table_.counters().rows_consumed.value.load(std::memory_order_relaxed)) {
        throw Error(ErrorKind::not_ready, "sample(): every row has been read max_reads=" +
                                              std::to_string(masses_.config.max_reads) + " times; add rows first");
    }
    if (masses_.config.starts.first_rows && masses_.config.starts.needs == StartRule::Needs::nothing) {
        throw Error(ErrorKind::not_ready,
                    "sample(): the first row of no episode is in the buffer; begin an episode, or give "
                    "start=\"uniform\"");
    }
    throw Error(ErrorKind::not_ready, "sample(): no window of length=" + std::to_string(masses_.config.starts.length) +
                                          " fits yet; add rows first, or give end=\"pad\"");
}

}  // namespace sharpwave
