#include "table/recovery.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <mutex>
#include <new>

#include "base/fault.h"
#include "base/workers.h"
#include "storage/real_counters.h"
#include "table/mutable_values.h"

namespace sharpwave {

using namespace format;

void Recovery::remake_records() {
    const std::uint64_t lap = table_.header().blocks * table_.header().block_rows;
    std::uint64_t next = 0;
    for (std::uint64_t b = 0; b < table_.header().blocks; ++b) {
        BlockRecord& block = *new (&table_.block_record(b)) BlockRecord{};
        block.ticket = block.previous_ticket = block.next_ticket = block.linked_ticket = kNone;
        for (std::uint64_t i = 0; i < table_.block_length(b); ++i) {
            const std::uint64_t slot = b * table_.header().block_rows + i, serial = serial_of(table_.word(slot));
            if (state_of(table_.word(slot)) == kEmpty || serial % lap != slot) continue;
            const std::uint64_t ticket = serial / table_.header().block_rows;
            if (block.ticket.load() == kNone || ticket > block.ticket.load()) block.ticket.store(ticket);
            next = std::max(next, ticket + 1);
        }
    }
    for (std::uint64_t i = 0; i < table_.header().max_writers; ++i) {
        new (&table_.writer_record(i)) WriterRecord{};
        table_.writer_record(i).position = kNone;
    }
    // What was cleared is not known any more; of the other counters those are kept that can be true.
    table_.counters().next_ticket.value.store(next);
    for (Counter* counter :
         {&table_.counters().origin_ticket, &table_.counters().writers_used, &table_.counters().pace_origin}) {
        counter->value.store(0);
    }
    for (const RealCounter& real : kRealCounters) {
        Counter& counter = table_.counters().*real.counter;
        if (!is_within(counter, real.most)) counter.value.store(std::bit_cast<std::uint64_t>(real.start));
    }
    table_.counters().index_origin.value.store(kNone);
}

std::uint64_t Recovery::drop_unnamed_rows() {
    std::uint64_t lost = 0;
    for (std::uint64_t b = 0; b < table_.header().blocks; ++b) {
        if (table_.block_record(b).ticket.load() != kNone) continue;
        for (std::uint64_t i = 0; i < table_.block_length(b); ++i) {
            const std::uint64_t slot = b * table_.header().block_rows + i;
            const std::byte* row = table_.view().rows + slot * table_.header().row_bytes;
            const auto is_set = [](std::byte byte) { return byte != std::byte{0}; };
            const bool was_row = table_.word(slot) != 0 || (!table_.is_hole(row, table_.header().row_bytes) &&
                                                            std::any_of(row, row + table_.header().row_bytes, is_set));
            lost += was_row;
            table_.word(slot) = 0;
        }
    }
    return lost;
}

// The newest lap of which a block holds a whole row; kNone: of none.
std::uint64_t Recovery::newest_whole_lap(std::uint64_t block) const {
    std::uint64_t lap = kNone;
    for (std::uint64_t i = 0; i < table_.block_length(block); ++i) {
        const std::uint64_t slot = block * table_.block_rows() + i, seen = table_.word(slot);
        if (state_of(seen) != kCommitted && state_of(seen) != kVoid) continue;
        if (table_.slot_of(serial_of(seen)) != slot || check_.is_damaged(slot, seen)) continue;
        const std::uint64_t ticket = serial_of(seen) / table_.block_rows();
        if (lap == kNone || ticket > lap) lap = ticket;
    }
    return lap;
}

// Blocks get the laps that their rows tell, and the next ticket goes past them. Returns the newest lap; kNone: none.
std::uint64_t Recovery::mend_laps() {
    Counters& counters = table_.counters();
    std::uint64_t newest = kNone;
    for (std::uint64_t b = 0; b < table_.blocks(); ++b) {
        BlockRecord& block = table_.block_record(b);
        const std::uint64_t lap = newest_whole_lap(b);
        if (lap != kNone && (block.ticket.load() == kNone || block.ticket.load() < lap)) {
            block.ticket.store(lap);
            block.previous_ticket.store(kNone);
        }
        for (const std::uint64_t ticket : {block.ticket.load(), block.next_ticket.load()}) {
            if (ticket == kNone || ticket > kMaxSerial / table_.block_rows()) continue;
            raise(counters.next_ticket, ticket + 1);
        }
        if (lap != kNone && (newest == kNone || lap > newest)) newest = lap;
    }
    return newest;
}

void Recovery::catch_up_with_words() {
    Counters& counters = table_.counters();
    const std::uint64_t newest = mend_laps();
    bool is_reached = newest == kNone;
    for (std::uint64_t i = 0; i < table_.max_writers(); ++i) {
        const std::uint64_t ticket = table_.position(i).ticket;
        if (ticket == kNone) continue;
        raise(counters.next_ticket, ticket + 1);
        raise(counters.writers_used, i + 1);
        if (newest != kNone && ticket >= newest) is_reached = true;
    }
    if (is_reached) return;
    // Readers look as far as some writer got.
    std::uint64_t head = 0;
    const std::uint64_t block = newest % table_.blocks(), width = table_.width();
    for (std::uint64_t i = 0; i < table_.block_length(block); ++i) {
        const std::uint64_t seen = table_.word(block * table_.block_rows() + i);
        if (serial_of(seen) == newest * table_.block_rows() + i && state_of(seen) != kEmpty) head = i + 1;
    }
    table_.set_position(table_.writer_record(0), newest, (head + width - 1) / width * width);
    raise(counters.writers_used, 1);
}

std::uint64_t Recovery::retire_without_history() {
    std::uint64_t retired = 0;
    for (std::uint64_t slot = 0; table_.layout().stack() > 1 && slot < table_.header().slots; ++slot) {
        std::uint64_t seen = table_.word(slot), at = slot;
        if (!is_live(seen, table_.least_word())) continue;
        bool gone = false;
        for (std::uint32_t k = 1; k < table_.layout().stack() && !gone && table_.predecessor(at, seen, gone); ++k) {
        }
        if (gone) table_.word(slot) |= kRetired;
        retired += gone;
    }
    return retired;
}

std::uint64_t Recovery::retire_without_next(std::set<std::uint64_t>& needed) {
    std::uint64_t retired = 0;
    for (std::uint64_t slot = 0; table_.layout().gives_next() && slot < table_.header().slots; ++slot) {
        std::uint64_t seen = table_.word(slot), at = slot;
        if (!is_live(seen, table_.least_word()) || (seen & kHasFinalObservation) || table_.successor(at, seen))
            continue;
        const std::uint64_t pair = table_.final_place(slot);
        bool waits = false;
        for (std::uint64_t half = 0; table_.header().regions[kWaiting].bytes &&
                                     pair < table_.header().max_writers * table_.header().width && half < 2;
             ++half) {
            const std::byte* place = table_.waiting(pair, half);
            if (table_.is_hole(place, table_.header().waiting_bytes)) continue;
            waits = waits || *reinterpret_cast<const std::uint64_t*>(place) == serial_of(seen) + 1;
        }
        if (waits) needed.insert(pair / table_.header().width);
        if (!waits) table_.word(slot) |= kRetired;
        retired += !waits;
    }
    return retired;
}

void Recovery::choose_whole_places() {
    const MutableValues values(table_);
    if (!values.any()) return;
    in_parallel(table_.blocks(), [&](std::size_t first, std::size_t last) {
        for (std::uint64_t slot = first * table_.block_rows();
             slot < std::min(last * table_.block_rows(), table_.header().slots); ++slot) {
            if (state_of(table_.word(slot)) == kCommitted) values.choose_whole(slot, serial_of(table_.word(slot)));
        }
    });
}

void Recovery::drop_wrong_waiting() {
    check_.each_wrongly_waiting([&](std::uint64_t, std::uint64_t pair, std::uint64_t half) {
        *reinterpret_cast<std::uint64_t*>(table_.waiting(pair, half)) = 0;
    });
}

void Recovery::forget_index() {
    for (RegionId id : {kPriorities, kGiven, kEpisodes, kReads}) {
        if (table_.header().regions[id].bytes) std::memset(table_.region(id), 0, table_.header().regions[id].bytes);
    }
}

std::uint64_t Recovery::mend_block(std::uint64_t block, bool verify, std::vector<std::uint64_t>& dropped) {
    std::uint64_t lost = 0, live = 0;
    // A word whose serial belongs to another slot: no row of ours.
    const auto is_elsewhere = [&](std::uint64_t slot, std::uint64_t seen) {
        return state_of(seen) != kEmpty && table_.slot_of(serial_of(seen)) != slot;
    };
    const std::uint64_t ticket = table_.block_record(block).ticket.load(), least = table_.least_word();
    for (std::uint64_t i = 0; ticket != kNone && i < table_.block_length(block); ++i) {
        const std::uint64_t slot = block * table_.header().block_rows + i;
        std::uint64_t& seen = table_.word(slot);
        const bool torn = state_of(seen) == kWriting || (verify && is_elsewhere(slot, seen));
        if (torn || (verify && check_.is_damaged(slot, seen))) {
            lost += torn || is_live(seen, least);  // a row that could not be drawn is no loss
            // EMPTY and not VOID: neighbours stop there. VOID means that the env was masked out, and is passed over.
            const std::uint64_t serial = is_elsewhere(slot, seen) ? 0 : serial_of(seen);
            seen = make_word(serial, 0, kEmpty);
            note_dropped(block, i, dropped);
        }
        live += is_live(seen, least);
    }
    table_.block_record(block).live.store(live);
    return lost;
}

// A dropped row was of this lap or of the one before: which, its damaged word may not tell.
void Recovery::note_dropped(std::uint64_t block, std::uint64_t offset, std::vector<std::uint64_t>& dropped) const {
    const std::uint64_t ticket = table_.block_record(block).ticket.load();
    if (ticket == kNone) return;
    dropped.push_back(ticket * table_.header().block_rows + offset);
    if (ticket >= table_.header().blocks)
        dropped.push_back((ticket - table_.header().blocks) * table_.header().block_rows + offset);
}

// Windows, returns and stacks do not cross a dropped row: the row before it is the last of its run, and the numbers
// that the index gave to the rows on both sides no longer go on from each other.
void Recovery::cut_run(std::uint64_t serial) {
    const std::uint64_t slot = table_.slot_of(serial);
    if (slot >= table_.header().slots) return;
    std::uint64_t at = slot, seen = make_word(serial, 0, kEmpty);
    bool gone = false, is_row = table_.predecessor(at, seen, gone);
    if (is_row) table_.end_episode(serial_of(seen));
    for (; table_.episodes() && is_row; is_row = table_.predecessor(at, seen, gone))
        table_.episodes()[at].left = ~std::uint32_t{0};
    at = slot;
    seen = make_word(serial, 0, kEmpty);
    for (std::uint32_t step = 0; table_.episodes() && table_.successor(at, seen); ++step)
        table_.episodes()[at].step = step;
}

std::uint64_t Recovery::run(bool verify, std::vector<std::uint64_t> dropped) {
    std::atomic<std::uint64_t> lost{0};
    std::mutex mutex;
    if (verify) {
        check_.each_wrong_link([&](std::uint64_t block, std::uint64_t after) {
            table_.block_record(block).linked_ticket.store(kNone);
            table_.block_record(after).previous_ticket.store(kNone);
        });
    }
    in_parallel(table_.header().blocks, [&](std::size_t first, std::size_t last) {
        std::vector<std::uint64_t> here;
        for (std::size_t b = first; b < last; ++b) lost += mend_block(b, verify, here);
        const std::lock_guard<std::mutex> guard(mutex);
        dropped.insert(dropped.end(), here.begin(), here.end());
    });
    SHARPWAVE_FAULT(attach_half_recovered);
    return finish(lost.load(), dropped);
}

std::uint64_t Recovery::finish(std::uint64_t lost, const std::vector<std::uint64_t>& dropped) {
    for (const std::uint64_t serial : dropped) cut_run(serial);
    std::set<std::uint64_t> needed;  // writer records whose waiting places rows still need
    lost += retire_without_history();
    lost += retire_without_next(needed);
    reset_writers(count_blocks(), needed);
    table_.counters().rows_lost.value.fetch_add(lost);
    return lost;
}

// Counts the live rows of every block, which then has no owner; returns their sum.
std::uint64_t Recovery::count_blocks() {
    // Some may have been retired just now.
    const bool counts_anew = table_.layout().stack() > 1 || table_.layout().gives_next();
    const std::uint64_t least = table_.least_word();
    std::uint64_t live = 0;
    for (std::uint64_t b = 0; b < table_.blocks(); ++b) {
        BlockRecord& block = table_.block_record(b);
        std::uint64_t live_here = counts_anew ? 0 : block.live.load();
        for (std::uint64_t i = 0; counts_anew && block.ticket.load() != kNone && i < table_.block_length(b); ++i)
            live_here += is_live(table_.word(b * table_.block_rows() + i), least);
        block.live.store(live_here);
        table_.mark_uneven(b);
        table_.mark_changed(b);
        block.owner.store(0);
        live += live_here;
    }
    return live;
}

// Which writer a live row counts for is not recorded, and does not matter: only their sum is read.
void Recovery::reset_writers(std::uint64_t live, const std::set<std::uint64_t>& needed) {
    Counters& counters = table_.counters();
    const std::uint64_t origin = counters.origin_ticket.value.load();
    for (std::uint64_t i = 0; i < table_.max_writers(); ++i) {
        WriterRecord& record = table_.writer_record(i);
        record.owner.store(needed.count(i) ? kParked : 0);
        record.settling.store(0);
        record.gone.store(0);
        record.origin.store(origin);
        record.live.store(i == 0 ? static_cast<std::int64_t>(live) : 0);
        // A pace would wait for ever for what this says was added.
        if (record.added.load() > check_.serials_given()) record.added.store(i == 0 ? live : 0);
    }
    if (live && counters.writers_used.value.load() == 0) counters.writers_used.value.store(1);
}

}  // namespace sharpwave
