// What a table does after a process died, after a power loss, and about damaged files.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <limits>
#include <mutex>
#include <new>
#include <set>
#include <utility>

#include "base/crc32c.h"
#include "base/error.h"
#include "base/fault.h"
#include "base/workers.h"
#include "table/heap.h"
#include "table/table.h"
#include "table/writer.h"

namespace sharpwave {

using namespace format;

bool Table::are_records_sane() const {
    const auto load = [](const Counter& counter) { return counter.value.load(std::memory_order_acquire); };
    const std::uint64_t next = load(counters_->next_ticket), origin = load(counters_->origin_ticket);
    const std::uint64_t most_tickets = kMaxSerial / header_->block_rows;
    bool sane = load(counters_->writers_used) <= header_->max_writers && next <= most_tickets &&
                origin <= next + header_->blocks && origin % header_->blocks == 0;
    const auto is_within = [&](const Counter& counter, double most) {
        const auto number = std::bit_cast<double>(load(counter));
        return number >= 0 && number <= most;
    };
    sane = sane && is_within(counters_->alpha, 1) && is_within(counters_->beta_start, 1) &&
           is_within(counters_->beta_end, 1) && is_within(counters_->beta_steps, 1e18) &&
           is_within(counters_->running_max, std::numeric_limits<float>::max());
    for (std::uint64_t b = 0; b < header_->blocks; ++b) {
        const std::uint64_t ticket = blocks_[b].ticket.load(std::memory_order_acquire);
        sane = sane && (ticket == kNone || (ticket % header_->blocks == b && ticket <= most_tickets));
    }
    for (std::uint64_t i = 0; i < header_->max_writers; ++i) {
        const auto [ticket, head] = position(i);
        sane = sane && (ticket == kNone || ticket <= most_tickets) && head <= header_->block_rows;
    }
    return sane;
}

void Table::check_records() const {
    if (are_records_sane()) return;
    throw Error(ErrorKind::storage, "'" + path() + "' is damaged: its counters contradict its header; " +
                                        "open it with recover=True to save what is whole");
}

std::uint64_t Table::rows_counted() const {
    if (are_records_sane()) return size();
    // Some number is damaged: of those that can be true, what most of them say.
    std::uint64_t by_writers = 0, by_blocks = 0;
    for (std::uint64_t i = 0; i < header_->max_writers; ++i) {
        const std::int64_t live = writers_[i].live.load();
        if (live > 0 && static_cast<std::uint64_t>(live) <= header_->slots)
            by_writers += static_cast<std::uint64_t>(live);
    }
    for (std::uint64_t b = 0; b < header_->blocks; ++b) {
        const std::uint64_t live = blocks_[b].live.load();
        if (live <= block_length(b)) by_blocks += live;
    }
    return std::min({std::max(by_writers, by_blocks), header_->capacity});
}

void Table::remake_records() {
    const std::uint64_t lap = header_->blocks * header_->block_rows;
    std::uint64_t next = 0;
    for (std::uint64_t b = 0; b < header_->blocks; ++b) {
        BlockRecord& block = *new (&blocks_[b]) BlockRecord{};
        block.ticket = block.previous_ticket = block.next_ticket = block.linked_ticket = kNone;
        for (std::uint64_t i = 0; i < block_length(b); ++i) {
            const std::uint64_t slot = b * header_->block_rows + i, serial = serial_of(word(slot));
            if (state_of(word(slot)) == kEmpty || serial % lap != slot) continue;
            const std::uint64_t ticket = serial / header_->block_rows;
            if (block.ticket.load() == kNone || ticket > block.ticket.load()) block.ticket.store(ticket);
            next = std::max(next, ticket + 1);
        }
    }
    for (std::uint64_t i = 0; i < header_->max_writers; ++i) {
        new (&writers_[i]) WriterRecord{};
        writers_[i].position = kNone;
    }
    // What was cleared is not known any more; of the other counters those are kept that can be true.
    counters_->next_ticket.value.store(next);
    for (Counter* counter : {&counters_->origin_ticket, &counters_->writers_used, &counters_->pace_origin}) {
        counter->value.store(0);
    }
    const SamplerNumbers usual;
    struct Number {
        Counter* counter;
        double instead, most;
    };
    const Number numbers[] = {{&counters_->alpha, usual.alpha, 1},
                              {&counters_->beta_start, usual.beta_start, 1},
                              {&counters_->beta_end, usual.beta_end, 1},
                              {&counters_->beta_steps, usual.beta_steps, 1e18},
                              {&counters_->running_max, 1, std::numeric_limits<float>::max()}};
    for (const auto& [counter, instead, most] : numbers) {
        const auto number = std::bit_cast<double>(counter->value.load());
        if (!(number >= 0 && number <= most)) counter->value.store(std::bit_cast<std::uint64_t>(instead));
    }
    counters_->index_origin.value.store(kNone);
}

// Records were made anew from the words. Where a block has none that makes sense, its rows are lost if it ever had any:
// nothing else would count them.
std::uint64_t Table::drop_unnamed_rows() {
    std::uint64_t lost = 0;
    for (std::uint64_t b = 0; b < header_->blocks; ++b) {
        if (blocks_[b].ticket.load() != kNone) continue;
        for (std::uint64_t i = 0; i < block_length(b); ++i) {
            const std::uint64_t slot = b * header_->block_rows + i;
            const std::byte* row = rows_ + slot * header_->row_bytes;
            const auto is_set = [](std::byte byte) { return byte != std::byte{0}; };
            const bool was_row = word(slot) != 0 || (!is_hole(row, header_->row_bytes) &&
                                                     std::any_of(row, row + header_->row_bytes, is_set));
            lost += was_row;
            word(slot) = 0;
        }
    }
    return lost;
}

// After a power loss the pages of counters, records and blocks may be older than those of rows. Tickets are never given
// twice, and rows that are whole are seen.
void Table::catch_up_with_words() {
    std::uint64_t newest = kNone;
    for (std::uint64_t b = 0; b < header_->blocks; ++b) {
        BlockRecord& block = blocks_[b];
        std::uint64_t lap = kNone;
        for (std::uint64_t i = 0; i < block_length(b); ++i) {
            const std::uint64_t slot = b * header_->block_rows + i, seen = word(slot);
            if (state_of(seen) != kCommitted && state_of(seen) != kVoid) continue;
            if (slot_of(serial_of(seen)) != slot || is_damaged(slot, seen)) continue;
            const std::uint64_t ticket = serial_of(seen) / header_->block_rows;
            if (lap == kNone || ticket > lap) lap = ticket;
        }
        if (lap != kNone && (block.ticket.load() == kNone || block.ticket.load() < lap)) {
            block.ticket.store(lap);
            block.previous_ticket.store(kNone);
        }
        for (const std::uint64_t ticket : {block.ticket.load(), block.next_ticket.load()}) {
            if (ticket == kNone || ticket > kMaxSerial / header_->block_rows) continue;
            raise(counters_->next_ticket, ticket + 1);
        }
        if (lap != kNone && (newest == kNone || lap > newest)) newest = lap;
    }
    bool is_reached = newest == kNone;
    for (std::uint64_t i = 0; i < header_->max_writers; ++i) {
        const std::uint64_t ticket = position(i).ticket;
        if (ticket == kNone) continue;
        raise(counters_->next_ticket, ticket + 1);
        raise(counters_->writers_used, i + 1);
        if (newest != kNone && ticket >= newest) is_reached = true;
    }
    if (is_reached) return;
    // Readers look as far as some writer got.
    std::uint64_t head = 0;
    const std::uint64_t block = newest % header_->blocks;
    for (std::uint64_t i = 0; i < block_length(block); ++i) {
        const std::uint64_t seen = word(block * header_->block_rows + i);
        if (serial_of(seen) == newest * header_->block_rows + i && state_of(seen) != kEmpty) head = i + 1;
    }
    set_position(writers_[0], newest, (head + header_->width - 1) / header_->width * header_->width);
    raise(counters_->writers_used, 1);
}

void Table::end_episode(std::uint64_t serial) const {
    const std::uint64_t slot = serial % (header_->blocks * header_->block_rows);
    if (slot >= header_->slots) return;
    if (!add_flags(slot, serial, kTruncated | kClosedByEngine, kEndMask)) return;
    mark_changed(block_of(slot));
}

// The row of that serial may leave its slot at any time: its successor's word is left alone.
bool Table::add_flags(std::uint64_t slot, std::uint64_t serial, std::uint64_t flags, std::uint64_t unless) const {
    std::atomic_ref<std::uint64_t> word(this->word(slot));
    std::uint64_t now = word.load(std::memory_order_relaxed);
    do {
        if (serial_of(now) != serial || state_of(now) != kCommitted || (now & unless)) return false;
    } while (!word.compare_exchange_weak(now, now | flags, std::memory_order_release, std::memory_order_relaxed));
    return true;
}

// Where a process died between retiring a row and counting that: the count is made what it was about to be.
void Table::finish_retiring(WriterRecord& record) const {
    const std::uint64_t serial = record.retiring.load() - 1;
    if (serial == kNone) return;
    const std::uint64_t slot = slot_of(serial);
    if (slot < header_->slots) {
        const std::uint64_t seen = word(slot);
        const bool is_gone = serial_of(seen) == serial && ((seen & kRetired) || state_of(seen) == kEmpty);
        if (is_gone) record.gone.store(record.gone_then.load());
    }
    record.retiring.store(0);
}

bool Table::settle_writer(WriterRecord& record) const {
    const auto [ticket, reached] = unpack(record.position.load(), head_bits_);
    if (ticket == kNone) return true;
    bool is_settled = true;
    const std::uint64_t block = ticket % header_->blocks, width = header_->width;
    const std::uint64_t base = block * header_->block_rows, first = ticket * header_->block_rows;
    std::uint64_t head = std::min(reached / width * width, block_length(block));
    if (blocks_[block].ticket.load() == ticket) {
        // The head moves after the rows: whole steps past it were finished, a part of one was not. Either way the head
        // goes past them, so that no serial is given twice.
        while (head < block_length(block)) {
            std::uint64_t begun = 0, finished = 0;
            for (std::uint64_t env = 0; env < width; ++env) {
                const std::uint64_t seen = word(base + head + env);
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
                std::atomic_ref<std::uint64_t>(word(slot)).store(make_word(first + head + env, 0, kWriting));
                if (checksums_) checksums_[slot] = row_checksum(slot, dropped);
                SHARPWAVE_FAULT(settle_void);
                std::atomic_ref<std::uint64_t>(word(slot)).store(dropped);
            }
            if (finished != width) mark_uneven(block);
            head += width;
        }
        set_position(record, ticket, head);
    }
    if (layout_->gives_next()) {
        const std::uint64_t index = static_cast<std::uint64_t>(&record - writers_);
        is_settled = settle_next_observations(index, block);
    }
    end_newest_rows(ticket, head);
    counters_->late_ends.value.fetch_add(1, std::memory_order_acq_rel);
    return is_settled;
}

// Moves next observations that wait into a heap: that of a block which the writer held, else of one that nobody fills.
bool Table::settle_next_observations(std::uint64_t writer, std::uint64_t near) const {
    const std::uint64_t pair = writer * header_->width;
    if (!is_waited_for(*this, pair)) return true;
    const auto owner = static_cast<std::uint32_t>(writer + 1);
    for (const bool borrows : {false, true}) {
        for (std::uint64_t tried = 0; tried < header_->blocks; ++tried) {
            BlockRecord& block = blocks_[(near + tried) % header_->blocks];
            std::uint32_t holder = 0;
            const bool is_held = borrows ? block.owner.compare_exchange_strong(holder, owner, std::memory_order_acq_rel)
                                         : block.owner.load(std::memory_order_acquire) == owner;
            if (!is_held) continue;
            bool is_settled = true;
            try {
                BlockHeap heap(*this, (near + tried) % header_->blocks);
                settle_waiting(*this, heap, pair);
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
void Table::end_newest_rows(std::uint64_t ticket, std::uint64_t head) const {
    const std::uint64_t width = header_->width, rows = header_->block_rows;
    for (std::uint64_t env = 0; env < width; ++env) {
        std::uint64_t at = ticket, steps = head / width;
        for (std::uint64_t hops = 0; hops <= header_->blocks; ++hops) {
            const std::uint64_t block = at % header_->blocks;
            bool is_done = false;
            while (steps > 0 && !is_done) {
                const std::uint64_t offset = --steps * width + env, seen = word(block * rows + offset);
                // Written over, or never written: what came before it in this block is gone too.
                is_done = serial_of(seen) != at * rows + offset || state_of(seen) == kCommitted;
                if (is_done) end_episode(at * rows + offset);
            }
            const std::uint64_t before = blocks_[block].previous_ticket.load(std::memory_order_acquire);
            if (is_done || blocks_[block].ticket.load() != at || before == kNone || before >= at) break;
            at = before;
            steps = block_length(before % header_->blocks) / width;
        }
    }
}

// Every step may be done again by another: the record's count is what it was before, or was to become, and what has
// happened to the block since.
void Table::recount_block(WriterRecord& record, std::uint64_t block) const {
    const std::uint64_t base = block * header_->block_rows, least = least_word();
    std::uint64_t counted = blocks_[block].live.load(), live = 0;
    if (record.settling.load() != block + 1) {
        // Rows that were cleared are in no record's count, though the block's own is not 0 before it is claimed again.
        const std::uint64_t ticket = blocks_[block].ticket.load();
        const bool is_cleared = ticket == kNone || ticket < counters_->origin_ticket.value.load();
        record.settled_live.store(record.live.load() - record.gone.load());
        record.settled_block.store(is_cleared ? 0 : static_cast<std::int64_t>(counted));
        record.settling.store(block + 1);
    }
    do {
        live = 0;
        for (std::uint64_t i = 0; i < block_length(block); ++i) live += is_live(word(base + i), least);
    } while (!blocks_[block].live.compare_exchange_strong(counted, live));
    SHARPWAVE_FAULT(reclaim_half_counted);
    record.live.store(record.settled_live.load() + static_cast<std::int64_t>(live) - record.settled_block.load());
    record.gone.store(0);
    record.settling.store(0);
}

// Its owner counted after it committed: a kill in between left the two apart.
void Table::recount(std::uint64_t writer) const {
    WriterRecord& record = writers_[writer];
    if (const std::uint64_t begun = record.settling.load(); begun && begun <= header_->blocks)
        recount_block(record, begun - 1);
    for (std::uint64_t b = 0; b < header_->blocks; ++b) {
        if (blocks_[b].owner.load() == writer + 1) recount_block(record, b);
    }
    record.live.fetch_sub(record.gone.exchange(0));
    record.settling.store(0);
}

void Table::reclaim_dead_writers() const {
    if (!presence_) return;
    const std::uint64_t used = header_->max_writers;  // taken first, counted as used then
    const auto is_dead = [&](std::uint64_t owner) {
        return owner != 0 && !presence_->is_alive(owner_seat(owner), owner_tag(owner));
    };
    // Mostly nobody died: no lock for that.
    std::uint64_t first = 0;
    while (first < used && !is_dead(writers_[first].owner.load(std::memory_order_acquire))) ++first;
    if (first == used) return;
    if (!presence_->take(Presence::Turn::cleaning, 1.0)) return;  // somebody else is at it and does not get on
    struct Give {
        const Presence& presence;
        ~Give() { presence.give(Presence::Turn::cleaning); }
    } give{*presence_};
    // Every step may be done twice: who cleans may die as well.
    for (std::uint64_t i = first; i < used; ++i) {
        if (!is_dead(writers_[i].owner.load(std::memory_order_acquire))) continue;
        SHARPWAVE_FAULT(reclaim_begun);
        if (writers_[i].settling.load() == 0) writers_[i].settling.store(kNone);  // counts are in motion from here on
        finish_retiring(writers_[i]);
        const bool is_settled = settle_writer(writers_[i]);
        SHARPWAVE_FAULT(reclaim_settled);
        recount(i);
        SHARPWAVE_FAULT(reclaim_counted);
        if (!is_settled) continue;  // again when there is space
        // Mostly one block; two where it died while it claimed the next.
        for (std::uint64_t b = 0; b < header_->blocks; ++b) {
            std::uint32_t owner = static_cast<std::uint32_t>(i + 1);
            if (blocks_[b].owner.load(std::memory_order_acquire) != owner) continue;
            mark_uneven(b);  // claimed, perhaps, and never written
            blocks_[b].owner.compare_exchange_strong(owner, 0, std::memory_order_acq_rel);
        }
        SHARPWAVE_FAULT(reclaim_freed);
        counters_->writers_reclaimed.value.fetch_add(1, std::memory_order_relaxed);
        writers_[i].owner.store(0, std::memory_order_release);
    }
}

// The serial of the row that this place holds a next observation for, if its checksum is wrong.
std::optional<std::uint64_t> Table::wrongly_waiting(std::uint64_t pair, std::uint64_t half) const {
    const std::byte* place = waiting(pair, half);
    if (is_hole(place, header_->waiting_bytes)) return {};
    const std::uint64_t tag = *reinterpret_cast<const std::uint64_t*>(place);
    if (tag == 0) return {};
    const std::byte* at = place + kWaitingHead;
    for (const Field& field : layout_->fields()) {
        if (!field.gives_next) continue;
        FinalValue value;
        std::memcpy(&value, at, sizeof value);
        if (value.kept_bytes != value.value_bytes || value.value_bytes > field.full_bytes ||
            value.crc != next_checksum(tag - 1, at + sizeof value, value.value_bytes)) {
            return tag - 1;
        }
        at += sizeof value + (field.full_bytes + 15) / 16 * 16;
    }
    return {};
}

template <class Each>
void Table::each_wrongly_waiting(Each each) const {
    if (!layout_->gives_next() || !checksums_) return;
    for (std::uint64_t pair = 0; pair < header_->max_writers * header_->width; ++pair) {
        for (std::uint64_t half = 0; half < 2; ++half) {
            if (const auto serial = wrongly_waiting(pair, half)) each(*serial, waiting(pair, half));
        }
    }
}

// Whether as many rows are there as were counted. A process that was killed in the middle of an add, or of finishing a
// dead writer's, leaves a difference, but never one of more rows than it was at.
bool Table::are_counts_plausible() const {
    std::atomic<std::uint64_t> live{0};
    const std::uint64_t least = least_word();
    in_parallel(header_->blocks, [&](std::size_t first, std::size_t last) {
        std::uint64_t here = 0;
        for (std::size_t b = first; b < last; ++b) {
            for (std::uint64_t i = 0; blocks_[b].ticket.load() != kNone && i < block_length(b); ++i)
                here += is_live(word(b * header_->block_rows + i), least);
        }
        live += here;
    });
    const std::uint64_t origin = counters_->origin_ticket.value.load();
    const bool retires = layout_->uses_heap() || layout_->gives_next() || header_->spare_rows;
    // A row of another writer's block that was retired by a process which died then may still be counted.
    std::int64_t counted = 0,
                 slack = retires ? static_cast<std::int64_t>(counters_->writers_reclaimed.value.load()) : 0;
    for (std::uint64_t i = 0; i < header_->max_writers; ++i) {
        const WriterRecord& record = writers_[i];
        const std::uint64_t settling = record.settling.load();
        const bool is_counting = settling != 0 && settling <= header_->blocks;  // then settled_live is what it will be
        if (record.origin.load() == origin)
            counted += is_counting ? record.settled_live.load() : record.live.load() - record.gone.load();
        if (record.owner.load() == 0) continue;
        slack += retires && record.retiring.load() != 0 ? 1 : 0;
        if (settling != 0) slack += static_cast<std::int64_t>(Writer::kGroupRows + header_->width);
        const auto [ticket, head] = position(i);
        const std::uint64_t block = ticket % header_->blocks;
        for (std::uint64_t at = head; ticket != kNone && at < block_length(block); ++at) {
            const std::uint64_t seen = word(block * header_->block_rows + at);
            if (serial_of(seen) != ticket * header_->block_rows + at || state_of(seen) == kEmpty) break;
            ++slack;
        }
    }
    return std::abs(static_cast<std::int64_t>(live.load()) - counted) <= slack;
}

template <class Each>
void Table::each_wrong_link(Each each) const {
    for (std::uint64_t b = 0; b < header_->blocks; ++b) {
        const std::uint64_t lap = blocks_[b].linked_ticket.load(), next = blocks_[b].next_ticket.load();
        if (lap == kNone || next == kNone) continue;
        BlockRecord& after = blocks_[next % header_->blocks];
        // A claim that was cut off left no way back.
        const std::uint64_t back = after.previous_ticket.load();
        const bool is_wrong = after.ticket.load() == next && back != lap && back != kNone;
        if (is_wrong || lap % header_->blocks != b || next <= lap) each(blocks_[b], after);
    }
}

bool Table::has_wrong_link() const {
    bool is_wrong = false;
    each_wrong_link([&](BlockRecord&, BlockRecord&) { is_wrong = true; });
    return is_wrong;
}

void Table::drop_wrong_waiting() const {
    each_wrongly_waiting([](std::uint64_t, std::byte* place) { *reinterpret_cast<std::uint64_t*>(place) = 0; });
}

std::uint64_t Table::retire_without_history() {
    std::uint64_t retired = 0;
    for (std::uint64_t slot = 0; layout_->stack() > 1 && slot < header_->slots; ++slot) {
        std::uint64_t seen = word(slot), at = slot;
        if (!is_live(seen, least_word())) continue;
        bool gone = false;
        for (std::uint32_t k = 1; k < layout_->stack() && !gone && predecessor(at, seen, gone); ++k) {
        }
        if (gone) word(slot) |= kRetired;
        retired += gone;
    }
    return retired;
}

std::uint64_t Table::retire_without_next(std::set<std::uint64_t>& needed) {
    std::uint64_t retired = 0;
    for (std::uint64_t slot = 0; layout_->gives_next() && slot < header_->slots; ++slot) {
        std::uint64_t seen = word(slot), at = slot;
        if (!is_live(seen, least_word()) || (seen & kHasFinalObservation) || successor(at, seen)) continue;
        const std::uint64_t pair = final_place(slot);
        bool waits = false;
        for (std::uint64_t half = 0;
             header_->regions[kWaiting].bytes && pair < header_->max_writers * header_->width && half < 2; ++half) {
            const std::byte* place = waiting(pair, half);
            if (is_hole(place, header_->waiting_bytes)) continue;
            waits = waits || *reinterpret_cast<const std::uint64_t*>(place) == serial_of(seen) + 1;
        }
        if (waits) needed.insert(pair / header_->width);
        if (!waits) word(slot) |= kRetired;
        retired += !waits;
    }
    return retired;
}

bool Table::is_heap_damaged(std::uint64_t slot, std::uint64_t seen) const {
    const std::uint64_t room = header_->regions[kHeap].bytes;
    // Bytes in the heap say whose they are: who frees them looks there.
    const auto is_piece_of = [&](std::uint64_t at, std::uint64_t bytes, std::uint64_t serial) {
        if (at > room || bytes > room - at || at < sizeof(PieceHeader) || at % 16) return false;
        if (is_hole(region(kHeap) + at - sizeof(PieceHeader), bytes + sizeof(PieceHeader))) return false;
        PieceHeader piece;
        std::memcpy(&piece, region(kHeap) + at - sizeof piece, sizeof piece);
        return piece.owner == serial + 1;
    };
    for (const Field& field : layout_->fields()) {
        if (!field.is_in_heap()) continue;
        HeapPlace place;
        std::memcpy(&place, rows_ + slot * header_->row_bytes + field.offset, sizeof place);
        const bool is_empty = place.kept_bytes == 0 && place.value_bytes == 0;  // takes no piece
        if (!is_empty && !is_piece_of(place.offset, place.kept_bytes, serial_of(seen))) return true;
    }
    if (!layout_->gives_next() || !(seen & kHasFinalObservation)) return false;
    std::uint64_t at = final_place(slot);
    if (!is_piece_of(at, layout_->final_bytes(), serial_of(seen))) return true;
    for (const Field& field : layout_->fields()) {
        if (!field.gives_next) continue;
        FinalValue value;
        std::memcpy(&value, region(kHeap) + at, sizeof value);
        const bool has_size = field.is_ragged || value.value_bytes == field.full_bytes;
        if (value.kept_bytes > field.full_bytes || value.value_bytes > field.full_bytes || !has_size) return true;
        if (value.crc != next_checksum(serial_of(seen), region(kHeap) + at + sizeof value, value.kept_bytes))
            return true;
        at += sizeof value + (value.kept_bytes + std::uint64_t{15}) / 16 * 16;
    }
    return false;
}

bool Table::is_damaged(std::uint64_t slot, std::uint64_t seen) const {
    if (!checksums_) return false;
    const bool is_row = state_of(seen) == kCommitted;
    if (!is_row && state_of(seen) != kVoid) return false;
    // The heap first: the checksum reads where the row says.
    return (is_row && is_heap_damaged(slot, seen)) || checksums_[slot] != row_checksum(slot, seen);
}

std::optional<std::uint64_t> Table::first_damaged_slot() const {
    std::atomic<std::uint64_t> first{kNone};
    in_parallel(checksums_ ? header_->blocks : 0, [&](std::size_t begin, std::size_t end) {
        for (std::size_t b = begin; b < end && first.load(std::memory_order_relaxed) == kNone; ++b) {
            if (blocks_[b].ticket.load() == kNone) continue;
            for (std::uint64_t i = 0; i < block_length(b); ++i) {
                const std::uint64_t slot = b * header_->block_rows + i, seen = word(slot);
                const bool is_elsewhere = state_of(seen) != kEmpty && slot_of(serial_of(seen)) != slot;
                if (!is_elsewhere && !is_damaged(slot, seen)) continue;
                std::uint64_t none = kNone;
                first.compare_exchange_strong(none, slot);
                break;
            }
        }
    });
    // Next observations that wait: they matter where a row would take its own from there.
    each_wrongly_waiting([&](std::uint64_t serial, std::byte*) {
        std::uint64_t slot = slot_of(serial);
        if (slot >= header_->slots) slot = 0;
        std::uint64_t seen = word(slot), at = slot;
        const bool is_row = serial_of(seen) == serial && state_of(seen) == kCommitted;
        if (!is_row || (seen & kHasFinalObservation) || successor(at, seen)) return;
        first.store(std::min(first.load(), slot));
    });
    if (first.load() == kNone) return {};
    return first.load();
}

std::uint32_t Table::seal() const {
    // Words by block, so that several threads may do it.
    std::vector<std::uint32_t> words(header_->blocks, 0);
    in_parallel(header_->blocks, [&](std::size_t first, std::size_t last) {
        for (std::size_t b = first; b < last; ++b) {
            if (blocks_[b].ticket.load() == kNone) continue;
            for (std::uint64_t i = 0; i < block_length(b); ++i) {
                words[b] = crc32c(words[b], &word(b * header_->block_rows + i), 8);
            }
        }
    });
    std::uint32_t crc = crc32c(0, words.data(), words.size() * sizeof words[0]);
    Counters copy;
    std::memcpy(static_cast<void*>(&copy), counters_, sizeof copy);
    copy.clean.value.store(0);
    copy.seal.value.store(0);
    crc = crc32c(crc, &copy, sizeof copy);
    for (RegionId id : {kWriters, kBlocks, kChecksums, kPriorities, kGiven, kEpisodes, kReads, kFinals}) {
        crc = crc32c(crc, region(id), header_->regions[id].bytes);
    }
    return crc;
}

void Table::forget_index() const {
    for (RegionId id : {kPriorities, kGiven, kEpisodes, kReads}) {
        if (header_->regions[id].bytes) std::memset(region(id), 0, header_->regions[id].bytes);
    }
}

std::uint64_t Table::recover_block(std::uint64_t block, bool verify, std::vector<std::uint64_t>& dropped) {
    std::uint64_t lost = 0, live = 0;
    // A word whose serial belongs to another slot: no row of ours.
    const auto is_elsewhere = [&](std::uint64_t slot, std::uint64_t seen) {
        return state_of(seen) != kEmpty && slot_of(serial_of(seen)) != slot;
    };
    const std::uint64_t ticket = blocks_[block].ticket.load(), least = least_word();
    for (std::uint64_t i = 0; ticket != kNone && i < block_length(block); ++i) {
        const std::uint64_t slot = block * header_->block_rows + i;
        std::uint64_t& seen = word(slot);
        const bool torn = state_of(seen) == kWriting || (verify && is_elsewhere(slot, seen));
        if (torn || (verify && is_damaged(slot, seen))) {
            lost += torn || is_live(seen, least);  // a row that could not be drawn is no loss
            // EMPTY and not VOID: neighbours stop there. VOID means that the env was masked out, and is passed over.
            const std::uint64_t serial = is_elsewhere(slot, seen) ? 0 : serial_of(seen);
            seen = make_word(serial, 0, kEmpty);
            note_dropped(block, i, dropped);
        }
        live += is_live(seen, least);
    }
    blocks_[block].live.store(live);
    return lost;
}

// A dropped row was of this lap or of the one before: which, its damaged word may not tell.
void Table::note_dropped(std::uint64_t block, std::uint64_t offset, std::vector<std::uint64_t>& dropped) const {
    const std::uint64_t ticket = blocks_[block].ticket.load();
    if (ticket == kNone) return;
    dropped.push_back(ticket * header_->block_rows + offset);
    if (ticket >= header_->blocks) dropped.push_back((ticket - header_->blocks) * header_->block_rows + offset);
}

// Windows, returns and stacks do not cross a dropped row: the row before it is the last of its run, and the numbers
// that the index gave to the rows on both sides no longer go on from each other.
void Table::cut_run(std::uint64_t serial) const {
    const std::uint64_t slot = slot_of(serial);
    if (slot >= header_->slots) return;
    std::uint64_t at = slot, seen = make_word(serial, 0, kEmpty);
    bool gone = false, is_row = predecessor(at, seen, gone);
    if (is_row) end_episode(serial_of(seen));
    for (; episodes() && is_row; is_row = predecessor(at, seen, gone)) episodes()[at].left = ~std::uint32_t{0};
    at = slot;
    seen = make_word(serial, 0, kEmpty);
    for (std::uint32_t step = 0; episodes() && successor(at, seen); ++step) episodes()[at].step = step;
}

std::uint64_t Table::recover(bool verify, std::vector<std::uint64_t> dropped) {
    std::atomic<std::uint64_t> lost{0};
    std::mutex mutex;
    if (verify) {
        each_wrong_link([](BlockRecord& block, BlockRecord& after) {
            block.linked_ticket.store(kNone);
            after.previous_ticket.store(kNone);
        });
    }
    in_parallel(header_->blocks, [&](std::size_t first, std::size_t last) {
        std::vector<std::uint64_t> here;
        for (std::size_t b = first; b < last; ++b) lost += recover_block(b, verify, here);
        const std::lock_guard<std::mutex> guard(mutex);
        dropped.insert(dropped.end(), here.begin(), here.end());
    });
    SHARPWAVE_FAULT(attach_half_recovered);
    return finish_recovery(lost.load(), dropped);
}

std::uint64_t Table::finish_recovery(std::uint64_t lost, const std::vector<std::uint64_t>& dropped) {
    for (const std::uint64_t serial : dropped) cut_run(serial);
    std::set<std::uint64_t> needed;  // writer records whose waiting places rows still need
    lost += retire_without_history();
    lost += retire_without_next(needed);
    const bool counts_anew = layout_->stack() > 1 || layout_->gives_next();  // some may have been retired just now
    const std::uint64_t least = least_word();
    std::uint64_t live = 0;
    for (std::uint64_t b = 0; b < header_->blocks; ++b) {
        std::uint64_t live_here = counts_anew ? 0 : blocks_[b].live.load();
        for (std::uint64_t i = 0; counts_anew && blocks_[b].ticket.load() != kNone && i < block_length(b); ++i)
            live_here += is_live(word(b * header_->block_rows + i), least);
        blocks_[b].live.store(live_here);
        mark_uneven(b);
        mark_changed(b);
        blocks_[b].owner.store(0);
        live += live_here;
    }
    // Which writer a live row counts for is not recorded, and does not matter: only their sum is read.
    const std::uint64_t origin = counters_->origin_ticket.value.load();
    for (std::uint64_t i = 0; i < header_->max_writers; ++i) {
        writers_[i].owner.store(needed.count(i) ? kParked : 0);
        writers_[i].settling.store(0);
        writers_[i].gone.store(0);
        writers_[i].origin.store(origin);
        writers_[i].live.store(i == 0 ? static_cast<std::int64_t>(live) : 0);
    }
    if (live && counters_->writers_used.value.load() == 0) counters_->writers_used.value.store(1);
    counters_->rows_lost.value.fetch_add(lost);
    return lost;
}

}  // namespace sharpwave
