#include "sampling/row_index.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "base/error.h"
#include "base/fault.h"
#include "sampling/uniform.h"

namespace sharpwave {

using namespace format;

namespace {

double load_real(const Counter& counter) {
    return std::bit_cast<double>(counter.value.load(std::memory_order_relaxed));
}
void store_real(Counter& counter, double value) {
    counter.value.store(std::bit_cast<std::uint64_t>(value), std::memory_order_relaxed);
}

}  // namespace

RowIndex::RowIndex(Table& table, const RowIndexConfig& config)
    : table_(table),
      config_(config),
      head_(reinterpret_cast<Head*>(table.region(kPriorities))),
      cursors_(reinterpret_cast<std::uint64_t*>(table.region(kPriorities) + sizeof(Head))),
      given_(table.given()),
      reads_(table.reads()),
      tree_(table.region(kPriorities) + leaves_offset(table.blocks()), table.region(kTree), table.header().slots),
      kernels_(sum_tree_kernels()),
      starts_(table, config.starts) {
    static_assert(sizeof(Head) == kIndexHeadBytes);
    tree_.keeps_largest = config.new_rows == NewRows::live_max;
    tree_.keeps_smallest = config.normalize == Normalize::buffer;
}

double RowIndex::alpha() const { return load_real(table_.counters().alpha); }

void RowIndex::beta_schedule(double& start, double& end, double& steps) const {
    start = load_real(table_.counters().beta_start);
    end = load_real(table_.counters().beta_end);
    steps = load_real(table_.counters().beta_steps);
}

double RowIndex::beta() const {
    double start, end, steps;
    beta_schedule(start, end, steps);
    if (steps <= 0) return end;
    const auto calls = static_cast<double>(table_.counters().call_number.value.load(std::memory_order_relaxed));
    return start + (end - start) * std::min(1.0, calls / steps);
}

void RowIndex::set_beta(double start, double end, double steps) {
    const Table::IndexLock lock(table_);
    store_real(table_.counters().beta_start, start);
    store_real(table_.counters().beta_end, end);
    store_real(table_.counters().beta_steps, steps);
}

void RowIndex::set_alpha(double alpha) {
    const Table::IndexLock lock(table_);
    catch_up();
    store_real(table_.counters().alpha, alpha);
    head_->ranked = 0;
    remake_masses();
}

std::uint64_t RowIndex::updates_applied() const { return table_.counters().updates_applied.value.load(); }
std::uint64_t RowIndex::updates_stale() const { return table_.counters().updates_stale.value.load(); }

double RowIndex::total() {
    const Table::IndexLock lock(table_);
    catch_up();
    return tree_.total();
}

std::uint64_t RowIndex::rows() {
    const Table::IndexLock lock(table_);
    return rows_locked();
}

std::uint64_t RowIndex::rows_locked() {
    catch_up();
    return head_->rows;
}

std::uint64_t RowIndex::rows_known() const {
    return std::atomic_ref<std::uint64_t>(head_->rows).load(std::memory_order_relaxed);
}

double RowIndex::recomputed_total() {
    const Table::IndexLock lock(table_);
    long double total = 0;
    for (std::uint64_t slot = 0; slot < tree_.leaf_count; ++slot) total += tree_.mass(slot);
    return static_cast<double>(total);
}

// ---- catching up --------------------------------------------------------------------------------------------------

void RowIndex::catch_up() {
    Counters& counters = table_.counters();
    const std::uint64_t origin = counters.origin_ticket.value.load(std::memory_order_acquire);
    const bool rebuilds = counters.index_origin.value.load(std::memory_order_relaxed) != origin;
    if (rebuilds) rebuild();
    if (!config_.starts.is_any()) {
        // Episodes that ended after their last row was taken in: a writer was closed, or died.
        const std::uint64_t ends = counters.late_ends.value.load(std::memory_order_acquire);
        if (counters.seen_ends.value.load(std::memory_order_relaxed) != ends) {
            if (!take_late_ends()) rebuild();
            counters.seen_ends.value.store(ends, std::memory_order_relaxed);
        }
    }
    new_rows_.clear();
    seen_.clear();
    const std::uint64_t used = counters.writers_used.value.load(std::memory_order_acquire);
    bool chain_broke = rebuilds;  // records may have been made anew too: look at all blocks
    for (std::uint64_t i = 0; i < used; ++i) {
        const auto [ticket, head] = table_.position(i);
        if (ticket == kNone) continue;
        const std::uint64_t known = table_.writer_record(i).indexed_ticket;
        if (ticket == known && cursors_[ticket % table_.blocks()] == ticket * table_.block_rows() + head) [[likely]]
            continue;
        // Back along the writer's blocks to the one that was its newest at the last catch-up.
        for (std::uint64_t at = ticket;;) {
            const BlockRecord& block = table_.block_record(at % table_.blocks());
            if (block.ticket.load(std::memory_order_acquire) != at) {
                chain_broke = chain_broke || at != known;
                break;
            }
            collect(at, at == ticket ? head : table_.block_length(at % table_.blocks()));
            const std::uint64_t before = block.previous_ticket.load(std::memory_order_acquire);
            if (at == known || before == kNone || before < known || before >= at) break;
            at = before;
        }
        seen_.emplace_back(i, ticket);
    }
    if (chain_broke) {
        // Blocks between were taken over meanwhile: look at all.
        new_rows_.clear();
        for (std::uint64_t b = 0; b < table_.blocks(); ++b) {
            const std::uint64_t ticket = table_.block_record(b).ticket.load(std::memory_order_acquire);
            if (ticket == kNone) continue;
            // Nobody's: filled, or just claimed.
            const bool is_claimed = table_.block_record(b).owner.load(std::memory_order_acquire) != 0;
            std::uint64_t head = is_claimed ? 0 : table_.block_length(b);
            for (std::uint64_t i = 0; i < used; ++i) {
                if (const auto [its_ticket, its_head] = table_.position(i); its_ticket == ticket) head = its_head;
            }
            collect(ticket, head);
        }
    }
    if (!new_rows_.empty()) {
        std::sort(new_rows_.begin(), new_rows_.end(), [](const Range& a, const Range& b) { return a.end < b.end; });
        take_in();
    }
    // Last: who dies before it leaves the way back to the rows that are not in yet.
    for (const auto& [i, ticket] : seen_) table_.writer_record(i).indexed_ticket = ticket;
    if (config_.rank_based && head_->changes > head_->rows / 16) rank();
}

// Episodes whose last row was taken in before it was told to be the last: it is the newest of its writer and env that
// the index knows. False: an env was masked out of all that is known of its block, and the row is further back.
bool RowIndex::take_late_ends() {
    const std::uint64_t used = table_.counters().writers_used.value.load(std::memory_order_acquire);
    const std::uint64_t width = table_.width(), least = table_.least_word();
    std::vector<std::uint64_t> last_rows;
    legal_.clear();
    for (std::uint64_t i = 0; i < used; ++i) {
        const WriterRecord& writer = table_.writer_record(i);
        const std::uint64_t ticket = writer.indexed_ticket;
        const std::uint64_t block = ticket % table_.blocks(), base = block * table_.block_rows();
        const std::uint64_t first = ticket * table_.block_rows();
        const std::uint64_t known = cursors_[block] > first ? cursors_[block] - first : 0;
        if (known == 0 || known > table_.block_length(block)) continue;
        for (std::uint64_t env = 0; env < width; ++env) {
            std::uint64_t step = known / width, word = 0;
            bool is_gone = false;  // written over: then so is what came before it
            while (step > 0 && !is_gone) {
                const std::uint64_t offset = --step * width + env;
                word = std::atomic_ref<std::uint64_t>(table_.word(base + offset)).load(std::memory_order_acquire);
                is_gone = serial_of(word) != first + offset;
                if (is_gone || state_of(word) == kCommitted) break;
                word = 0;
            }
            if (is_gone) continue;
            if (word == 0) return false;
            if (!(word & kEndMask) || !is_live(word, least)) continue;
            starts_.arrive(base + step * width + env, word, legal_, false);
            last_rows.push_back(base + step * width + env);
        }
    }
    changed_.clear();
    let_in(legal_);
    for (std::uint64_t slot : last_rows) {
        if (config_.starts.per_episode) recount_episode(slot);
    }
    kernels_.refresh(tree_, changed_.data(), changed_.size());
    return true;
}

// The rows of a block that are not in the index yet. Its writer has finished those below `head`: what is no row there
// has gone since, and is passed over. Where the block was claimed anew since the last time, the lap before may have
// left rows behind the new ones that were never seen.
void RowIndex::collect(std::uint64_t ticket, std::uint64_t head) {
    const std::uint64_t block = ticket % table_.blocks(), length = table_.block_length(block);
    const std::uint64_t first = ticket * table_.block_rows(), base = block * table_.block_rows();
    const std::uint64_t seen = cursors_[block], begin = seen > first ? seen - first : 0;
    // Of the lap before all rows are known, or all those behind the new ones are looked at.
    const std::uint64_t last = seen ? (seen - 1) / table_.block_rows() : 0;
    const bool knows_rest = seen > first || seen == last * table_.block_rows() + length;
    const bool is_even = knows_rest && !table_.is_uneven(block, ticket) &&
                         ticket >= table_.counters().origin_ticket.value.load(std::memory_order_acquire);
    if (is_even) {
        if (head > begin) new_rows_.push_back({base + begin, head - begin, first + head, true});
        return;
    }
    std::uint64_t end = begin;
    for (; end < length; ++end) {
        const std::uint64_t word =
            std::atomic_ref<std::uint64_t>(table_.word(base + end)).load(std::memory_order_acquire);
        const std::uint64_t state = state_of(word);
        const bool is_done = serial_of(word) == first + end && (state == kCommitted || state == kVoid);
        if (!is_done && end >= head) break;
    }
    // Past the head whole steps only: part of one is taken back if its writer dies.
    if (end > head) end = std::max(begin, std::max(head, end / table_.width() * table_.width()));
    const std::uint64_t reach = knows_rest ? end : length;
    if (reach > begin) new_rows_.push_back({base + begin, reach - begin, first + end, false});
}

float RowIndex::fallback_priority(float given_max) {
    switch (config_.new_rows) {
        case NewRows::constant:
            return config_.new_priority;
        case NewRows::running_max:
            return static_cast<float>(load_real(table_.counters().running_max));
        case NewRows::live_max:
            break;
    }
    if (head_->rows == 0) return given_max >= 0 ? given_max : 1.0f;
    return std::max(tree_.largest_priority(), given_max);
}

void RowIndex::set_leaf(std::uint64_t slot, float priority, float mass) {
    float& stored = tree_.stored(slot);
    float& leaf = tree_.mass(slot);
    if (is_row(stored)) {
        head_->massless -= leaf == 0;
    } else {
        ++head_->rows;
    }
    head_->massless += mass == 0;
    stored = stored_priority(priority);
    leaf = mass;
}

// A row that may not be drawn yet.
void RowIndex::set_waiting(std::uint64_t slot, float priority) {
    remove(slot);
    tree_.stored(slot) = waiting_priority(priority);
}

float RowIndex::mass_of(float priority) const {
    if (config_.rank_based) return 1.0f;  // of rank 1
    const float stored = stored_priority(priority);
    float mass;
    kernels_.masses(&stored, &mass, 1, config_.eps, alpha());
    return mass;
}

// Rows that waited and may be drawn now. Those that were let in before, and those consumed since, stay as they are.
void RowIndex::let_in(const std::vector<std::uint64_t>& legal, bool again) {
    for (std::uint64_t slot : legal) {
        const float stored = tree_.stored(slot);
        if (!is_waiting(stored)) continue;
        // Where everything is made anew, a row that was in before has its rank still.
        const bool has_rank = again && config_.rank_based && head_->ranked && tree_.mass(slot) > 0;
        const float mass = has_rank ? tree_.mass(slot) : mass_of(priority_of_waiting(stored));
        set_leaf(slot, priority_of_waiting(stored), mass);
        changed_.push_back(slot);
    }
}

// Shares an episode's one unit among the rows of it that may start an example.
void RowIndex::recount_episode(std::uint64_t slot) {
    const std::uint64_t word = std::atomic_ref<std::uint64_t>(table_.word(slot)).load(std::memory_order_acquire);
    if (!is_live(word, table_.least_word())) return;
    std::vector<std::uint64_t> rows = starts_.places().episode(slot, word);
    std::erase_if(rows, [&](std::uint64_t row) { return !is_row(tree_.stored(row)); });
    const float share = 1 / static_cast<float>(rows.size());
    for (std::uint64_t row : rows) {
        if (tree_.stored(row) == stored_priority(share)) continue;
        set_leaf(row, share, mass_of(share));
        changed_.push_back(row);
    }
}

void RowIndex::remove(std::uint64_t slot) {
    if (is_waiting(tree_.stored(slot))) tree_.stored(slot) = 0;
    if (!is_row(tree_.stored(slot))) return;
    --head_->rows;
    head_->massless -= tree_.mass(slot) == 0;
    tree_.stored(slot) = 0;
    tree_.mass(slot) = 0;
}

void RowIndex::take_in() {
    const std::uint64_t least = table_.least_word();
    const auto word_at = [&](std::uint64_t slot) {
        return std::atomic_ref<std::uint64_t>(table_.word(slot)).load(std::memory_order_acquire);
    };
    const auto given_at = [&](std::uint64_t slot) {
        return given_ ? std::atomic_ref<float>(given_[slot]).load(std::memory_order_relaxed) : 0.0f;
    };
    // Rows of an earlier lap that were taken in before stay as they are.
    const auto is_known = [&](std::uint64_t slot) {
        const std::uint64_t word = word_at(slot);
        return is_live(word, least) && serial_of(word) < cursors_[table_.block_of(slot)];
    };
    // First those who leave: their places are taken, or they are kept for their neighbours only.
    const std::uint64_t spare = table_.header().spare_rows;
    const std::uint64_t window = spare ? spare + table_.width() * table_.layout().stack() : 0;
    retired_.clear();
    std::uint64_t count = 0;
    for (const Range& range : new_rows_) count += range.count;
    const bool many = count > 64;
    leaves_.clear();
    changed_.clear();
    float given_max = -1, leaving_max = -1;
    const auto leave = [&](std::uint64_t slot) {
        const float stored = tree_.stored(slot);
        if (is_row(stored)) leaving_max = std::max(leaving_max, -stored);
        if (!many) leaves_.push_back(slot);
        remove(slot);
    };
    for (const Range& range : new_rows_) {
        for (std::uint64_t slot = range.slot; slot < range.slot + range.count; ++slot) {
            if (!range.is_even && is_known(slot)) continue;
            leave(slot);
            const float given = given_at(slot);
            if (is_row(given) && (range.is_even || is_live(word_at(slot), least)))
                given_max = std::max(given_max, -given);
        }
        // A writer retires rows ahead of it: the next few that are rows. Where several writers share the ring they may
        // stand elsewhere too; a draw that meets one takes it out.
        const std::uint64_t end = range.slot + range.count;
        for (std::uint64_t i = 0, reach = window; i < reach && i < tree_.leaf_count; ++i) {
            const std::uint64_t slot = (end + i) % tree_.leaf_count, word = word_at(slot);
            if (word < least || word == 0) {
                // Never used: before the first lap is over the oldest rows stand at the ring's start.
                if (end + i >= tree_.leaf_count) break;
                reach += tree_.leaf_count - (end + i);
                i = tree_.leaf_count - end - 1;
                continue;
            }
            if (is_live(word, least)) continue;
            reach = i + 1 + window;
            if (tree_.stored(slot) == 0 && !is_row(tree_.stored(slot))) continue;
            leave(slot);
            retired_.push_back(slot);
        }
    }
    const auto refresh = [&] {
        if (!many) return kernels_.refresh(tree_, leaves_.data(), leaves_.size());
        for (const Range& range : new_rows_) kernels_.refresh_range(tree_, range.slot, range.slot + range.count);
        kernels_.refresh(tree_, retired_.data(), retired_.size());
    };
    if (tree_.keeps_largest && leaving_max >= tree_.largest_priority()) refresh();

    if (given_max >= 0 && given_max > load_real(table_.counters().running_max)) {
        store_real(table_.counters().running_max, given_max);
    }
    const float priority = fallback_priority(given_max);
    const float mass = mass_of(priority);
    const bool may_all_start = config_.starts.is_any();
    for (const Range& range : new_rows_) {
        for (std::uint64_t slot = range.slot; slot < range.slot + range.count; ++slot) {
            if (!range.is_even && (!is_live(word_at(slot), least) || is_known(slot))) continue;
            ++head_->changes;
            if (reads_) reads_[slot] = 0;
            const float given = given_at(slot);
            if (!may_all_start) {
                set_waiting(slot, is_row(given) ? -given : priority);
            } else if (is_row(given)) {
                set_leaf(slot, -given, mass_of(-given));
            } else {
                set_leaf(slot, priority, mass);
            }
        }
    }
    if (!may_all_start) {
        // In the order of their serials: a block may hold rows of this lap before some of the last.
        legal_.clear();
        words_.clear();
        for (const Range& range : new_rows_) {
            for (std::uint64_t slot = range.slot; slot < range.slot + range.count; ++slot) {
                const std::uint64_t word = word_at(slot), state = state_of(word);
                if ((state == kCommitted || state == kVoid) && word >= least &&
                    serial_of(word) >= cursors_[table_.block_of(slot)])
                    words_.push_back(word);
            }
        }
        if (!std::is_sorted(words_.begin(), words_.end())) std::sort(words_.begin(), words_.end());
        for (std::uint64_t word : words_) {
            const std::uint64_t slot = table_.slot_of(serial_of(word));
            starts_.number(slot, word, cursors_);
            if (is_live(word, least)) starts_.arrive(slot, word, legal_, false);
        }
        let_in(legal_);
        if (config_.starts.per_episode) {
            for (const Range& range : new_rows_) {
                // Episodes that grew: those with a last row here. And those that lost rows: the oldest of them now.
                const std::uint64_t end = range.slot + range.count;
                for (std::uint64_t slot = range.slot; slot < end; ++slot) {
                    std::uint64_t next = slot, word = word_at(slot);
                    if (is_live(word, least) && !table_.successor(next, word)) recount_episode(slot);
                }
                for (std::uint64_t i = 0; i < table_.width(); ++i) recount_episode((end + i) % tree_.leaf_count);
            }
        }
        kernels_.refresh(tree_, changed_.data(), changed_.size());
    }
    SHARPWAVE_FAULT(index_half_taken_in);
    refresh();
    SHARPWAVE_FAULT(index_taken_in);
    for (const Range& range : new_rows_) cursors_[table_.block_of(range.slot)] = range.end;
}

// ---- masses anew ----------------------------------------------------------------------------------------------------

void RowIndex::rebuild() {
    const std::uint64_t origin = table_.counters().origin_ticket.value.load(std::memory_order_acquire);
    const std::uint64_t least = table_.least_word();
    // Nothing of the sums is trusted, nor what stands beside the last leaf: a file may have been damaged.
    std::memset(table_.region(kTree), 0, table_.header().regions[kTree].bytes);
    for (std::uint64_t slot = tree_.leaf_count; slot % SumTree::kFan != 0; ++slot)
        tree_.stored(slot) = tree_.mass(slot) = 0;
    SHARPWAVE_FAULT(index_half_rebuilt);
    head_->rows = 0;
    const bool may_all_start = config_.starts.is_any();
    for (std::uint64_t slot = 0; slot < tree_.leaf_count; ++slot) {
        float& stored = tree_.stored(slot);
        if (stored == 0 && !is_row(stored)) continue;
        const std::uint64_t word = std::atomic_ref<std::uint64_t>(table_.word(slot)).load(std::memory_order_acquire);
        if (!is_live(word, least) || serial_of(word) >= cursors_[table_.block_of(slot)]) {
            stored = 0;
            tree_.mass(slot) = 0;
        } else if (may_all_start) {
            stored = stored_priority(stored);
            ++head_->rows;
        } else if (is_row(stored)) {
            stored = waiting_priority(stored);
        }
    }
    if (may_all_start) remake_masses();
    if (!may_all_start) rebuild_starts();
    table_.counters().index_origin.value.store(origin, std::memory_order_release);
}

// From the rows alone: which of them may start an example.
void RowIndex::rebuild_starts() {
    const std::uint64_t least = table_.least_word();
    std::vector<std::uint64_t> last_rows;
    legal_.clear();
    for (std::uint64_t slot = 0; slot < tree_.leaf_count; ++slot) {
        std::uint64_t word = std::atomic_ref<std::uint64_t>(table_.word(slot)).load(std::memory_order_acquire);
        if (!is_live(word, least) || serial_of(word) >= cursors_[table_.block_of(slot)]) continue;
        starts_.arrive(slot, word, legal_, true);
        std::uint64_t next = slot;
        if (config_.starts.per_episode && !table_.successor(next, word)) last_rows.push_back(slot);
    }
    changed_.clear();
    head_->massless = 0;
    let_in(legal_, true);
    for (std::uint64_t slot = 0; slot < tree_.leaf_count; ++slot) {
        if (!is_row(tree_.stored(slot))) tree_.mass(slot) = 0;
    }
    for (std::uint64_t slot : last_rows) recount_episode(slot);
    if (config_.rank_based && !keep_ranks()) return rank();
    kernels_.refresh_range(tree_, 0, tree_.leaf_count);
}

// Whether the masses are ranks already; those of rows that came since the last ranking are rank 1. A file may be
// damaged.
bool RowIndex::keep_ranks() {
    if (!head_->ranked) return false;
    head_->massless = 0;
    for (std::uint64_t slot = 0; slot < tree_.leaf_count; ++slot) {
        const float mass = tree_.mass(slot);
        if (is_row(tree_.stored(slot)) ? !(mass > 0 && mass <= 1) : mass != 0) return false;
    }
    return true;
}

void RowIndex::remake_masses() {
    if (config_.rank_based) {
        if (!keep_ranks()) return rank();
        return kernels_.refresh_range(tree_, 0, tree_.leaf_count);
    }
    head_->changes = 0;
    const double exponent = alpha();
    head_->massless = 0;
    for (std::uint64_t group = 0; group < SumTree::groups_of(tree_.leaf_count); ++group) {
        MassGroup& leaves = tree_.leaves[group];
        kernels_.masses(leaves.stored, leaves.masses, 16, config_.eps, exponent);
        for (int i = 0; i < 16; ++i) head_->massless += is_row(leaves.stored[i]) && leaves.masses[i] == 0;
    }
    kernels_.refresh_range(tree_, 0, tree_.leaf_count);
}

// Largest priority first; the bits of stored priorities grow with the priority. Equal ones stay in the ring's order.
void RowIndex::rank() {
    constexpr int kBits = 11;
    std::vector<std::uint64_t> order, sorted;
    order.reserve(head_->rows);
    for (std::uint64_t slot = 0; slot < tree_.leaf_count; ++slot) {
        const float stored = tree_.stored(slot);
        tree_.mass(slot) = 0;
        if (is_row(stored)) order.push_back(std::uint64_t{~std::bit_cast<std::uint32_t>(stored)} << 32 | slot);
    }
    sorted.resize(order.size());
    for (int shift = 32; shift < 64; shift += kBits) {
        std::uint64_t starts[(1 << kBits) + 1] = {};
        for (std::uint64_t item : order) ++starts[(item >> shift & ((1 << kBits) - 1)) + 1];
        for (int i = 0; i < 1 << kBits; ++i) starts[i + 1] += starts[i];
        for (std::uint64_t item : order) sorted[starts[item >> shift & ((1 << kBits) - 1)]++] = item;
        order.swap(sorted);
    }
    const double exponent = -alpha();
    head_->ranked = 0;
    double ranks[64], masses[64];
    for (std::size_t first = 0; first < order.size(); first += 64) {
        const std::size_t count = std::min<std::size_t>(64, order.size() - first);
        for (std::size_t i = 0; i < count; ++i) ranks[i] = static_cast<double>(first + i + 1);
        kernels_.powers(ranks, masses, count, exponent);
        for (std::size_t i = 0; i < count; ++i) {
            tree_.mass(order[first + i] & 0xffffffff) = static_cast<float>(masses[i]);
        }
    }
    head_->massless = head_->changes = 0;
    head_->ranked = 1;
    kernels_.refresh_range(tree_, 0, tree_.leaf_count);
}

// ---- updating -------------------------------------------------------------------------------------------------------

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
        if (slot >= tree_.leaf_count) continue;
        const MassGroup& group = tree_.leaves[slot / SumTree::kFan];
        __builtin_prefetch(group.stored, 1);
        __builtin_prefetch(group.masses, 1);
        __builtin_prefetch(&table_.word(slot));
    }
    stored_.resize(count);
    masses_.resize(count);
    for (std::size_t i = 0; i < count; ++i) stored_[i] = stored_priority(std::fabs(priorities[i]));
    if (!config_.rank_based) kernels_.masses(stored_.data(), masses_.data(), count, config_.eps, alpha());
    float largest = -1;
    std::size_t applied = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint64_t serial = serials[i], slot = leaves_[i];
        if (slot >= tree_.leaf_count || (tree_.stored(slot) == 0 && !is_row(tree_.stored(slot)))) continue;
        const std::uint64_t word = std::atomic_ref<std::uint64_t>(table_.word(slot)).load(std::memory_order_relaxed);
        if (serial_of(word) != serial || !is_live(word, least) || serial >= cursors_[table_.block_of(slot)]) continue;
        if (is_waiting(tree_.stored(slot))) {
            tree_.stored(slot) = waiting_priority(stored_[i]);
        } else {
            set_leaf(slot, -stored_[i], config_.rank_based ? tree_.mass(slot) : masses_[i]);
        }
        largest = std::max(largest, -stored_[i]);
        leaves_[applied++] = slot;
        SHARPWAVE_FAULT(index_half_updated);
    }
    SHARPWAVE_FAULT(index_updated);
    kernels_.refresh(tree_, leaves_.data(), applied);
    head_->changes += applied;
    if (largest > load_real(counters.running_max)) store_real(counters.running_max, largest);
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
        const std::uint64_t slot = serials[i] > kMaxSerial ? tree_.leaf_count : table_.slot_of(serials[i]);
        priorities[i] = -1;
        if (slot >= tree_.leaf_count) continue;
        const std::uint64_t word = std::atomic_ref<std::uint64_t>(table_.word(slot)).load(std::memory_order_acquire);
        if (serial_of(word) == serials[i] && is_live(word, least) && is_row(tree_.stored(slot)))
            priorities[i] = std::fabs(tree_.stored(slot));
    }
}

