#include "table/next_observations.h"

#include <atomic>
#include <cstring>

#include "base/fault.h"
#include "table/codec.h"
#include "table/racy.h"

namespace sharpwave {

using namespace format;

namespace {

using Word = std::atomic_ref<std::uint64_t>;

}  // namespace

void NextObservations::ensure_space(std::size_t count) {
    if (!at_.table.storage().is_file()) return;
    at_.heap.ensure_finals(3 * count + 2);
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint64_t pair = at_.pair_of((at_.head + i) % at_.open_rows.size());
        at_.table.ensure(at_.table.waiting(pair, 0), 2 * image_.size());
    }
}

// What a row shows, as the image of a waiting place. False: its bytes make no sense (a damaged file).
bool NextObservations::copy_observation(std::uint64_t slot) {
    std::byte* value = image_.data() + kWaitingHead;
    const std::byte* row = at_.table.view().rows + slot * at_.table.header().row_bytes;
    for (const Field& field : at_.table.layout().fields()) {
        if (!field.gives_next) continue;
        HeapPlace place{0, 0, static_cast<std::uint32_t>(field.full_bytes)};
        if (field.is_in_heap()) {
            std::memcpy(&place, row + field.offset, sizeof place);
            const std::uint64_t room = at_.table.header().regions[kHeap].bytes;
            if (place.value_bytes > field.full_bytes || place.offset > room || place.kept_bytes > room - place.offset)
                return false;
            if (!decode(at_.table.region(kHeap) + place.offset, place.kept_bytes, value + sizeof(FinalValue),
                        place.value_bytes)) {
                return false;
            }
        } else {
            std::memcpy(value + sizeof(FinalValue), row + field.offset, field.full_bytes);
        }
        const FinalValue size{place.value_bytes, place.value_bytes, 0, 0};
        std::memcpy(value, &size, sizeof size);
        value += sizeof size + (field.full_bytes + 15) / 16 * 16;
    }
    return true;
}

void NextObservations::leave_to_previous(std::uint64_t slot, BlockHeap& heap) {
    std::uint64_t word = Word(at_.table.word(slot)).load(std::memory_order_relaxed);
    if (word < at_.table.least_word()) return;
    // Where the env was masked out, its next row is the one that the row before takes it from.
    if (state_of(word) == kVoid && !at_.table.successor(slot, word)) return;
    if (state_of(word) != kCommitted) return;
    std::uint64_t before = word, before_slot = slot;
    bool gone;
    if (!at_.table.predecessor(before_slot, before, gone) || (before & (kEndMask | kHasFinalObservation))) return;
    if (!copy_observation(slot)) return;
    // Its slot is another block's: no other writer may write there meanwhile. Where one does, the row is about to go.
    BlockRecord& record = at_.table.block_record(at_.table.block_of(before_slot));
    std::uint32_t holder = 0;
    const bool borrowed = record.owner.compare_exchange_strong(holder, at_.owner, std::memory_order_acq_rel);
    if (!borrowed && holder != at_.owner) {
        at_.table.retire(before_slot, before, at_.table.least_word(), at_.record);
        return;
    }
    const BorrowedBlock keeper(record, borrowed);
    if (serial_of(Word(at_.table.word(before_slot)).load(std::memory_order_acquire)) == serial_of(before)) {
        const std::uint64_t kept = keep_final(at_.table, heap, serial_of(before), image_.data());
        if (kept != kNone) {
            Word(at_.table.final_place(before_slot)).store(kept, std::memory_order_relaxed);
            Word(at_.table.word(before_slot)).fetch_or(kHasFinalObservation, std::memory_order_release);
            at_.table.mark_changed(at_.table.block_of(before_slot));
        }
    }
}

void NextObservations::meet_previous(const RowBatch& batch, std::size_t row, std::uint64_t env) {
    std::uint64_t& open_row = at_.open_rows[env];
    if (open_row == 0) return;
    const std::byte* place = at_.table.waiting(at_.pair_of(env), halves_[env]);
    const std::byte* value = place + kWaitingHead;
    bool same = *reinterpret_cast<const std::uint64_t*>(place) == open_row;
    const std::vector<Field>& fields = at_.table.layout().fields();
    for (std::size_t f = 0; same && f < fields.size(); ++f) {
        if (!fields[f].gives_next) continue;
        FinalValue size;
        std::memcpy(&size, value, sizeof size);
        const GivenValue shown = value_of(batch.fields[f], fields[f], row);
        same = shown.bytes == size.value_bytes && std::memcmp(shown.data, value + sizeof size, shown.bytes) == 0;
        value += sizeof size + (fields[f].full_bytes + 15) / 16 * 16;
    }
    if (!same) end_unflagged(env);
}

void NextObservations::end_unflagged(std::uint64_t env) {
    std::uint64_t& open_row = at_.open_rows[env];
    if (open_row == 0) return;
    const std::uint64_t serial = open_row - 1, slot = at_.table.slot_of(serial);
    open_row = 0;
    at_.table.counters().resets_unflagged.value.fetch_add(1, std::memory_order_relaxed);
    Word word(at_.table.word(slot));
    if (serial_of(word.load(std::memory_order_relaxed)) != serial) return;
    std::uint64_t flags = kTruncated | kClosedByEngine;
    if (is_derived_) {
        const std::byte* place = at_.table.waiting(at_.pair_of(env), halves_[env]);
        const std::uint64_t kept = keep_final(at_.table, at_.heap, serial, place);
        Word(at_.table.final_place(slot)).store(kept, std::memory_order_relaxed);
        flags |= kHasFinalObservation;
    }
    if (at_.table.add_flags(slot, serial, flags)) at_.table.mark_changed(at_.table.block_of(slot));
}

void NextObservations::keep(const RowBatch& batch, std::size_t row, std::uint64_t env, std::uint64_t slot,
                            std::uint64_t serial, std::uint64_t& flags) {
    const std::uint64_t pair = at_.pair_of(env);
    const bool is_over = (flags & kEndMask) != 0;
    if (!is_over) halves_[env] ^= 1;
    std::byte* place = is_over ? image_.data() : at_.table.waiting(pair, halves_[env]);
    if (!is_over) {
        at_.table.ensure(place, image_.size());
        Word(*reinterpret_cast<std::uint64_t*>(place)).store(0, std::memory_order_relaxed);
        fence(std::memory_order_release);
    }
    std::byte* value = place + kWaitingHead;
    const FieldInput* input = batch.next;
    for (const Field& field : at_.table.layout().fields()) {
        if (!field.gives_next) continue;
        const GivenValue shown = value_of(*input, field, row);
        const auto bytes = static_cast<std::uint32_t>(shown.bytes);
        const std::uint32_t crc = at_.table.checksums() && !is_over ? next_checksum(serial, shown.data, bytes) : 0;
        const FinalValue size{bytes, bytes, crc, 0};
        racy_copy(value, reinterpret_cast<const std::byte*>(&size), sizeof size);
        racy_copy(value + sizeof size, shown.data, bytes);
        value += sizeof size + (field.full_bytes + 15) / 16 * 16;
        ++input;
    }
    if (is_over) {
        Word(at_.table.final_place(slot))
            .store(keep_final(at_.table, at_.heap, serial, image_.data()), std::memory_order_relaxed);
        flags |= kHasFinalObservation;
    } else {
        Word(at_.table.final_place(slot)).store(pair, std::memory_order_relaxed);
        Word(*reinterpret_cast<std::uint64_t*>(place)).store(serial + 1, std::memory_order_release);
        SHARPWAVE_FAULT(next_waiting);
    }
}

}  // namespace sharpwave
