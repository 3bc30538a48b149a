#include "sampling/catch_up.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <functional>

#include "base/fault.h"
#include "sampling/ranks.h"

namespace sharpwave {

using namespace format;

namespace {

// Whether the leaves from `slot` on are a whole group of the tree, before `end`.
bool is_group(std::uint64_t slot, std::uint64_t end) {
    return slot % SumTree::kFan == 0 && slot + SumTree::kFan <= end;
}

// By bits: a row of priority 0 is stored as -0.
bool is_empty(const MassGroup& group) {
    std::uint32_t any = 0;
    for (const float stored : group.stored) any |= std::bit_cast<std::uint32_t>(stored);
    return any == 0;
}

}  // namespace

void CatchUp::run() {
    const std::atomic<std::uint64_t>& claims = masses_.table.counters().next_ticket.value;
    for (int pass = 0; pass < kPasses; ++pass) {
        const std::uint64_t claimed = claims.load(std::memory_order_acquire);
        look();
        if (claims.load(std::memory_order_acquire) == claimed && !(masses_.head->rows == 0 && has_moved())) return;
    }
}

bool CatchUp::has_moved() const {
    for (std::uint64_t i = 0; i < positions_.size(); ++i) {
        const auto [ticket, head] = masses_.table.position(i);
        if (ticket != positions_[i].ticket || head != positions_[i].head) return true;
    }
    return false;
}

void CatchUp::look() {
    Counters& counters = masses_.table.counters();
    const std::uint64_t origin = counters.origin_ticket.value.load(std::memory_order_acquire);
    const bool rebuilds = counters.index_origin.value.load(std::memory_order_relaxed) != origin;
    if (rebuilds) rebuild();
    if (!masses_.config.starts.is_any()) {
        const std::uint64_t ends = counters.late_ends.value.load(std::memory_order_acquire);
        if (counters.seen_ends.value.load(std::memory_order_relaxed) != ends) {
            if (!waiting_.take_late_ends()) rebuild();
            counters.seen_ends.value.store(ends, std::memory_order_relaxed);
        }
    }
    ranges_.clear();
    seen_.clear();
    positions_.clear();
    const std::uint64_t used = counters.writers_used.value.load(std::memory_order_acquire);
    bool chain_broke = rebuilds;  // records may have been made anew too: look at all blocks
    for (std::uint64_t i = 0; i < used; ++i) {
        const Position position = masses_.table.position(i);
        const auto [ticket, head] = position;
        positions_.push_back(position);
        if (ticket == kNone) continue;
        const std::uint64_t known = masses_.table.writer_record(i).indexed_ticket;
        if (ticket == known &&
            masses_.cursors[ticket % masses_.table.blocks()] == ticket * masses_.table.block_rows() + head) [[likely]]
            continue;
        if (!follow_chain(i, position)) chain_broke = true;
        seen_.emplace_back(i, ticket);
    }
    if (chain_broke) collect_all(used);
    if (!ranges_.empty()) {
        std::sort(ranges_.begin(), ranges_.end(), [](const Range& a, const Range& b) { return a.end < b.end; });
        take_in();
    }
    // Last: a process that dies before it leaves the way back to the rows that are not in yet.
    for (const auto& [i, ticket] : seen_) masses_.table.writer_record(i).indexed_ticket = ticket;
    if (Ranks ranks(masses_); masses_.config.rank_based && ranks.are_due()) ranks.make();
}

// Back along a writer's blocks to the one that was its newest at the last catch-up. False: a block on the way was taken
// over meanwhile.
bool CatchUp::follow_chain(std::uint64_t writer, const Position& position) {
    const std::uint64_t known = masses_.table.writer_record(writer).indexed_ticket;
    for (std::uint64_t at = position.ticket;;) {
        const BlockRecord& block = masses_.table.block_record(at % masses_.table.blocks());
        if (block.ticket.load(std::memory_order_acquire) != at) return at == known;
        collect(at, at == position.ticket ? position.head : masses_.table.block_length(at % masses_.table.blocks()));
        const std::uint64_t before = block.previous_ticket.load(std::memory_order_acquire);
        if (at == known || before == kNone || before < known || before >= at) return true;
        at = before;
    }
}

// Every block, whatever the chains say. Writers go on meanwhile, and rows that are taken in while some before them are
// not would not be looked at again when those come. So blocks that are claimed from here on wait for the next time, and
// the newest of the others comes first, as along a chain.
void CatchUp::collect_all(std::uint64_t used) {
    const Table& table = masses_.table;
    const std::uint64_t claimed = table.counters().next_ticket.value.load(std::memory_order_acquire);
    ranges_.clear();
    tickets_.clear();
    for (std::uint64_t b = 0; b < table.blocks(); ++b) {
        const std::uint64_t ticket = table.block_record(b).ticket.load(std::memory_order_acquire);
        if (ticket < claimed) tickets_.push_back(ticket);
    }
    std::sort(tickets_.begin(), tickets_.end(), std::greater<>());
    for (const std::uint64_t ticket : tickets_) {
        const std::uint64_t b = ticket % table.blocks();
        // Without an owner it is filled, or just claimed.
        const bool is_claimed = table.block_record(b).owner.load(std::memory_order_acquire) != 0;
        std::uint64_t head = is_claimed ? 0 : table.block_length(b);
        for (std::uint64_t i = 0; i < used; ++i) {
            if (const auto [its_ticket, its_head] = table.position(i); its_ticket == ticket) head = its_head;
        }
        collect(ticket, head);
    }
}

// The rows of a block that are not in the index yet. Its writer has finished those below `head`: what is no row there
// has gone since, and is passed over. Where the block was claimed anew since the last time, the lap before may have
// left rows behind the new ones that were never seen.
void CatchUp::collect(std::uint64_t ticket, std::uint64_t head) {
    const std::uint64_t block = ticket % masses_.table.blocks(), length = masses_.table.block_length(block);
    const std::uint64_t first = ticket * masses_.table.block_rows(), base = block * masses_.table.block_rows();
    const std::uint64_t seen = masses_.cursors[block], begin = seen > first ? seen - first : 0;
    // Either all rows of the lap before are known, or all rows behind the new ones are looked at. What is known may
    // also be of an earlier lap, after which the block was filled again and never seen.
    const std::uint64_t last = seen ? (seen - 1) / masses_.table.block_rows() : 0;
    const bool knows_lap_before =
        last + masses_.table.blocks() == ticket && seen == last * masses_.table.block_rows() + length;
    const bool is_first_lap = ticket < masses_.table.blocks();  // nothing is behind the new rows
    const bool knows_rest = seen > first || knows_lap_before || is_first_lap;
    const bool is_even = knows_rest && !masses_.table.is_uneven(block, ticket) &&
                         ticket >= masses_.table.counters().origin_ticket.value.load(std::memory_order_acquire);
    if (is_even) {
        if (head > begin) ranges_.push_back({base + begin, head - begin, first + head, true});
        return;
    }
    std::uint64_t end = begin;
    for (; end < length; ++end) {
        const std::uint64_t word = masses_.table.load_word(base + end);
        const std::uint64_t state = state_of(word);
        const bool is_done = serial_of(word) == first + end && (state == kCommitted || state == kVoid);
        if (!is_done && end >= head) break;
    }
    // Past the head whole steps only: part of one is taken back if its writer dies.
    if (end > head) end = std::max(begin, std::max(head, end / masses_.table.width() * masses_.table.width()));
    const std::uint64_t reach = knows_rest ? end : length;
    if (reach > begin) ranges_.push_back({base + begin, reach - begin, first + end, false});
}

// Rows of an earlier lap that were taken in before stay as they are.
bool CatchUp::is_known(std::uint64_t slot, std::uint64_t least) const {
    const std::uint64_t word = masses_.table.load_word(slot);
    return is_live(word, least) && serial_of(word) < masses_.cursors[masses_.table.block_of(slot)];
}

// Rows that are taken in sixteen at a time: nothing has to be known of any but that it is there.
inline bool CatchUp::is_plain(const Range& range) const { return is_many_ && range.is_even && !masses_.given; }

inline float CatchUp::given_at(std::uint64_t slot) const {
    return masses_.given ? std::atomic_ref<float>(masses_.given[slot]).load(std::memory_order_relaxed) : 0.0f;
}

inline void CatchUp::leave(std::uint64_t slot) {
    const float stored = masses_.tree.stored(slot);
    if (is_row(stored)) leaving_max_ = std::max(leaving_max_, -stored);
    if (!is_many_) leaves_.push_back(slot);
    masses_.remove(slot);
}

void CatchUp::refresh() {
    if (!is_many_) return masses_.kernels.refresh(masses_.tree, leaves_.data(), leaves_.size());
    for (const Range& range : ranges_) {
        masses_.kernels.refresh_range(masses_.tree, range.slot, range.slot + range.count);
    }
    masses_.kernels.refresh(masses_.tree, retired_.data(), retired_.size());
}

void CatchUp::take_in() {
    std::uint64_t count = 0;
    for (const Range& range : ranges_) count += range.count;
    is_many_ = count > 64;
    leaving_max_ = -1;
    retired_.clear();
    leaves_.clear();
    masses_.changed.clear();
    const float given_max = let_leave();
    if (masses_.tree.keeps_largest && leaving_max_ >= masses_.tree.largest_priority()) refresh();
    if (given_max >= 0) masses_.raise_running_max(given_max);
    enter(given_max);
    if (!masses_.config.starts.is_any()) enter_waiting();
    SHARPWAVE_FAULT(index_half_taken_in);
    refresh();
    SHARPWAVE_FAULT(index_taken_in);
    for (const Range& range : ranges_) masses_.cursors[masses_.table.block_of(range.slot)] = range.end;
}

// Rows whose places are taken, and rows that are kept for their neighbours only. Returns the largest priority that the
// new rows brought; -1: none.
float CatchUp::let_leave() {
    const std::uint64_t least = masses_.table.least_word(), spare = masses_.table.header().spare_rows;
    const std::uint64_t window = spare ? spare + masses_.table.width() * masses_.table.layout().stack() : 0;
    float given_max = -1;
    for (const Range& range : ranges_) {
        for (std::uint64_t slot = range.slot, end = range.slot + range.count; slot < end; ++slot) {
            if (is_plain(range) && is_group(slot, end) && is_empty(masses_.tree.leaves[slot / SumTree::kFan])) {
                slot += SumTree::kFan - 1;
                continue;
            }
            if (!range.is_even && is_known(slot, least)) continue;
            leave(slot);
            const float given = given_at(slot);
            if (is_row(given) && (range.is_even || is_live(masses_.table.load_word(slot), least)))
                given_max = std::max(given_max, -given);
        }
        leave_ahead(range.slot + range.count, window);
    }
    return given_max;
}

// A writer retires rows ahead of it: the next few that are rows. Where several writers share the ring they may stand
// elsewhere too; a draw that meets one takes it out.
void CatchUp::leave_ahead(std::uint64_t end, std::uint64_t window) {
    const std::uint64_t least = masses_.table.least_word(), leaf_count = masses_.tree.leaf_count;
    for (std::uint64_t i = 0, reach = window; i < reach && i < leaf_count; ++i) {
        const std::uint64_t slot = (end + i) % leaf_count, word = masses_.table.load_word(slot);
        if (word < least || word == 0) {
            // Never used: before the first lap is over the oldest rows stand at the ring's start.
            if (end + i >= leaf_count) break;
            reach += leaf_count - (end + i);
            i = leaf_count - end - 1;
            continue;
        }
        if (is_live(word, least)) continue;
        reach = i + 1 + window;
        if (masses_.tree.stored(slot) == 0 && !is_row(masses_.tree.stored(slot))) continue;
        leave(slot);
        retired_.push_back(slot);
    }
}

// Sixteen rows at once; those that were there have left.
void CatchUp::enter_group(std::uint64_t slot, float stored, float mass) {
    MassGroup& group = masses_.tree.leaves[slot / SumTree::kFan];
    std::fill_n(group.stored, SumTree::kFan, stored);
    std::fill_n(group.masses, SumTree::kFan, mass);
    if (masses_.reads) std::fill_n(masses_.reads + slot, SumTree::kFan, 0);
    masses_.head->changes += SumTree::kFan;
    if (!is_row(stored)) return;
    masses_.head->rows += SumTree::kFan;
    if (mass == 0) masses_.head->massless += SumTree::kFan;
}

// New rows get their priorities: with mass where every row may start an example, else they wait.
void CatchUp::enter(float given_max) {
    const std::uint64_t least = masses_.table.least_word();
    const float priority = masses_.fallback_priority(given_max);
    const float mass = masses_.mass_of(priority);
    const bool may_all_start = masses_.config.starts.is_any();
    for (const Range& range : ranges_) {
        for (std::uint64_t slot = range.slot, end = range.slot + range.count; slot < end; ++slot) {
            if (is_plain(range) && is_group(slot, end)) {
                enter_group(slot, may_all_start ? stored_priority(priority) : waiting_priority(priority),
                            may_all_start ? mass : 0);
                slot += SumTree::kFan - 1;
                continue;
            }
            if (!range.is_even && (!is_live(masses_.table.load_word(slot), least) || is_known(slot, least))) continue;
            ++masses_.head->changes;
            if (masses_.reads) masses_.reads[slot] = 0;
            const float given = given_at(slot);
            if (!may_all_start) {
                masses_.set_waiting(slot, is_row(given) ? -given : priority);
            } else if (is_row(given)) {
                masses_.set_leaf(slot, -given, masses_.mass_of(-given));
            } else {
                masses_.set_leaf(slot, priority, mass);
            }
        }
    }
}

// In the order of their serials: a block may hold rows of this lap before some of the last.
void CatchUp::enter_waiting() {
    const Table& table = masses_.table;
    const std::uint64_t least = table.least_word();
    words_.clear();
    for (const Range& range : ranges_) {
        for (std::uint64_t slot = range.slot; slot < range.slot + range.count; ++slot) {
            const std::uint64_t word = table.load_word(slot), state = state_of(word);
            if ((state == kCommitted || state == kVoid) && word >= least &&
                serial_of(word) >= masses_.cursors[table.block_of(slot)])
                words_.push_back(word);
        }
    }
    waiting_.number(words_);
    for (const Range& range : ranges_) {
        if (!masses_.config.starts.per_episode) break;
        // Episodes that grew: those with a last row here. And those that lost rows: the oldest of them now.
        const std::uint64_t end = range.slot + range.count;
        for (std::uint64_t slot = range.slot; slot < end; ++slot) {
            std::uint64_t next = slot, word = table.load_word(slot);
            if (is_live(word, least) && !table.successor(next, word)) waiting_.share_episode(slot);
        }
        for (std::uint64_t i = 0; i < table.width(); ++i) {
            waiting_.share_episode((end + i) % masses_.tree.leaf_count);
        }
    }
    masses_.refresh_changed();
}

void CatchUp::rebuild() {
    const std::uint64_t origin = masses_.table.counters().origin_ticket.value.load(std::memory_order_acquire);
    const std::uint64_t least = masses_.table.least_word();
    // Nothing of the sums is trusted, nor what stands beside the last leaf: a file may have been damaged.
    std::memset(masses_.table.region(kTree), 0, masses_.table.header().regions[kTree].bytes);
    for (std::uint64_t slot = masses_.tree.leaf_count; slot % SumTree::kFan != 0; ++slot)
        masses_.tree.stored(slot) = masses_.tree.mass(slot) = 0;
    SHARPWAVE_FAULT(index_half_rebuilt);
    masses_.head->rows = 0;
    const bool may_all_start = masses_.config.starts.is_any();
    for (std::uint64_t slot = 0; slot < masses_.tree.leaf_count; ++slot) {
        float& stored = masses_.tree.stored(slot);
        if (stored == 0 && !is_row(stored)) continue;
        const std::uint64_t word = masses_.table.load_word(slot);
        if (!is_live(word, least) || serial_of(word) >= masses_.cursors[masses_.table.block_of(slot)]) {
            stored = 0;
            masses_.tree.mass(slot) = 0;
        } else if (may_all_start) {
            stored = stored_priority(stored);
            ++masses_.head->rows;
        } else if (is_row(stored)) {
            stored = waiting_priority(stored);
        }
    }
    if (may_all_start) {
        masses_.remake();
    } else {
        waiting_.rebuild();
    }
    masses_.table.counters().index_origin.value.store(origin, std::memory_order_release);
}

}  // namespace sharpwave
