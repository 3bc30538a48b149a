#include "table/heap_values.h"

#include "base/fault.h"
#include "table/codec.h"

namespace sharpwave {

using namespace format;

void HeapValues::pack(const RowBatch& batch, std::size_t first, std::size_t count) {
    const std::vector<Field>& fields = at_.table.layout().fields();
    places_.assign(fields.size() * kGroupRows, HeapPlace{});
    std::uint64_t used = 0, room = 0;
    for (std::size_t i = 0; i < count; ++i) {
        if (batch.flags && (batch.flags[first + i] & kRowVoid)) continue;
        for (std::size_t f = 0; f < fields.size(); ++f) {
            if (!fields[f].is_in_heap()) continue;
            const GivenValue value = value_of(batch.fields[f], fields[f], first + i);
            if (packed_.size() < used + fields[f].full_bytes) packed_.resize(used + fields[f].full_bytes);
            const auto bytes = static_cast<std::uint32_t>(value.bytes);
            const std::uint32_t kept = bytes ? encode(fields[f], value.data, bytes, packed_.data() + used) : 0;
            places_[f * kGroupRows + i] = {used, kept, bytes};
            used += kept;
            room += piece_bytes(kept);
        }
    }
    at_.heap.ensure(room);
}

void HeapValues::place(std::size_t count, FieldMove* moves) {
    const std::vector<Field>& fields = at_.table.layout().fields();
    const std::uint64_t serial = at_.ticket * at_.table.block_rows() + at_.head;
    for (std::size_t i = 0; i < count; ++i) {
        for (std::size_t f = 0; f < fields.size(); ++f) {
            HeapPlace& kept = places_[f * kGroupRows + i];
            if (!fields[f].is_in_heap() || kept.value_bytes + kept.offset + kept.kept_bytes == 0) continue;
            const std::byte* from = packed_.data() + kept.offset;
            kept.offset = at_.heap.allocate(serial + i, kept.kept_bytes, at_.record);
            racy_copy(at_.table.region(kHeap) + kept.offset, from, kept.kept_bytes);
            SHARPWAVE_FAULT(heap_placed);
        }
    }
    for (std::size_t f = 0; f < fields.size(); ++f) {
        if (!fields[f].is_in_heap()) continue;
        moves[f].flat = reinterpret_cast<std::byte*>(&places_[f * kGroupRows]);
        moves[f].stride = sizeof(HeapPlace);
    }
}

}  // namespace sharpwave
