#include "table/dead_writers.h"

#include <algorithm>
#include <atomic>

#include "base/error.h"
#include "base/fault.h"
#include "table/client_rows.h"
#include "table/heap.h"

namespace sharpwave {

using namespace format;

// Where a process died between retiring a row and counting that: the count is made what it was about to be.
void DeadWriters::finish_retiring(WriterRecord& record) {
    const std::uint64_t serial = record.retiring.load() - 1;
    if (serial == kNone) return;
    const std::uint64_t slot = table_.slot_of(serial);
    if (slot < table_.header().slots) {
        const std::uint64_t seen = table_.word(slot);
        const bool is_gone = serial_of(seen) == serial && ((seen & kRetired) || state_of(seen) == kEmpty);
        if (is_gone) record.gone.store(record.gone_then.load());
    }
    record.retiring.store(0);
}

// The head moves after the rows: whole steps past it were finished, a part of one was not. Either way the head goes
// past them, so that no serial is given twice. Returns where it stands then.
std::uint64_t DeadWriters::finish_steps(std::uint64_t ticket, std::uint64_t head) {
    const std::uint64_t block = ticket % table_.blocks(), width = table_.width();
    const std::uint64_t base = block * table_.block_rows(), first = ticket * table_.block_rows();
    while (head < table_.block_length(block)) {
        std::uint64_t begun = 0, finished = 0;
        for (std::uint64_t env = 0; env < width; ++env) {
            const std::uint64_t seen = table_.word(base + head + env);
            if (serial_of(seen) != first + head + env || state_of(seen) == kEmpty) continue;
            ++begun;
            finished += state_of(seen) != kWriting;
        }
        if (begun == 0) break;
        for (std::uint64_t env = 0; finished != width && env < width; ++env) {
            // WRITING first: a process that dies between checksum and word leaves a row that the next one makes
            // VOID.
            const std::uint64_t slot = base + head + env;
            const std::uint64_t dropped = make_word(first + head + env, 0, kVoid);
            std::atomic_ref<std::uint64_t>(table_.word(slot)).store(make_word(first + head + env, 0, kWriting));
            if (table_.checksums()) table_.checksums()[slot] = table_.row_checksum(slot, dropped);
            SHARPWAVE_FAULT(settle_void);
            std::atomic_ref<std::uint64_t>(table_.word(slot)).store(dropped);
        }
        if (finished != width) table_.mark_uneven(block);
        head += width;
    }
    return head;
}

bool DeadWriters::settle(std::uint64_t writer) {
    WriterRecord& record = table_.writer_record(writer);
    ClientRows::settle(table_, writer);  // first: half-written steps look finished once they are VOID
    const auto [ticket, reached] = table_.position(writer);
    if (ticket == kNone) return true;
    bool is_settled = true;
    const std::uint64_t block = ticket % table_.blocks(), width = table_.width();
    std::uint64_t head = std::min(reached / width * width, table_.block_length(block));
    if (table_.block_record(block).ticket.load() == ticket) {
        head = finish_steps(ticket, head);
        table_.set_position(record, ticket, head);
    }
    if (table_.layout().gives_next()) is_settled = settle_next_observations(writer, block);
    end_newest_rows(ticket, head);
    table_.counters().late_ends.value.fetch_add(1, std::memory_order_acq_rel);
    return is_settled;
}

// Moves next observations that wait into a heap: that of a block which the writer held, else of one that no writer
// fills.
bool DeadWriters::settle_next_observations(std::uint64_t writer, std::uint64_t near) {
    const std::uint64_t pair = writer * table_.header().width;
    if (!is_waited_for(table_, pair)) return true;
    const auto owner = static_cast<std::uint32_t>(writer + 1);
    for (const bool borrows : {false, true}) {
        for (std::uint64_t tried = 0; tried < table_.header().blocks; ++tried) {
            BlockRecord& block = table_.block_record((near + tried) % table_.header().blocks);
            std::uint32_t holder = 0;
            const bool is_held = borrows ? block.owner.compare_exchange_strong(holder, owner, std::memory_order_acq_rel)
                                         : block.owner.load(std::memory_order_acquire) == owner;
            if (!is_held) continue;
            bool is_settled = true;
            try {
                BlockHeap heap(table_, (near + tried) % table_.header().blocks);
                settle_waiting(table_, heap, pair);
            } catch (const Error&) {
                is_settled = false;  // no space: they stay where they wait, and the record stays taken
            }
            if (borrows) block.owner.store(0, std::memory_order_release);
            return is_settled;
        }
    }
    return false;
}

// The newest row of each env is the last of its episode. It may stand some blocks back: its writer had claimed the next
// one and written nothing yet, or the env was masked out.
void DeadWriters::end_newest_rows(std::uint64_t ticket, std::uint64_t head) {
    const std::uint64_t width = table_.header().width, rows = table_.header().block_rows;
    for (std::uint64_t env = 0; env < width; ++env) {
        std::uint64_t at = ticket, steps = head / width;
        for (std::uint64_t hops = 0; hops <= table_.header().blocks; ++hops) {
            const std::uint64_t block = at % table_.header().blocks;
            bool is_done = false;
            while (steps > 0 && !is_done) {
                const std::uint64_t offset = --steps * width + env, seen = table_.word(block * rows + offset);
                // Written over, or never written: what came before it in this block is gone too.
                is_done = serial_of(seen) != at * rows + offset || state_of(seen) == kCommitted;
                if (is_done) table_.end_episode(at * rows + offset);
            }
            const std::uint64_t before = table_.block_record(block).previous_ticket.load(std::memory_order_acquire);
            if (is_done || table_.block_record(block).ticket.load() != at || before == kNone || before >= at) break;
            at = before;
            steps = table_.block_length(before % table_.header().blocks) / width;
        }
    }
}

// Every step may be done again by another: the record's count is what it was before, or was to become, and what has
// happened to the block since.
void DeadWriters::recount_block(WriterRecord& record, std::uint64_t block) {
    const std::uint64_t base = block * table_.header().block_rows, least = table_.least_word();
    std::uint64_t counted = table_.block_record(block).live.load(), live = 0;
    if (record.settling.load() != block + 1) {
        // Rows that were cleared are in no record's count, though the block's own is not 0 before it is claimed again.
        const std::uint64_t ticket = table_.block_record(block).ticket.load();
        const bool is_cleared = ticket == kNone || ticket < table_.counters().origin_ticket.value.load();
        record.settled_live.store(record.live.load() - record.gone.load());
        record.settled_block.store(is_cleared ? 0 : static_cast<std::int64_t>(counted));
        record.settling.store(block + 1);
    }
    do {
        live = 0;
        for (std::uint64_t i = 0; i < table_.block_length(block); ++i) live += is_live(table_.word(base + i), least);
    } while (!table_.block_record(block).live.compare_exchange_strong(counted, live));
    SHARPWAVE_FAULT(reclaim_half_counted);
    record.live.store(record.settled_live.load() + static_cast<std::int64_t>(live) - record.settled_block.load());
    record.gone.store(0);
    record.settling.store(0);
}

// Its owner counted after it committed: a kill in between left the two apart.
void DeadWriters::recount(std::uint64_t writer) {
    WriterRecord& record = table_.writer_record(writer);
    if (const std::uint64_t begun = record.settling.load(); begun && begun <= table_.header().blocks)
        recount_block(record, begun - 1);
    for (std::uint64_t b = 0; b < table_.header().blocks; ++b) {
        if (table_.block_record(b).owner.load() == writer + 1) recount_block(record, b);
    }
    record.live.fetch_sub(record.gone.exchange(0));
    record.settling.store(0);
}

// Mostly one block; two where it died while it claimed the next.
void DeadWriters::free_blocks(std::uint64_t writer) {
    for (std::uint64_t b = 0; b < table_.header().blocks; ++b) {
        std::uint32_t owner = static_cast<std::uint32_t>(writer + 1);
        if (table_.block_record(b).owner.load(std::memory_order_acquire) != owner) continue;
        table_.mark_uneven(b);  // claimed, perhaps, and never written
        table_.block_record(b).owner.compare_exchange_strong(owner, 0, std::memory_order_acq_rel);
    }
}

void DeadWriters::reclaim() {
    if (!table_.presence()) return;
    const std::uint64_t used = table_.header().max_writers;  // taken first, counted as used then
    const auto is_dead = [&](std::uint64_t owner) {
        return owner != 0 && !table_.presence()->is_alive(owner_seat(owner), owner_tag(owner));
    };
    // Mostly none died: no lock for that.
    std::uint64_t first = 0;
    while (first < used && !is_dead(table_.writer_record(first).owner.load(std::memory_order_acquire))) ++first;
    if (first == used) return;
    if (!table_.presence()->take(Presence::Turn::cleaning, 1.0)) return;  // another process is at it
    struct Give {
        const Presence& presence;
        ~Give() { presence.give(Presence::Turn::cleaning); }
    } give{*table_.presence()};
    for (std::uint64_t i = first; i < used; ++i) {
        if (!is_dead(table_.writer_record(i).owner.load(std::memory_order_acquire))) continue;
        SHARPWAVE_FAULT(reclaim_begun);
        if (table_.writer_record(i).settling.load() == 0)
            table_.writer_record(i).settling.store(kNone);  // counts are in motion from here on
        finish_retiring(table_.writer_record(i));
        const bool is_settled = settle(i);
        SHARPWAVE_FAULT(reclaim_settled);
        recount(i);
        SHARPWAVE_FAULT(reclaim_counted);
        if (!is_settled) continue;  // again when there is space
        free_blocks(i);
        SHARPWAVE_FAULT(reclaim_freed);
        table_.counters().writers_reclaimed.value.fetch_add(1, std::memory_order_relaxed);
        if (ClientRows client(table_.writer_record(i)); client.has_client())
            client.touch(ClientRows::next_stamp(table_));
        table_.writer_record(i).owner.store(0, std::memory_order_release);
    }
}

}  // namespace sharpwave
