#include "views/value_copy.h"

#include <atomic>
#include <cstring>

#include "table/codec.h"
#include "table/racy.h"

namespace sharpwave {

using namespace format;

bool ValueCopy::copy(const Field& field, std::uint64_t slot, std::vector<std::byte>& scratch, std::byte* to,
                     std::int64_t* length) const {
    const std::byte* row = table_.view().rows + slot * table_.header().row_bytes + field.offset;
    if (!field.is_in_heap()) {
        racy_copy(to, row, field.full_bytes);
        return true;
    }
    HeapPlace place;
    racy_copy(reinterpret_cast<std::byte*>(&place), row, sizeof place);
    const std::uint64_t heap = table_.header().regions[kHeap].bytes;
    if (place.offset > heap || place.kept_bytes > heap - place.offset || place.value_bytes > field.full_bytes ||
        place.kept_bytes > place.value_bytes)
        return false;
    std::atomic_ref<std::uint64_t> word(table_.word(slot));
    const std::uint64_t before = word.load(std::memory_order_acquire);
    if (scratch.size() < place.kept_bytes) scratch.resize(place.kept_bytes);
    racy_copy(scratch.data(), table_.region(kHeap) + place.offset, place.kept_bytes);
    fence(std::memory_order_acquire);
    // Torn input is never decoded, nor what belongs to another row.
    if (place.value_bytes != 0 && !is_owner(place.offset, serial_of(before))) return false;
    if ((word.load(std::memory_order_acquire) ^ before) & ~kFlagMask) return false;
    if (state_of(before) != kCommitted) return false;
    if (!decode(scratch.data(), place.kept_bytes, to, place.value_bytes)) return false;
    return finish(field, to, place.value_bytes, length);
}

bool ValueCopy::is_owner(std::uint64_t place, std::uint64_t serial) const {
    if (place < sizeof(PieceHeader) || place % 16 != 0) return false;
    std::byte* header = table_.region(kHeap) + place - sizeof(PieceHeader);
    return std::atomic_ref<std::uint64_t>(reinterpret_cast<PieceHeader*>(header)->owner)
               .load(std::memory_order_acquire) == serial + 1;
}

bool ValueCopy::finish(const Field& field, std::byte* to, std::uint64_t value_bytes, std::int64_t* length) {
    if (!field.is_ragged) return value_bytes == field.full_bytes;
    std::memset(to + value_bytes, 0, field.full_bytes - value_bytes);
    if (length) *length = static_cast<std::int64_t>(value_bytes / field.item_row_bytes());
    return true;
}

}  // namespace sharpwave
