// What a table does about those who can no longer speak: processes that died, machines that went down, damaged files.
#include <algorithm>
#include <cstring>

#include "base/crc32c.h"
#include "base/error.h"
#include "table/heap.h"
#include "table/table.h"

namespace sharpwave {

using namespace format;

void Table::check_records() const {
    const auto load = [](const Counter& counter) { return counter.value.load(std::memory_order_acquire); };
    const std::uint64_t next = load(counters_->next_ticket), origin = load(counters_->origin_ticket);
    const std::uint64_t most_tickets = kMaxSerial / header_->block_rows;
    bool sane = load(counters_->writers_used) <= header_->max_writers && next <= most_tickets && origin <= next &&
                origin % header_->blocks == 0;
    for (std::uint64_t i = 0; i < header_->max_writers; ++i) {
        const std::uint64_t ticket = writers_[i].ticket.load(std::memory_order_acquire);
        sane = sane && (ticket == kNone || ticket <= most_tickets) &&
               writers_[i].head.load(std::memory_order_acquire) <= header_->block_rows;
    }
    if (!sane) throw Error(ErrorKind::storage, "'" + path() + "' is damaged: its counters contradict its header");
}

void Table::end_episode(std::uint64_t serial) {
    const std::uint64_t slot = serial % (header_->blocks * header_->block_rows);
    if (slot >= header_->slots) return;
    std::atomic_ref<std::uint64_t> seen(word(slot));
    const std::uint64_t now = seen.load(std::memory_order_relaxed);
    if (serial_of(now) != serial || state_of(now) != kCommitted || (now & kEndMask)) return;
    seen.fetch_or(kTruncated | kClosedByEngine, std::memory_order_release);
}

void Table::settle_writer(WriterRecord& record) {
    const std::uint64_t ticket = record.ticket.load();
    if (ticket == kNone) return;
    const std::uint64_t block = ticket % header_->blocks, width = header_->width;
    const std::uint64_t base = block * header_->block_rows, first = ticket * header_->block_rows;
    if (blocks_[block].ticket.load() != ticket) return;
    // The head moves after the rows: whole steps past it were finished, a part of one was not. Either way the head
    // goes past them, so that no serial is given twice.
    std::uint64_t head = std::min(record.head.load() / width * width, block_length(block));
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
            word(base + head + env) = make_word(first + head + env, 0, kVoid);
        }
        head += width;
    }
    record.head.store(head);
    if (layout_->gives_next()) {
        BlockHeap heap(*this, block);
        settle_waiting(*this, heap, static_cast<std::uint64_t>(&record - writers_) * width);
    }
    for (std::uint64_t env = 0; env < width; ++env) {
        // The env's newest row in this block; an episode with none here ended its last block unflagged, and its
        // successor will start with a flag of its own.
        for (std::uint64_t step = head; step >= width; step -= width) {
            const std::uint64_t seen = word(base + step - width + env);
            if (state_of(seen) != kCommitted) continue;
            end_episode(first + step - width + env);
            break;
        }
    }
    counters_->late_ends.value.fetch_add(1, std::memory_order_acq_rel);
}

void Table::recount(WriterRecord& record) {
    const std::uint64_t ticket = record.ticket.load(), least = least_word();
    if (ticket == kNone) return;
    const std::uint64_t block = ticket % header_->blocks, base = block * header_->block_rows;
    std::uint64_t live = 0;
    for (std::uint64_t i = 0; i < block_length(block); ++i) live += is_live(word(base + i), least);
    // Its owner counted after it committed: a kill in between left the two apart.
    const std::uint64_t counted = blocks_[block].live.exchange(live);
    record.live.fetch_add(static_cast<std::int64_t>(live - counted));
}

void Table::reclaim_dead_writers() {
    const std::uint64_t used = counters_->writers_used.value.load(std::memory_order_acquire);
    for (std::uint64_t i = 0; i < used; ++i) {
        std::uint32_t taken = 1;
        if (writers_[i].taken.load(std::memory_order_acquire) != taken) continue;
        if (presence_->is_alive(writers_[i].participant, writers_[i].owner_pid)) continue;
        constexpr std::uint32_t kBeingReclaimed = 2;
        if (!writers_[i].taken.compare_exchange_strong(taken, kBeingReclaimed, std::memory_order_acq_rel)) continue;
        settle_writer(writers_[i]);
        recount(writers_[i]);
        // Mostly one block; two where it died while it claimed the next.
        for (std::uint64_t b = 0; b < header_->blocks; ++b) {
            std::uint32_t owner = static_cast<std::uint32_t>(i + 1);
            blocks_[b].owner.compare_exchange_strong(owner, 0, std::memory_order_acq_rel);
        }
        writers_[i].taken.store(0, std::memory_order_release);
    }
}