// ---- orders ---------------------------------------------------------------------------------------------------------

// The slot after the newest row that the index knows: from there on rows are in the order of their age. Where several
// writers fill blocks at once, exact to a block.
std::uint64_t RowIndex::turn() const {
    std::uint64_t latest = kNone;
    const std::uint64_t used = table_.counters().writers_used.value.load(std::memory_order_acquire);
    for (std::uint64_t i = 0; i < used; ++i) {
        const WriterRecord& writer = table_.writer_record(i);
        if (table_.position(i).ticket == kNone) continue;
        if (latest == kNone || writer.indexed_ticket > latest) latest = writer.indexed_ticket;
    }
    if (latest == kNone) return 0;
    const std::uint64_t block = latest % table_.blocks(), first = latest * table_.block_rows();
    const std::uint64_t filled = cursors_[block] > first ? cursors_[block] - first : 0;
    return (block * table_.block_rows() + std::min(filled, table_.block_length(block))) % tree_.leaf_count;
}

// Newest first; where there are fewer, they come again.
void RowIndex::newest_rows(std::uint64_t* slots, std::size_t count) const {
    const std::uint64_t start = turn();
    std::size_t found = 0;
    const std::uint64_t most = std::min<std::uint64_t>(count, head_->rows);
    for (std::uint64_t i = 1; found < most && i <= tree_.leaf_count; ++i) {
        const std::uint64_t slot = (start + tree_.leaf_count - i) % tree_.leaf_count;
        if (is_row(tree_.stored(slot))) slots[found++] = slot;
    }
    for (std::size_t i = found; i < count; ++i) slots[i] = slots[i - found];
}

