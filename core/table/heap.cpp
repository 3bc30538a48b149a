#include "table/heap.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <vector>

#include "base/crc32c.h"
#include "base/error.h"
#include "base/fault.h"
#include "table/codec.h"

namespace sharpwave {

using namespace format;

namespace {

// Readers look at the owner while it changes.
void put_header(std::byte* place, std::uint64_t owner, std::uint64_t span) {
    auto* header = reinterpret_cast<PieceHeader*>(place);
    std::atomic_ref<std::uint64_t>(header->owner).store(owner, std::memory_order_relaxed);
    std::atomic_ref<std::uint64_t>(header->span).store(span, std::memory_order_relaxed);
}

}  // namespace

BlockHeap::BlockHeap(Table& table, std::uint64_t block) : table_(&table), block_(block) {
    used_ = table.block_record(block).heap_used.load(std::memory_order_relaxed);
    const std::uint64_t finals = table.header().block_finals_bytes;
    const std::uint64_t size = table.header().block_heap_bytes - finals;
    const std::byte* base = table.region(kHeap) + block * (finals + size) + finals;
    // Pieces of this lap first; where a kill cut an allocation short, the chain still leads past `used_`.
    std::uint64_t at = 0;
    while (at < used_ && at + sizeof(PieceHeader) <= size) {
        const auto* piece = reinterpret_cast<const PieceHeader*>(base + at);
        table.ensure(base + at, sizeof(PieceHeader));
        if (at + sizeof(PieceHeader) > size || piece->span == 0 || piece->span % 16 != 0 || piece->span > size - at)
            break;
        at += piece->span;
    }
    used_ = old_ = at;
    if (!finals) return;
    const std::uint64_t span = piece_bytes(table.layout().final_bytes());
    const std::byte* first = table.region(kHeap) + block * (finals + size);
    for (; touched_finals_ < table.header().block_rows + 2 * table.width(); ++touched_finals_) {
        const std::byte* place = first + touched_finals_ * span;
        table.ensure(place, sizeof(PieceHeader));
        if (reinterpret_cast<const PieceHeader*>(place)->owner == 0) break;
    }
}

void BlockHeap::ensure(std::uint64_t bytes) {
    const std::uint64_t finals = table_->header().block_finals_bytes;
    const std::uint64_t size = table_->header().block_heap_bytes - finals;
    if (used_ + bytes > size) return;
    const std::byte* base = table_->region(kHeap) + block_ * (finals + size) + finals;
    table_->ensure(base + used_, std::min(bytes + sizeof(PieceHeader), size - used_));
}

std::uint64_t BlockHeap::allocate(std::uint64_t owner, std::uint64_t bytes, WriterRecord& by) {
    const std::uint64_t finals = table_->header().block_finals_bytes;
    const std::uint64_t size = table_->header().block_heap_bytes - finals, start = block_ * (finals + size) + finals;
    std::byte* base = table_->region(kHeap) + start;
    const std::uint64_t need = piece_bytes(bytes);
    if (used_ + need > size) throw Error(ErrorKind::storage, "add(): a heap is full; this is a defect of Sharpwave");
    table_->ensure(base + used_, std::min(need + sizeof(PieceHeader), size - used_));
    std::int64_t gone = 0;
    while (old_ < used_ + need) {
        const auto* piece = reinterpret_cast<const PieceHeader*>(base + old_);
        if (old_ + sizeof(PieceHeader) > size || piece->span == 0 || piece->span % 16 != 0 ||
            piece->span > size - old_) {
            old_ = size;
            break;
        }
        if (piece->owner != 0) gone += table_->lose(piece->owner - 1, by);
        old_ += piece->span;
        table_->ensure(base + old_, std::min<std::uint64_t>(sizeof(PieceHeader), size - std::min(old_, size)));
    }
    fence(std::memory_order_release);  // lost rows say so before their bytes change
    const std::uint64_t gap = old_ - (used_ + need);
    if (gap > 0 && old_ < size) {
        put_header(base + used_ + need, 0, gap);
    }
    put_header(base + used_, owner + 1, need);
    const std::uint64_t place = start + used_ + sizeof(PieceHeader);
    used_ += need;
    table_->block_record(block_).heap_used.store(used_, std::memory_order_relaxed);
    if (gone)
        table_->counters().rows_retired.value.fetch_add(static_cast<std::uint64_t>(gone), std::memory_order_relaxed);
    return place;
}

void BlockHeap::ensure_finals(std::uint64_t count) {
    const std::uint64_t span = piece_bytes(table_->layout().final_bytes());
    const std::uint64_t places = table_->header().block_rows + 2 * table_->width();
    const std::uint64_t first = std::min(touched_finals_, places), last = std::min(touched_finals_ + count, places);
    table_->ensure(table_->region(kHeap) + block_ * table_->header().block_heap_bytes + first * span,
                   (last - first) * span);
}

std::uint64_t BlockHeap::allocate_final(std::uint64_t owner) {
    const std::uint64_t span = piece_bytes(table_->layout().final_bytes());
    const std::uint64_t start = block_ * table_->header().block_heap_bytes;
    const std::uint64_t places = table_->header().block_rows + 2 * table_->width();
    // From the last one on, then from the first, then one that was never used.
    for (std::uint64_t tried = 0; tried <= places; ++tried) {
        if (next_final_ >= touched_finals_ && tried < touched_finals_) next_final_ = 0;
        const std::uint64_t i = tried < touched_finals_ ? next_final_++ : (next_final_ = touched_finals_ + 1) - 1;
        if (i >= places) break;
        std::byte* place = table_->region(kHeap) + start + i * span;
        table_->ensure(place, span);
        auto* header = reinterpret_cast<PieceHeader*>(place);
        if (header->owner != 0) {
            const std::uint64_t slot = table_->slot_of(header->owner - 1);
            const std::uint64_t word =
                std::atomic_ref<std::uint64_t>(table_->word(slot)).load(std::memory_order_acquire);
            const bool is_there = state_of(word) == kCommitted || state_of(word) == kWriting;
            if (serial_of(word) == header->owner - 1 && is_there) continue;
        }
        fence(std::memory_order_release);
        put_header(place, owner + 1, span);
        touched_finals_ = std::max(touched_finals_, i + 1);
        return start + i * span + sizeof(PieceHeader);
    }
    throw Error(ErrorKind::storage, "add(): no place for a final observation; this is a defect of Sharpwave");
}

std::uint64_t keep_final(Table& table, BlockHeap& heap, std::uint64_t serial, const std::byte* waiting) {
    thread_local std::vector<std::byte> image;
    image.resize(table.layout().final_bytes());
    std::uint64_t from = kWaitingHead, to = 0;
    for (const Field& field : table.layout().fields()) {
        if (!field.gives_next) continue;
        FinalValue value;
        std::memcpy(&value, waiting + from, sizeof value);
        // A damaged file: no observation to keep.
        if (value.value_bytes > field.full_bytes || (!field.is_ragged && value.value_bytes != field.full_bytes))
            return kNone;
        std::byte* out = image.data() + to + sizeof value;
        value.kept_bytes = encode(field, waiting + from + sizeof value, value.value_bytes, out);
        value.crc = next_checksum(serial, out, value.kept_bytes);
        std::memcpy(image.data() + to, &value, sizeof value);
        from += sizeof value + (field.full_bytes + 15) / 16 * 16;
        to += sizeof value + (value.kept_bytes + std::uint64_t{15}) / 16 * 16;
    }
    const std::uint64_t place = heap.allocate_final(serial);
    racy_copy(table.region(kHeap) + place, image.data(), to);
    SHARPWAVE_FAULT(final_kept);
    return place;
}

namespace {

// The waiting places of a writer whose row is there, and has its next observation nowhere else.
template <class Each>
void each_needed_place(const Table& table, std::uint64_t pair, Each each) {
    for (std::uint64_t env = 0; env < table.width(); ++env) {
        for (std::uint64_t half = 0; half < 2; ++half) {
            std::byte* place = table.waiting(pair + env, half);
            if (table.is_hole(place, table.header().waiting_bytes)) continue;
            std::atomic_ref<std::uint64_t> tag(*reinterpret_cast<std::uint64_t*>(place));
            const std::uint64_t name = tag.load(std::memory_order_acquire);
            if (name == 0) continue;
            const std::uint64_t serial = name - 1;
            const std::uint64_t slot = table.slot_of(serial);
            if (slot >= table.header().slots) continue;
            const std::uint64_t seen = std::atomic_ref<std::uint64_t>(table.word(slot)).load(std::memory_order_acquire);
            if (serial_of(seen) != serial || state_of(seen) != kCommitted || (seen & kHasFinalObservation)) continue;
            std::uint64_t next = seen, next_slot = slot;
            if (!table.successor(next_slot, next)) each(place, slot, seen);
        }
    }
}

}  // namespace

void settle_waiting(Table& table, BlockHeap& heap, std::uint64_t pair) {
    each_needed_place(table, pair, [&](std::byte* place, std::uint64_t slot, std::uint64_t seen) {
        const std::uint64_t kept = keep_final(table, heap, serial_of(seen), place);
        if (kept == kNone) return;
        std::atomic_ref<std::uint64_t>(table.final_place(slot)).store(kept, std::memory_order_relaxed);
        const std::uint64_t end = seen & kEndMask ? 0 : kTruncated | kClosedByEngine;
        if (table.add_flags(slot, serial_of(seen), kHasFinalObservation | end))
            table.mark_changed(table.block_of(slot));
    });
}

bool is_waited_for(const Table& table, std::uint64_t pair) {
    bool is_needed = false;
    each_needed_place(table, pair, [&](std::byte*, std::uint64_t, std::uint64_t) { is_needed = true; });
    return is_needed;
}

}  // namespace sharpwave
