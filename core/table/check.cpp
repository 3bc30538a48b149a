#include "table/check.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "base/crc32c.h"
#include "base/error.h"
#include "base/workers.h"
#include "storage/real_counters.h"
#include "table/heap.h"
#include "table/mutable_values.h"
#include "table/row_batch.h"

namespace sharpwave {

using namespace format;

bool TableCheck::are_records_sane() const {
    const auto load = [](const Counter& counter) { return counter.value.load(std::memory_order_acquire); };
    const std::uint64_t next = load(table_.counters().next_ticket), origin = load(table_.counters().origin_ticket);
    const std::uint64_t most_tickets = kMaxSerial / table_.header().block_rows;
    bool sane = load(table_.counters().writers_used) <= table_.header().max_writers && next <= most_tickets &&
                origin <= next + table_.header().blocks && origin % table_.header().blocks == 0;
    for (const RealCounter& real : kRealCounters) sane = sane && is_within(table_.counters().*real.counter, real.most);
    for (std::uint64_t b = 0; b < table_.header().blocks; ++b) {
        const std::uint64_t ticket = table_.block_record(b).ticket.load(std::memory_order_acquire);
        sane = sane && (ticket == kNone || (ticket % table_.header().blocks == b && ticket <= most_tickets));
    }
    for (std::uint64_t i = 0; i < table_.header().max_writers; ++i) {
        const auto [ticket, head] = table_.position(i);
        sane = sane && (ticket == kNone || ticket <= most_tickets) && head <= table_.header().block_rows;
    }
    return sane;
}

void TableCheck::check_records() const {
    if (are_records_sane()) return;
    throw Error(ErrorKind::storage, "'" + table_.path() + "' is damaged: its counters contradict its header; " +
                                        "open it with recover=True to save what is whole");
}

std::uint64_t TableCheck::rows_counted() const {
    if (are_records_sane()) return table_.size();
    // Some number is damaged: of those that can be true, what most of them say.
    std::uint64_t by_writers = 0, by_blocks = 0;
    for (std::uint64_t i = 0; i < table_.header().max_writers; ++i) {
        const std::int64_t live = table_.writer_record(i).live.load();
        if (live > 0 && static_cast<std::uint64_t>(live) <= table_.header().slots)
            by_writers += static_cast<std::uint64_t>(live);
    }
    for (std::uint64_t b = 0; b < table_.header().blocks; ++b) {
        const std::uint64_t live = table_.block_record(b).live.load();
        if (live <= table_.block_length(b)) by_blocks += live;
    }
    return std::min({std::max(by_writers, by_blocks), table_.header().capacity});
}

std::uint64_t TableCheck::live_rows() const {
    std::atomic<std::uint64_t> live{0};
    const std::uint64_t least = table_.least_word();
    in_parallel(table_.blocks(), [&](std::size_t first, std::size_t last) {
        std::uint64_t here = 0;
        for (std::size_t b = first; b < last; ++b) {
            for (std::uint64_t i = 0; table_.block_record(b).ticket.load() != kNone && i < table_.block_length(b); ++i)
                here += is_live(table_.word(b * table_.block_rows() + i), least);
        }
        live += here;
    });
    return live.load();
}

// Rows that a writer finished or began behind its head.
std::uint64_t TableCheck::rows_past(const Position& position) const {
    const auto [ticket, head] = position;
    const std::uint64_t block = ticket % table_.blocks();
    std::uint64_t rows = 0;
    for (std::uint64_t at = head; ticket != kNone && at < table_.block_length(block); ++at, ++rows) {
        const std::uint64_t seen = table_.word(block * table_.block_rows() + at);
        if (serial_of(seen) != ticket * table_.block_rows() + at || state_of(seen) == kEmpty) break;
    }
    return rows;
}

// Each row that was ever added has a serial of its own.
std::uint64_t TableCheck::serials_given() const {
    const std::uint64_t tickets = table_.counters().next_ticket.value.load(), rows = table_.header().block_rows;
    return tickets > kMaxSerial / rows ? kMaxSerial : tickets * rows;
}

bool TableCheck::are_counts_plausible() const {
    for (std::uint64_t i = 0; i < table_.max_writers(); ++i) {
        if (table_.writer_record(i).added.load() > serials_given()) return false;
    }
    const std::uint64_t live = live_rows(), origin = table_.counters().origin_ticket.value.load();
    const bool retires = table_.layout().uses_heap() || table_.layout().gives_next() || table_.header().spare_rows;
    // A row of another writer's block that was retired by a process which died then may still be counted.
    std::int64_t counted = 0,
                 slack = retires ? static_cast<std::int64_t>(table_.counters().writers_reclaimed.value.load()) : 0;
    for (std::uint64_t i = 0; i < table_.max_writers(); ++i) {
        const WriterRecord& record = table_.writer_record(i);
        const std::uint64_t settling = record.settling.load();
        const bool is_counting = settling != 0 && settling <= table_.blocks();  // then settled_live is what it will be
        if (record.origin.load() == origin)
            counted += is_counting ? record.settled_live.load() : record.live.load() - record.gone.load();
        if (record.owner.load() == 0) continue;
        slack += retires && record.retiring.load() != 0 ? 1 : 0;
        if (settling != 0) slack += static_cast<std::int64_t>(kGroupRows + table_.width());
        slack += static_cast<std::int64_t>(rows_past(table_.position(i)));
    }
    return std::abs(static_cast<std::int64_t>(live) - counted) <= slack;
}

bool TableCheck::has_wrong_link() const {
    bool is_wrong = false;
    each_wrong_link([&](std::uint64_t, std::uint64_t) { is_wrong = true; });
    return is_wrong;
}

// The serial of the row that this place holds a next observation for, if its checksum is wrong.
std::optional<std::uint64_t> TableCheck::wrongly_waiting(std::uint64_t pair, std::uint64_t half) const {
    const std::byte* place = table_.waiting(pair, half);
    if (table_.is_hole(place, table_.header().waiting_bytes)) return {};
    const std::uint64_t tag = *reinterpret_cast<const std::uint64_t*>(place);
    if (tag == 0) return {};
    const std::byte* at = place + kWaitingHead;
    for (const Field& field : table_.layout().fields()) {
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

// Bytes in the heap say which row they belong to: what frees them looks there.
bool TableCheck::is_piece_of(std::uint64_t place, std::uint64_t bytes, std::uint64_t serial) const {
    const std::uint64_t room = table_.header().regions[kHeap].bytes;
    if (place > room || bytes > room - place || place < sizeof(PieceHeader) || place % 16) return false;
    const std::byte* at = table_.region(kHeap) + place - sizeof(PieceHeader);
    if (table_.is_hole(at, bytes + sizeof(PieceHeader))) return false;
    PieceHeader piece;
    std::memcpy(&piece, at, sizeof piece);
    return piece.owner == serial + 1;
}

bool TableCheck::is_heap_damaged(std::uint64_t slot, std::uint64_t seen) const {
    for (const Field& field : table_.layout().fields()) {
        if (!field.is_in_heap()) continue;
        HeapPlace place;
        std::memcpy(&place, table_.view().rows + slot * table_.header().row_bytes + field.offset, sizeof place);
        const bool is_empty = place.kept_bytes == 0 && place.value_bytes == 0;  // takes no piece
        if (!is_empty && !is_piece_of(place.offset, place.kept_bytes, serial_of(seen))) return true;
    }
    if (!table_.layout().gives_next() || !(seen & kHasFinalObservation)) return false;
    std::uint64_t at = table_.final_place(slot);
    if (!is_piece_of(at, table_.layout().final_bytes(), serial_of(seen))) return true;
    for (const Field& field : table_.layout().fields()) {
        if (!field.gives_next) continue;
        FinalValue value;
        std::memcpy(&value, table_.region(kHeap) + at, sizeof value);
        const bool has_size = field.is_ragged || value.value_bytes == field.full_bytes;
        if (value.kept_bytes > field.full_bytes || value.value_bytes > field.full_bytes || !has_size) return true;
        if (value.crc != next_checksum(serial_of(seen), table_.region(kHeap) + at + sizeof value, value.kept_bytes))
            return true;
        at += sizeof value + (value.kept_bytes + std::uint64_t{15}) / 16 * 16;
    }
    return false;
}

// The place that the selector names is not the one that was written for it.
bool TableCheck::is_mutable_damaged(std::uint64_t slot, std::uint64_t seen) const {
    const MutableValues values(table_);
    return values.any() && !values.is_whole(slot, values.selector(slot).load(), serial_of(seen));
}

bool TableCheck::is_damaged(std::uint64_t slot, std::uint64_t seen) const {
    if (!table_.checksums()) return false;
    const bool is_row = state_of(seen) == kCommitted;
    if (!is_row && state_of(seen) != kVoid) return false;
    // The heap first: the checksum reads where the row says.
    return (is_row && (is_heap_damaged(slot, seen) || is_mutable_damaged(slot, seen))) ||
           table_.checksums()[slot] != table_.row_checksum(slot, seen);
}

std::optional<std::uint64_t> TableCheck::first_damaged_slot() const {
    std::atomic<std::uint64_t> first{kNone};
    in_parallel(table_.checksums() ? table_.header().blocks : 0, [&](std::size_t begin, std::size_t end) {
        for (std::size_t b = begin; b < end && first.load(std::memory_order_relaxed) == kNone; ++b) {
            if (table_.block_record(b).ticket.load() == kNone) continue;
            for (std::uint64_t i = 0; i < table_.block_length(b); ++i) {
                const std::uint64_t slot = b * table_.header().block_rows + i, seen = table_.word(slot);
                const bool is_elsewhere = state_of(seen) != kEmpty && table_.slot_of(serial_of(seen)) != slot;
                if (!is_elsewhere && !is_damaged(slot, seen)) continue;
                std::uint64_t none = kNone;
                first.compare_exchange_strong(none, slot);
                break;
            }
        }
    });
    // Next observations that wait: they matter where a row would take its own from there.
    each_wrongly_waiting([&](std::uint64_t serial, std::uint64_t, std::uint64_t) {
        std::uint64_t slot = table_.slot_of(serial);
        if (slot >= table_.header().slots) slot = 0;
        std::uint64_t seen = table_.word(slot), at = slot;
        const bool is_row = serial_of(seen) == serial && state_of(seen) == kCommitted;
        if (!is_row || (seen & kHasFinalObservation) || table_.successor(at, seen)) return;
        first.store(std::min(first.load(), slot));
    });
    if (first.load() == kNone) return {};
    return first.load();
}

std::uint32_t TableCheck::seal() const {
    // Words by block, so that several threads may do it.
    std::vector<std::uint32_t> words(table_.header().blocks, 0);
    in_parallel(table_.header().blocks, [&](std::size_t first, std::size_t last) {
        for (std::size_t b = first; b < last; ++b) {
            if (table_.block_record(b).ticket.load() == kNone) continue;
            for (std::uint64_t i = 0; i < table_.block_length(b); ++i) {
                words[b] = crc32c(words[b], &table_.word(b * table_.header().block_rows + i), 8);
            }
        }
    });
    std::uint32_t crc = crc32c(0, words.data(), words.size() * sizeof words[0]);
    Counters copy;
    std::memcpy(static_cast<void*>(&copy), &table_.counters(), sizeof copy);
    copy.clean.value.store(0);
    copy.seal.value.store(0);
    crc = crc32c(crc, &copy, sizeof copy);
    for (RegionId id : {kWriters, kBlocks, kChecksums, kPriorities, kGiven, kEpisodes, kReads, kFinals, kSelectors}) {
        crc = crc32c(crc, table_.region(id), table_.header().regions[id].bytes);
    }
    return crc;
}

}  // namespace sharpwave