void RowIndex::begin_epoch() {
    for (std::uint64_t slot = 0; slot < tree_.leaf_count; ++slot) {
        if (is_row(tree_.stored(slot))) set_leaf(slot, 1, 1);
    }
    kernels_.refresh_range(tree_, 0, tree_.leaf_count);
    table_.counters().shuffle_epoch.value.fetch_add(1, std::memory_order_relaxed);
}

void RowIndex::count_reads(const std::uint64_t* slots, std::size_t count) {
    if (config_.max_reads == 0) return;
    changed_.clear();
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint64_t slot = slots[i];
        const std::uint64_t reads = reads_ ? ++reads_[slot] : 1;
        if (reads < config_.max_reads || !is_row(tree_.stored(slot))) continue;
        remove(slot);
        changed_.push_back(slot);
    }
    if (changed_.empty()) return;
    table_.counters().rows_consumed.value.fetch_add(changed_.size(), std::memory_order_relaxed);
    share_anew();
    kernels_.refresh(tree_, changed_.data(), changed_.size());
}

// Episodes whose rows came or went, those in changed_, share their unit among those that are left.
void RowIndex::share_anew() {
    if (!config_.starts.per_episode) return;
    const std::vector<std::uint64_t> slots = changed_;
    for (std::uint64_t slot : slots) recount_episode(slot);
}

