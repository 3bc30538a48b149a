#include "table/table.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>

#include "base/crc32c.h"
#include "base/error.h"
#include "base/fault.h"
#include "table/client_rows.h"
#include "table/dead_writers.h"
#include "table/writer.h"

namespace sharpwave {

using namespace format;

void Table::refuse() const {
    if (is_closed()) throw Error(ErrorKind::closed, "the buffer is closed");
    const std::string mend = storage_.is_file() ? "open it again in this process with sharpwave.open()"
                                                : "give storage=\"shm://name\" to share a buffer between processes";
    throw Error(ErrorKind::closed, "the buffer was opened by the parent process of this one; " + mend);
}

std::string Table::description() const {
    const Region& region = header_->regions[kDescription];
    return std::string(reinterpret_cast<const char*>(storage_.data() + region.offset), region.bytes);
}

std::uint64_t Table::size() const {
    const std::uint64_t origin = counters_->origin_ticket.value.load(std::memory_order_acquire);
    const std::uint64_t used = counters_->writers_used.value.load(std::memory_order_acquire);
    std::int64_t live = 0;
    for (std::uint64_t i = 0; i < used; ++i) {
        if (writers_[i].origin.load(std::memory_order_acquire) == origin) {
            live += writers_[i].live.load(std::memory_order_relaxed);
        }
    }
    return live > 0 ? static_cast<std::uint64_t>(live) : 0;
}

std::uint64_t Table::visible_slots() const {
    const std::uint64_t origin = counters_->origin_ticket.value.load(std::memory_order_acquire);
    const std::uint64_t next = counters_->next_ticket.value.load(std::memory_order_acquire);
    if (next > origin && next - origin > header_->blocks) return header_->slots;
    const std::uint64_t used = counters_->writers_used.value.load(std::memory_order_acquire);
    std::uint64_t reach = 0;
    for (std::uint64_t i = 0; i < used; ++i) {
        const auto [ticket, head] = position(i);
        if (ticket == kNone || ticket < origin) continue;
        reach = std::max(reach, (ticket - origin) * header_->block_rows + head);
    }
    return std::min(reach, header_->slots);
}

bool Table::is_worth_filling(const Position& position) const {
    if (position.ticket == kNone || position.head >= block_length(position.ticket % header_->blocks)) return false;
    const std::uint64_t next = counters_->next_ticket.value.load(std::memory_order_acquire);
    const std::uint64_t origin = counters_->origin_ticket.value.load(std::memory_order_acquire);
    const std::uint64_t writers = counters_->writers_used.value.load(std::memory_order_acquire);
    return position.ticket >= origin && next - position.ticket <= writers;
}

std::unique_ptr<Writer> Table::writer() {
    check_open();
    DeadWriters(*this).reclaim();
    return make_writer(take_record(owner_word(seat(), tag())), nullptr);
}

std::unique_ptr<Writer> Table::make_writer(std::uint64_t record, const ClientToken* client) {
    SHARPWAVE_FAULT(writer_taken);
    std::uint64_t used = counters_->writers_used.value.load(std::memory_order_relaxed);
    while (used < record + 1 && !counters_->writers_used.value.compare_exchange_weak(used, record + 1)) {
    }
    try {
        return std::make_unique<Writer>(shared_from_this(), record, client != nullptr);
    } catch (...) {
        writers_[record].owner.store(0, std::memory_order_release);
        throw;
    }
}

std::uint64_t Table::take_record(std::uint64_t me) {
    const auto take = [&](std::uint64_t i) {
        std::uint64_t nobody = 0;
        if (!writers_[i].owner.compare_exchange_strong(nobody, me, std::memory_order_acq_rel)) return false;
        ClientRows(writers_[i]).forget();
        return true;
    };
    // Records with a half-full block first, then any.
    for (const bool choosy : {true, false}) {
        for (std::uint64_t i = 0; i < header_->max_writers; ++i) {
            if (ClientRows(writers_[i]).has_client() || (choosy && !is_worth_filling(position(i)))) continue;
            if (take(i)) return i;
        }
    }
    std::vector<std::pair<std::uint64_t, std::uint64_t>> by_age;
    by_age.reserve(header_->max_writers);
    for (std::uint64_t i = 0; i < header_->max_writers; ++i)
        by_age.emplace_back(writers_[i].client_used.load(std::memory_order_acquire), i);
    std::sort(by_age.begin(), by_age.end());
    for (const auto& [used, i] : by_age) {
        if (take(i)) return i;
    }
    std::map<std::uint64_t, int> holders;  // by process id, 0 for those whose process is gone
    for (std::uint64_t i = 0; i < header_->max_writers; ++i) {
        const std::uint64_t owner = writers_[i].owner.load();
        const bool is_parked = owner_seat(owner) >= kSeats;
        ++holders[!presence_ ? process_id() : is_parked ? 0 : runtime().seats[owner_seat(owner)].pid.load()];
    }
    std::string who;
    for (const auto& [pid, count] : holders) {
        who += (who.empty() ? "" : ", ") + std::to_string(count) +
               (pid ? " by process " + std::to_string(pid)
                    : " by closed writers whose last observations need disk or shared-memory space; free some");
        if (pid == process_id()) who += " (this one)";
    }
    throw Error(ErrorKind::buffer_full, "writer(): all " + std::to_string(header_->max_writers) +
                                            " writers are taken; close one, or give writers= a larger number; held " +
                                            who);
}

bool Table::far_successor(std::uint64_t& slot, std::uint64_t& seen, bool across) const {
    if (!across && (seen & kEndMask)) return false;
    const std::uint64_t width = header_->width, rows = header_->block_rows;
    std::uint64_t serial = serial_of(seen), at = slot;
    for (;;) {
        const std::uint64_t block = block_of(at), offset = at - block * rows;
        if (offset + width < block_length(block)) {
            serial += width;
            at += width;
        } else {
            const BlockRecord& record = blocks_[block];
            const std::uint64_t lap = serial / rows;
            if (record.linked_ticket.load(std::memory_order_acquire) != lap) return false;
            const std::uint64_t ticket = record.next_ticket.load(std::memory_order_acquire);
            if (record.linked_ticket.load(std::memory_order_relaxed) != lap || ticket == kNone) return false;
            if (ticket <= lap || ticket > kMaxSerial / rows) return false;  // a damaged file: no circles
            serial = ticket * rows + offset % width;
            at = slot_of(serial);
            if (at >= header_->slots) return false;
        }
        const std::uint64_t word = std::atomic_ref<std::uint64_t>(this->word(at)).load(std::memory_order_acquire);
        if (serial_of(word) != serial) return false;
        if (state_of(word) == kVoid) continue;
        if (state_of(word) != kCommitted || (!across && (word & kEpisodeStart))) return false;
        seen = word;
        slot = at;
        return true;
    }
}

bool Table::far_predecessor(std::uint64_t& slot, std::uint64_t& seen, bool& gone) const {
    gone = true;
    const std::uint64_t width = header_->width, rows = header_->block_rows, least = least_word();
    std::uint64_t serial = serial_of(seen), at = slot;
    for (;;) {
        const std::uint64_t block = block_of(at), offset = at - block * rows;
        if (offset >= width) {
            serial -= width;
            at -= width;
        } else {
            const BlockRecord& record = blocks_[block];
            const std::uint64_t lap = serial / rows;
            if (record.ticket.load(std::memory_order_acquire) != lap) return false;
            const std::uint64_t ticket = record.previous_ticket.load(std::memory_order_acquire);
            if (record.ticket.load(std::memory_order_relaxed) != lap || ticket == kNone) return false;
            if (ticket >= lap) return false;  // a damaged file: no circles
            serial = ticket * rows + block_length(ticket % header_->blocks) - width + offset % width;
            at = slot_of(serial);
            if (at >= header_->slots) return false;
        }
        const std::uint64_t word = std::atomic_ref<std::uint64_t>(this->word(at)).load(std::memory_order_acquire);
        if (serial_of(word) != serial || word < least) return false;
        if (state_of(word) == kVoid) continue;
        if (state_of(word) != kCommitted) return false;
        seen = word;
        slot = at;
        gone = false;
        return true;
    }
}

// A live row less, which `by` took out.
void Table::take_off(std::uint64_t block, WriterRecord& by) {
    mark_uneven(block);
    mark_changed(block);
    blocks_[block].live.fetch_sub(1, std::memory_order_relaxed);
    // Its owner may have died while it counted: the process that settles it must not take the row off twice.
    const std::uint32_t owner = blocks_[block].owner.load(std::memory_order_relaxed);
    if (owner && owner <= header_->max_writers && writers_[owner - 1].settling.load() == block + 1)
        writers_[owner - 1].settled_block.fetch_sub(1, std::memory_order_relaxed);
    SHARPWAVE_FAULT(retired_uncounted);
    by.gone.store(by.gone_then.load(std::memory_order_relaxed), std::memory_order_release);
}

// Says which row is about to be taken out, and what the count will be then: see finish_retiring().
class Table::Retiring {
public:
    Retiring(WriterRecord& by, std::uint64_t serial) : by_(by) {
        by.gone_then.store(by.gone.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
        by.retiring.store(serial + 1, std::memory_order_release);
    }
    ~Retiring() { by_.retiring.store(0, std::memory_order_release); }
    Retiring(const Retiring&) = delete;
    Retiring& operator=(const Retiring&) = delete;

private:
    WriterRecord& by_;
};

bool Table::retire(std::uint64_t slot, std::uint64_t named, std::uint64_t least, WriterRecord& by) {
    std::atomic_ref<std::uint64_t> seen(word(slot));
    std::uint64_t now = seen.load(std::memory_order_relaxed);
    if (!is_live(now, least) || serial_of(now) != serial_of(named)) return false;
    const Retiring retiring(by, serial_of(named));
    while (is_live(now, least) && serial_of(now) == serial_of(named)) {
        if (!seen.compare_exchange_weak(now, now | kRetired, std::memory_order_relaxed)) continue;
        take_off(block_of(slot), by);
        return true;
    }
    return false;
}

std::int64_t Table::lose(std::uint64_t serial, WriterRecord& by) {
    const std::uint64_t slot = slot_of(serial), least = least_word();
    if (slot >= header_->slots) return 0;
    std::atomic_ref<std::uint64_t> seen(word(slot));
    std::uint64_t now = seen.load(std::memory_order_relaxed);
    std::int64_t gone = 0;
    std::uint64_t neighbour = now, place = slot;
    if (serial_of(now) != serial || state_of(now) != kCommitted) return 0;
    for (std::uint32_t k = 1; k < layout_->stack(); ++k) {
        if (!successor(place, neighbour)) break;
        gone += retire(place, neighbour, least, by);
    }
    const Retiring retiring(by, serial);
    while (serial_of(now) == serial && state_of(now) == kCommitted) {
        if (!seen.compare_exchange_weak(now, make_word(serial, 0, kEmpty), std::memory_order_relaxed)) continue;
        if (is_live(now, least)) {
            take_off(block_of(slot), by);
            ++gone;
        }
        break;
    }
    return gone;
}

void Table::end_episode(std::uint64_t serial) {
    const std::uint64_t slot = serial % (header_->blocks * header_->block_rows);
    if (slot >= header_->slots) return;
    if (!add_flags(slot, serial, kTruncated | kClosedByEngine, kEndMask)) return;
    mark_changed(block_of(slot));
}

// The row of that serial may leave its slot at any time: its successor's word is left alone.
bool Table::add_flags(std::uint64_t slot, std::uint64_t serial, std::uint64_t flags, std::uint64_t unless) {
    std::atomic_ref<std::uint64_t> word(this->word(slot));
    std::uint64_t now = word.load(std::memory_order_relaxed);
    do {
        if (serial_of(now) != serial || state_of(now) != kCommitted || (now & unless)) return false;
    } while (!word.compare_exchange_weak(now, now | flags, std::memory_order_release, std::memory_order_relaxed));
    return true;
}

// Rows of a lap are written in order: where the first and the last of these are of that lap and all of them count, so
// are all between them, and none needs to be looked at.
bool Table::is_whole(std::uint64_t block, std::uint64_t ticket, std::uint64_t begin, std::uint64_t end) const {
    // The mark is of the newest lap that has one.
    if (is_uneven(block, ticket) || is_uneven(block, ticket + header_->blocks)) return false;
    const std::uint64_t base = block * header_->block_rows, first = ticket * header_->block_rows;
    const auto is_there = [&](std::uint64_t offset) {
        const std::uint64_t seen = load_word(base + offset);
        return serial_of(seen) == first + offset && is_live(seen, least_word());
    };
    return is_there(begin) && is_there(end - 1);
}

std::vector<std::uint64_t> Table::live_serials() const {
    std::vector<std::uint64_t> serials;
    serials.reserve(std::min(size(), header_->slots));
    const std::uint64_t least = least_word(), reach = visible_slots();
    const auto add = [&](std::uint64_t block, std::uint64_t ticket, std::uint64_t begin, std::uint64_t end) {
        if (begin >= end) return;
        const std::uint64_t base = block * header_->block_rows, first = ticket * header_->block_rows;
        if (ticket != kNone && is_whole(block, ticket, begin, end)) {
            for (std::uint64_t offset = begin; offset < end; ++offset) serials.push_back(first + offset);
            return;
        }
        for (std::uint64_t offset = begin; offset < end; ++offset) {
            const std::uint64_t seen = load_word(base + offset);
            if (is_live(seen, least)) serials.push_back(serial_of(seen));
        }
    };
    std::vector<std::uint64_t> heads(header_->blocks, kNone);
    const std::uint64_t used = counters_->writers_used.value.load(std::memory_order_acquire);
    for (std::uint64_t i = 0; i < used; ++i) {
        const auto [ticket, head] = position(i);
        if (ticket != kNone && blocks_[ticket % header_->blocks].ticket.load(std::memory_order_acquire) == ticket)
            heads[ticket % header_->blocks] = head;
    }
    for (std::uint64_t block = 0; block * header_->block_rows < reach; ++block) {
        const std::uint64_t ticket = blocks_[block].ticket.load(std::memory_order_acquire);
        const std::uint64_t length = std::min(block_length(block), reach - block * header_->block_rows);
        const std::uint64_t head = std::min(heads[block], length);
        add(block, ticket, 0, head);
        add(block, ticket == kNone || ticket < header_->blocks ? kNone : ticket - header_->blocks, head, length);
    }
    // One writer's ring is sorted but for one turn.
    const auto turn = std::is_sorted_until(serials.begin(), serials.end());
    std::rotate(serials.begin(), turn, serials.end());
    if (!std::is_sorted(serials.begin(), serials.end())) std::sort(serials.begin(), serials.end());
    return serials;
}

// One store clears everything: rows below the origin are no more, and whatever else depends on a clear (counts of
// writers, the index, the pace) says which origin it is for. The next ticket follows; where this process dies before,
// the next claim moves it.
void Table::clear() {
    check_open();
    const std::uint64_t next = counters_->next_ticket.value.load(std::memory_order_acquire);
    const std::uint64_t aligned = (next + header_->blocks - 1) / header_->blocks * header_->blocks;
    raise(counters_->origin_ticket, aligned);  // never back: of two clears at once the later one holds
    SHARPWAVE_FAULT(clear_origin);
    raise(counters_->next_ticket, aligned);
    SHARPWAVE_FAULT(clear_ticket);
}

std::uint32_t Table::row_checksum(std::uint64_t slot, std::uint64_t word) const {
    const std::uint64_t lasting = lasting_part(word);
    std::uint32_t crc = crc32c(0, &lasting, sizeof lasting);
    if (state_of(word) == kVoid) return crc;  // its bytes mean nothing
    const std::byte* row = rows_ + slot * header_->row_bytes + header_->payload_offset;
    crc = crc32c(crc, row, layout_->payload_bytes());
    for (const Field& field : layout_->fields()) {
        if (!field.is_in_heap()) continue;
        HeapPlace place;
        std::memcpy(&place, row - header_->payload_offset + field.offset, sizeof place);
        const std::uint64_t room = header_->regions[kHeap].bytes;
        if (place.offset > room || place.kept_bytes > room - place.offset) return ~crc;
        crc = crc32c(crc, region(kHeap) + place.offset, place.kept_bytes);
    }
    return crc;
}

TableStats Table::stats() {
    check_open();
    DeadWriters(*this).reclaim();
    TableStats stats{};
    stats.size = size();
    stats.capacity = header_->capacity;
    const std::uint64_t used = counters_->writers_used.value.load(std::memory_order_acquire);
    for (std::uint64_t i = 0; i < used; ++i) {
        stats.rows_added += writers_[i].added.load(std::memory_order_relaxed);
        stats.rows_voided += writers_[i].voided.load(std::memory_order_relaxed);
        stats.episodes += writers_[i].episodes.load(std::memory_order_relaxed);
        stats.writers_taken += writers_[i].owner.load(std::memory_order_relaxed) != 0;
    }
    stats.rows_sampled = counters_->rows_sampled.value.load(std::memory_order_relaxed);
    stats.sample_calls = counters_->call_number.value.load(std::memory_order_relaxed);
    stats.redraws = counters_->redraws.value.load(std::memory_order_relaxed);
    stats.max_writers = header_->max_writers;
    stats.blocks = header_->blocks;
    stats.block_rows = header_->block_rows;
    stats.row_bytes = header_->row_bytes;
    for (const Field& field : layout_->fields()) stats.payload_bytes += field.bytes;
    stats.storage_bytes = storage_.bytes();
    stats.incarnation = counters_->incarnation.value.load(std::memory_order_relaxed);
    stats.recoveries = counters_->recoveries.value.load(std::memory_order_relaxed);
    stats.writers_reclaimed = counters_->writers_reclaimed.value.load(std::memory_order_relaxed);
    stats.index_takeovers = counters_->index_takeovers.value.load(std::memory_order_relaxed);
    stats.rows_lost = counters_->rows_lost.value.load(std::memory_order_relaxed);
    stats.seed = header_->seed;
    stats.resets_unflagged = counters_->resets_unflagged.value.load(std::memory_order_relaxed);
    stats.rows_retired = counters_->rows_retired.value.load(std::memory_order_relaxed);
    stats.shuffle_epoch = counters_->shuffle_epoch.value.load(std::memory_order_relaxed);
    stats.rows_consumed = counters_->rows_consumed.value.load(std::memory_order_relaxed);
    stats.updates_applied = counters_->updates_applied.value.load(std::memory_order_relaxed);
    stats.updates_stale = counters_->updates_stale.value.load(std::memory_order_relaxed);
    for (std::uint64_t b = 0; header_->block_heap_bytes && b < header_->blocks; ++b) {
        stats.heap_bytes += blocks_[b].heap_used.load(std::memory_order_relaxed);
    }
    stats.copy_kernel = kernels().name;
    return stats;
}

}  // namespace sharpwave
