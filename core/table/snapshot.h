// What saving and loading share: what stands where in a snapshot, and what its checksums cover.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "base/crc32c.h"
#include "schema/schema.h"
#include "storage/format.h"

namespace sharpwave {

// The file beside a snapshot with what has changed since.
inline std::string increment_path(const std::string& path) { return path + ".delta"; }

// Covered together by meta_crc, in this order.
inline constexpr format::RegionId kMetaRegions[] = {
    format::kCounters,   format::kWriters, format::kBlocks, format::kFields,   format::kDescription, format::kChecksums,
    format::kPriorities, format::kGiven,   format::kFinals, format::kEpisodes, format::kReads,       format::kDirty};

// The columns of the index beside the priorities: the same bytes in a table and in a snapshot.
struct Column {
    format::RegionId region;
    std::uint64_t row_bytes;
};
inline constexpr Column kIndexColumns[] = {{format::kEpisodes, sizeof(format::EpisodePlace)}, {format::kReads, 4}};

// Continues a row's checksum, which covers its word and its payload, over its bytes in the heap and its final
// observation. `bytes_at(place, count)` finds them; where it finds none the checksum is a wrong one.
template <class BytesAt>
std::uint32_t heap_checksum(std::uint32_t crc, const RowLayout& layout, const std::byte* row, std::uint64_t final_place,
                            const BytesAt& bytes_at) {
    for (const Field& field : layout.fields()) {
        if (!field.is_in_heap()) continue;
        HeapPlace place;
        std::memcpy(&place, row + field.offset, sizeof place);
        if (place.kept_bytes == 0) continue;  // an empty value has no bytes anywhere
        const std::byte* bytes = bytes_at(place.offset, place.kept_bytes);
        if (!bytes) return ~crc;
        crc = crc32c(crc, bytes, place.kept_bytes);
    }
    if (final_place) {
        const std::byte* bytes = bytes_at(final_place - 1, layout.final_bytes());
        if (!bytes) return ~crc;
        crc = crc32c(crc, bytes, layout.final_bytes());
    }
    return crc;
}

}  // namespace sharpwave