void Table::retire_without_history() {
    for (std::uint64_t slot = 0; layout_->stack() > 1 && slot < header_->slots; ++slot) {
        std::uint64_t seen = word(slot), at = slot;
        if (!is_live(seen, least_word())) continue;
        bool gone = false;
        for (std::uint32_t k = 1; k < layout_->stack() && !gone && predecessor(at, seen, gone); ++k) {
        }
        if (gone) word(slot) |= kRetired;
    }
}

void Table::retire_without_next() {
    for (std::uint64_t slot = 0; layout_->gives_next() && slot < header_->slots; ++slot) {
        std::uint64_t seen = word(slot), at = slot;
        if (!is_live(seen, least_word()) || (seen & kHasFinalObservation) || successor(at, seen)) continue;
        const std::uint64_t pair = final_place(slot);
        bool waits = false;
        for (std::uint64_t half = 0;
             header_->regions[kWaiting].bytes && pair < header_->max_writers * header_->width && half < 2; ++half) {
            waits = waits || *reinterpret_cast<const std::uint64_t*>(waiting(pair, half)) == serial_of(seen) + 1;
        }
        if (!waits) word(slot) |= kRetired;
    }
}

std::uint64_t Table::recover(bool verify) {
    std::uint64_t lost = 0;
    std::int64_t live = 0;
    const auto is_final_wrong = [&](std::uint64_t slot, std::uint64_t seen) {
        if (!layout_->gives_next() || !(seen & kHasFinalObservation)) return false;
        const std::uint64_t room = header_->regions[kHeap].bytes, bytes = layout_->final_bytes();
        std::uint64_t at = final_place(slot);
        if (at > room || bytes > room - at) return true;
        for (const Field& field : layout_->fields()) {
            if (!field.gives_next) continue;
            FinalValue value;
            std::memcpy(&value, region(kHeap) + at, sizeof value);
            if (value.kept_bytes > field.full_bytes) return true;
            if (value.crc != crc32c(0, region(kHeap) + at + sizeof value, value.kept_bytes)) return true;
            at += sizeof value + (value.kept_bytes + 15u) / 16 * 16;
        }
        return false;
    };
    for (std::uint64_t b = 0; b < header_->blocks; ++b) {
        const bool was_used = blocks_[b].ticket.load() != kNone;
        for (std::uint64_t i = 0; was_used && i < block_length(b); ++i) {
            const std::uint64_t slot = b * header_->block_rows + i;
            std::uint64_t& seen = word(slot);
            const bool torn = state_of(seen) == kWriting;
            const bool wrong = verify && checksums_ && state_of(seen) == kCommitted &&
                               (checksums_[slot] != row_checksum(slot, serial_of(seen)) || is_final_wrong(slot, seen));
            if (torn || wrong) {
                // A row that is lost must not pass for one that its env was masked out of, where neighbours look.
                const bool has_neighbours = layout_->stack() > 1 || layout_->gives_next();
                seen = make_word(serial_of(seen), 0, has_neighbours && wrong ? kEmpty : kVoid);
                ++lost;
            }
        }
    }
    retire_without_history();
    retire_without_next();
    const std::uint64_t least = least_word();
    for (std::uint64_t b = 0; b < header_->blocks; ++b) {
        std::uint64_t live_here = 0;
        for (std::uint64_t i = 0; i < block_length(b); ++i)
            live_here += is_live(word(b * header_->block_rows + i), least);
        if (blocks_[b].ticket.load() == kNone) live_here = 0;
        blocks_[b].live.store(live_here);
        blocks_[b].owner.store(0);
        live += static_cast<std::int64_t>(live_here);
    }
    // Which writer a live row counts for is not recorded, and does not matter: only their sum is read.
    const std::uint64_t epoch = counters_->epoch.value.load();
    for (std::uint64_t i = 0; i < header_->max_writers; ++i) {
        writers_[i].taken.store(0);
        writers_[i].epoch.store(epoch);
        writers_[i].live.store(i == 0 ? live : 0);
    }
    if (live && counters_->writers_used.value.load() == 0) counters_->writers_used.value.store(1);
    counters_->rows_lost.value.fetch_add(lost);
    return lost;
}

}  // namespace sharpwave