void RowIndex::give_back(const std::uint64_t* serials, std::size_t count) {
    const bool is_shuffled = config_.order == Order::shuffle;
    if (config_.max_reads == 0 && !is_shuffled) return;
    const Table::IndexLock lock(table_);
    catch_up();
    const std::uint64_t least = table_.least_word();
    changed_.clear();
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint64_t slot = table_.slot_of(serials[i]);
        if (slot >= tree_.leaf_count) continue;
        const std::uint64_t word = std::atomic_ref<std::uint64_t>(table_.word(slot)).load(std::memory_order_acquire);
        if (serial_of(word) != serials[i] || !is_live(word, least)) continue;
        if (reads_ && reads_[slot] > 0) --reads_[slot];
        const bool was_consumed = config_.max_reads && tree_.stored(slot) == 0 && !is_row(tree_.stored(slot));
        if (!was_consumed && !is_shuffled) continue;
        const float priority = is_shuffled ? 1 : fallback_priority(-1);
        set_leaf(slot, priority, mass_of(priority));
        changed_.push_back(slot);
        if (was_consumed) table_.counters().rows_consumed.value.fetch_sub(1, std::memory_order_relaxed);
    }
    share_anew();
    kernels_.refresh(tree_, changed_.data(), changed_.size());
}

void RowIndex::refuse(std::uint64_t asked) const {
    const std::uint64_t rows = head_->rows;
    if (rows > 0) {
        throw Error(ErrorKind::not_ready, "sample(): expected at most " + std::to_string(rows) + " rows, got " +
                                              std::to_string(asked) + ": each is given once; ask for fewer");
    }
    if (table_.size() == 0) refuse_empty();
    if (config_.starts.needs == StartRule::Needs::end) {
        throw Error(ErrorKind::not_ready, "sample(): hindsight draws from finished episodes and none has ended yet");
    }
    if (config_.max_reads && table_.counters().rows_consumed.value.load(std::memory_order_relaxed)) {
        throw Error(ErrorKind::not_ready, "sample(): every row has been read max_reads=" +
                                              std::to_string(config_.max_reads) + " times; add rows first");
    }
    throw Error(ErrorKind::not_ready, "sample(): no window of length=" + std::to_string(config_.starts.length) +
                                          " fits yet; add rows first, or give end=\"pad\"");
}

}  // namespace sharpwave
