#include "table/row_copy.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/crc32c.h"
#include "table/racy.h"
#include "table/snapshot.h"

namespace sharpwave {

using namespace format;

bool RowCopy::check_in_place(Chunk& chunk) const {
#if defined(SHARPWAVE_TSAN)
    return false;  // formally a race; here the copy goes word by word
#endif
    if (layout_.uses_heap() || layout_.gives_next() || mutables_.any() || header_.payload_offset == 0) return false;
    const std::uint64_t least = table_.least_word();
    chunk.words.resize(chunk.count);
    for (std::uint64_t i = 0; i < chunk.count; ++i) {
        std::atomic_ref<std::uint64_t> word(table_.word(chunk.slot + i));
        chunk.words[i] = word.load(std::memory_order_acquire);
        if (state_of(chunk.words[i]) != kCommitted || chunk.words[i] < least) return false;
    }
    chunk.direct = table_.view().rows + chunk.slot * header_.row_bytes;
    chunk.checksums.assign(chunk.count, 0);
    crc32c_each(chunk.checksums.data(), chunk.direct, header_.row_bytes,
                header_.payload_offset + layout_.payload_bytes(), chunk.count);
    return true;
}

void RowCopy::fill(Chunk& chunk, std::uint64_t block, const Reach* cut) {
    const RowView view = table_.view();
    const std::uint64_t stride = header_.row_bytes, offset = header_.payload_offset, least = table_.least_word();
    const std::uint64_t end = cut ? cut->end(table_.block_rows()) : ~std::uint64_t{0};
    chunk.rows.resize(chunk.count * stride);
    chunk.checksums.assign(chunk.count, 0);
    chunk.words.resize(chunk.count);
    chunk.finals.assign(layout_.gives_next() ? chunk.count : 0, 0);
    const auto load = [&](std::uint64_t i) {
        return std::atomic_ref<std::uint64_t>(table_.word(chunk.slot + i)).load(std::memory_order_acquire);
    };
    const bool is_plain = !layout_.uses_heap() && !layout_.gives_next() && !mutables_.any();
    chunk.mutables.assign(chunk.count * mutables_.value_bytes(), std::byte{0});
    if (is_plain) {
        for (std::uint64_t i = 0; i < chunk.count; ++i) chunk.words[i] = load(i);
        racy_copy(chunk.rows.data(), view.rows + chunk.slot * stride, chunk.count * stride);
        fence(std::memory_order_acquire);
    }
    for (std::uint64_t i = 0; i < chunk.count; ++i) {
        std::byte* row = chunk.rows.data() + i * stride;
        std::uint64_t& word = chunk.words[i];
        const std::uint64_t again = is_plain ? load(i) : 0;
        const bool whole = is_plain && state_of(word) != kWriting && ((word ^ again) & ~kFlagMask) == 0;
        word = whole ? again : copy_row(chunk, i, end);
        if (word < least || serial_of(word) >= end) word = 0;
        // A row that the cut has, and that was written over since.
        if (cut && word == 0) missed_ += is_missed(chunk.slot + i, block, *cut, least);
        if (state_of(word) != kCommitted) {
            std::memset(row, 0, stride);
            std::fill_n(chunk.mutables.begin() + static_cast<std::ptrdiff_t>(i * mutables_.value_bytes()),
                        mutables_.value_bytes(), std::byte{0});
        }
        if (offset) std::memcpy(row, &word, sizeof word);
    }
    add_checksums(chunk, is_plain);
    if (heap_.size() > kPieceBytes) flush_heap();
}

void RowCopy::add_checksums(Chunk& chunk, bool is_plain) const {
    const std::uint64_t stride = header_.row_bytes, offset = header_.payload_offset;
    if (offset) {
        // The word stands in front of its payload.
        crc32c_each(chunk.checksums.data(), chunk.rows.data(), stride, offset + layout_.payload_bytes(), chunk.count);
    } else {
        crc32c_each(chunk.checksums.data(), chunk.words.data(), 8, 8, chunk.count);
        crc32c_each(chunk.checksums.data(), chunk.rows.data(), stride, layout_.payload_bytes(), chunk.count);
    }
    for (std::uint64_t i = 0; !is_plain && i < chunk.count; ++i) {
        if (state_of(chunk.words[i]) != kCommitted) continue;
        const auto bytes_at = [&](std::uint64_t place, std::uint64_t) { return heap_.data() + (place - heap_begin_); };
        chunk.checksums[i] = heap_checksum(chunk.checksums[i], layout_, chunk.rows.data() + i * stride,
                                           chunk.finals.empty() ? 0 : chunk.finals[i], bytes_at);
        chunk.checksums[i] =
            crc32c(chunk.checksums[i], chunk.mutables.data() + i * mutables_.value_bytes(), mutables_.value_bytes());
    }
}

void RowCopy::leave_out(std::uint64_t slot) {
    const std::uint64_t block = table_.block_of(slot), none = 0;
    const std::vector<std::byte> row(header_.row_bytes);
    std::uint32_t crc = crc32c(0, &none, sizeof none);
    crc = crc32c(crc, row.data(), layout_.payload_bytes());
    file_.write(plan_.place_of_row(block, slot), row.data(), row.size());
    file_.write(header_.regions[kChecksums].offset + slot * 4, &crc, sizeof crc);
    for (RegionId id : {kWords, kFinals}) {
        if (header_.regions[id].bytes) file_.write(header_.regions[id].offset + slot * 8, &none, sizeof none);
    }
    const std::vector<std::byte> values(mutables_.value_bytes());
    if (mutables_.any()) file_.write(plan_.place_of_mutables(block, slot), values.data(), values.size());
}

// A row of the cut that has been written over: of the lap that is being written, or of the one before, behind it.
bool RowCopy::is_missed(std::uint64_t slot, std::uint64_t block, const Reach& cut, std::uint64_t least) const {
    const std::uint64_t offset = slot - block * table_.block_rows();
    const std::uint64_t serial = cut.ticket * table_.block_rows() + offset;
    if (cut.ticket == kNone || serial << kSerialShift < least) return false;
    const std::uint64_t now =
        serial_of(std::atomic_ref<std::uint64_t>(table_.word(slot)).load(std::memory_order_acquire));
    if (offset < cut.head) return now > serial;
    // Before the first lap is over there is nothing behind the one that is being written.
    const std::uint64_t origin = table_.counters().origin_ticket.value.load(std::memory_order_acquire);
    return cut.ticket >= origin + table_.blocks() && now >= cut.end(table_.block_rows());
}

// One row, with its bytes in the heap, if it is whole. Returns its word, or 0.
std::uint64_t RowCopy::copy_row(Chunk& chunk, std::uint64_t i, std::uint64_t end) {
    const std::uint64_t slot = chunk.slot + i, least = table_.least_word();
    std::byte* row = chunk.rows.data() + i * header_.row_bytes;
    std::atomic_ref<std::uint64_t> word(table_.word(slot));
    for (int attempt = 0; attempt < 100; ++attempt) {
        const std::uint64_t seen = word.load(std::memory_order_acquire);
        if (seen < least || serial_of(seen) >= end) return 0;
        if (state_of(seen) == kVoid) return seen;
        if (state_of(seen) != kCommitted) return 0;
        const std::size_t used = heap_.size();
        racy_copy(row + header_.payload_offset, table_.view().rows + slot * header_.row_bytes + header_.payload_offset,
                  layout_.payload_bytes());
        if (mutables_.any()) {
            std::byte* to = chunk.mutables.data() + i * mutables_.value_bytes();
            mutables_.read(slot, [&](const std::byte* from) { racy_copy(to, from, mutables_.value_bytes()); });
        }
        bool whole = copy_heap_values(row);
        std::uint64_t final_place = 0;
        // A row that is no longer drawn may have lost its next observation; the row before takes its own from it.
        if (whole && layout_.gives_next()) whole = copy_next(slot, seen, final_place) || (seen & kRetired);
        fence(std::memory_order_acquire);
        const std::uint64_t again = word.load(std::memory_order_acquire);
        if (whole && ((seen ^ again) & (~kFlagMask | kHasFinalObservation)) == 0) {
            if (!chunk.finals.empty()) chunk.finals[i] = final_place;
            return final_place ? seen | kHasFinalObservation : seen;
        }
        heap_.resize(used);
    }
    return 0;
}

// The row's values that are in the heap, and where they went. False: a place makes no sense, because the row changes.
bool RowCopy::copy_heap_values(std::byte* row) {
    const std::uint64_t room = table_.header().regions[kHeap].bytes;
    for (const Field& field : layout_.fields()) {
        if (!field.is_in_heap()) continue;
        HeapPlace place;
        std::memcpy(&place, row + field.offset, sizeof place);
        if (place.kept_bytes > field.full_bytes || place.offset > room - place.kept_bytes) return false;
        place.offset = put(table_.region(kHeap) + place.offset, place.kept_bytes);
        std::memcpy(row + field.offset, &place, sizeof place);
    }
    return true;
}

// The next observation of a row that has no successor in the snapshot, as a final one. False: it changed meanwhile.
bool RowCopy::copy_next(std::uint64_t slot, std::uint64_t word, std::uint64_t& place) {
    image_.assign(layout_.final_bytes(), std::byte{0});
    const std::uint64_t kept = std::atomic_ref<std::uint64_t>(table_.final_place(slot)).load(std::memory_order_acquire);
    place = 0;
    if (word & kHasFinalObservation) {
        if (!image_of_final(kept, serial_of(word))) return false;
    } else if (std::uint64_t next_word = word, next = slot; table_.successor(next, next_word)) {
        // Of the same block, and done: it is in the file as well. What else is known of it may not hold there, where
        // blocks may have been claimed anew by then.
        const std::uint64_t block = table_.block_of(next);
        if (block == table_.block_of(slot) && serial_of(next_word) < (*reach_)[block].end(table_.block_rows()))
            return true;
        if (!image_of_row(next, next_word)) return false;
    } else if (!image_of_waiting(kept, serial_of(word))) {
        return false;
    }
    place = put(image_.data(), image_.size()) + 1;
    return true;
}

// Of a final observation in the heap. The three return false where it is not there or changed meanwhile.
bool RowCopy::image_of_final(std::uint64_t kept, std::uint64_t serial) {
    if (kept > table_.header().regions[kHeap].bytes - image_.size() || kept < sizeof(PieceHeader) || kept % 16)
        return false;
    racy_copy(image_.data(), table_.region(kHeap) + kept, image_.size());
    fence(std::memory_order_acquire);
    const auto* header = reinterpret_cast<const PieceHeader*>(table_.region(kHeap) + kept - sizeof(PieceHeader));
    const std::uint64_t owner =
        std::atomic_ref<std::uint64_t>(const_cast<std::uint64_t&>(header->owner)).load(std::memory_order_relaxed);
    return owner == serial + 1;
}

// Of a row's own observation.
bool RowCopy::image_of_row(std::uint64_t slot, std::uint64_t word) {
    std::uint64_t at = 0;
    const std::byte* row = table_.view().rows + slot * table_.header().row_bytes;
    for (const Field& field : layout_.fields()) {
        if (!field.gives_next) continue;
        const auto full = static_cast<std::uint32_t>(field.full_bytes);
        HeapPlace value{0, full, full};
        const std::byte* from = row + field.offset;
        if (field.is_in_heap()) {
            racy_copy(reinterpret_cast<std::byte*>(&value), from, sizeof value);
            from = table_.region(kHeap) + value.offset;
            if (value.offset > table_.header().regions[kHeap].bytes || value.kept_bytes > field.full_bytes)
                return false;
        }
        const FinalValue size{value.kept_bytes, value.value_bytes, 0, 0};
        std::memcpy(image_.data() + at, &size, sizeof size);
        racy_copy(image_.data() + at + sizeof size, from, value.kept_bytes);
        at += sizeof size + (value.kept_bytes + std::uint64_t{15}) / 16 * 16;
    }
    fence(std::memory_order_acquire);
    return ((table_.load_word(slot) ^ word) & ~kFlagMask) == 0;
}

// Of a next observation that waits for its row.
bool RowCopy::image_of_waiting(std::uint64_t pair, std::uint64_t serial) {
    if (pair >= table_.max_writers() * table_.width()) return false;
    for (std::uint64_t half = 0; half < 2; ++half) {
        std::byte* from = table_.waiting(pair, half);
        std::atomic_ref<std::uint64_t> tag(*reinterpret_cast<std::uint64_t*>(from));
        if (tag.load(std::memory_order_acquire) != serial + 1) continue;
        // Waiting values stand at their whole size, final ones close up.
        std::uint64_t at = 0, out = 0;
        for (const Field& field : layout_.fields()) {
            if (!field.gives_next) continue;
            FinalValue size;
            racy_copy(reinterpret_cast<std::byte*>(&size), from + kWaitingHead + at, sizeof size);
            if (size.kept_bytes > field.full_bytes) return false;
            std::memcpy(image_.data() + out, &size, sizeof size);
            racy_copy(image_.data() + out + sizeof size, from + kWaitingHead + at + sizeof size, size.kept_bytes);
            at += sizeof size + (field.full_bytes + 15) / 16 * 16;
            out += sizeof size + (size.kept_bytes + std::uint64_t{15}) / 16 * 16;
        }
        fence(std::memory_order_acquire);
        return tag.load(std::memory_order_acquire) == serial + 1;
    }
    return false;
}

// Bytes of no fixed size, one after the other; returns their place.
std::uint64_t RowCopy::put(const std::byte* bytes, std::uint64_t count) {
    const std::uint64_t at = heap_.size();
    heap_.resize(at + (count + 15) / 16 * 16);
    racy_copy(heap_.data() + at, bytes, count);
    return heap_begin_ + at;
}

void RowCopy::flush_heap() {
    file_.write(header_.regions[kHeap].offset + heap_begin_, heap_.data(), heap_.size());
    heap_begin_ += heap_.size();
    heap_.clear();
}

}  // namespace sharpwave
