#include "table/geometry.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>
#include <random>

#include "base/crc32c.h"
#include "base/error.h"
#include "base/process.h"
#include "base/wide.h"
#include "storage/real_counters.h"
#include "table/table.h"

namespace sharpwave {

using namespace format;

namespace {

std::uint64_t round_up(std::uint64_t value, std::uint64_t unit) { return (value + unit - 1) / unit * unit; }

// The largest power of two times the width that still leaves four blocks a writer; the width itself where the ring
// is too small for that (a block of one step is never held between adds, so it holds no other writer up).
// A block holds at least a stack, so that rows and the history they need lie in two neighbouring blocks at most.
std::uint64_t choose_block_rows(const TableConfig& config, const RowLayout& layout) {
    std::uint64_t rows = config.width;
    while (rows < config.width * layout.stack()) rows *= 2;
    while (config.capacity / (rows * 2) >= 4 * config.max_writers) rows *= 2;
    return rows;
}

// Each row of a block may have a final observation, and when a lap begins those of the step before the block and of the
// rows before the ones it writes over.
std::uint64_t block_finals_bytes(const RowLayout& layout, std::uint64_t block_rows, std::uint64_t width) {
    return layout.gives_next() ? round_up((block_rows + 2 * width) * piece_bytes(layout.final_bytes()), kPageBytes) : 0;
}

std::uint64_t block_heap_bytes(const RowLayout& layout, std::uint64_t block_rows, std::uint64_t width) {
    return block_finals_bytes(layout, block_rows, width) + round_up(block_rows * layout.heap_row_bytes(), kPageBytes);
}

void check_config(const TableConfig& config) {
    const auto refuse = [](const std::string& message) { throw Error(ErrorKind::schema, message); };
    if (config.capacity == 0) refuse("capacity: expected at least 1 row, got 0");
    if (config.width == 0) refuse("num_envs: expected at least 1, got 0");
    if (config.max_writers == 0 || config.max_writers > 4096) {
        refuse("writers: expected 1 to 4096, got " + std::to_string(config.max_writers));
    }
    if (config.capacity % config.width != 0) {
        const std::uint64_t below = config.capacity / config.width * config.width;
        refuse("capacity: expected a multiple of num_envs=" + std::to_string(config.width) + ", got " +
               std::to_string(config.capacity) + "; give " + (below ? std::to_string(below) + " or " : "") +
               std::to_string(below + config.width));
    }
    for (const Field& field : config.fields) {
        if (field.name.size() >= sizeof(FieldRecord::name)) refuse("field '" + field.name + "': name over 95 bytes");
        if (field.dtype.size() >= sizeof(FieldRecord::dtype)) refuse("field '" + field.name + "': dtype over 15 bytes");
        if (field.shape.size() > 8) refuse("field '" + field.name + "': more than 8 dimensions");
    }
}

}  // namespace

Header plan(const TableConfig& config, const RowLayout& layout) {
    check_config(config);
    const std::uint64_t place_bytes = mutable_place_bytes(layout.mutable_bytes(), config.checksums);
    const std::uint64_t each = layout.stride() + layout.heap_row_bytes() + 2 * place_bytes;
    if (static_cast<Wide>(config.capacity) * each >> 62) {
        throw Error(ErrorKind::storage, "capacity: " + std::to_string(config.capacity) + " rows of " +
                                            std::to_string(each) +
                                            " bytes are more than an address can name; give a smaller capacity");
    }
    Header header{};
    const bool derived = layout.gives_next();
    std::memcpy(header.magic, kMagic, sizeof kMagic);
    header.version = kVersion;
    header.endian_mark = kEndianMark;
    header.kind = kLive;
    header.block_rows = config.block_rows ? config.block_rows : choose_block_rows(config, layout);
    header.capacity = header.slots = config.capacity;
    if (layout.stack() > 1) {
        // The rows that the oldest stacks look back to are kept, and not drawn.
        header.slots = round_up(config.capacity + (layout.stack() - 1) * config.width, header.block_rows);
    }
    header.spare_rows = header.slots - header.capacity;
    header.saved_slots = header.slots;
    header.waiting_bytes = derived ? layout.waiting_bytes() : 0;
    header.sampler = config.index.is_by_priority ? 1 : config.index.has_index ? 2 : 0;
    header.columns =
        (config.index.numbers_steps ? kEpisodesColumn : 0) | (config.index.counts_reads ? kReadsColumn : 0);
    header.blocks = (header.slots + header.block_rows - 1) / header.block_rows;
    header.width = config.width;
    header.block_heap_bytes = block_heap_bytes(layout, header.block_rows, header.width);
    header.block_finals_bytes = block_finals_bytes(layout, header.block_rows, header.width);
    header.max_writers = config.max_writers;
    header.field_count = layout.fields().size();
    header.row_bytes = layout.stride();
    header.payload_offset = layout.payload_offset();
    header.seed = config.seed;
    header.created_ns = wall_ns();
    header.word_is_embedded = layout.word_is_embedded();
    header.has_checksums = config.checksums;
    std::random_device device;
    for (std::uint8_t& byte : header.uuid) byte = static_cast<std::uint8_t>(device());

    std::uint64_t at = kPageBytes;
    const auto place = [&](RegionId id, std::uint64_t bytes, std::uint64_t alignment = kPageBytes) {
        if (bytes == 0) return;
        at = round_up(at, alignment);
        header.regions[id] = {at, bytes};
        at += bytes;
    };
    // First what never changes: a file that lost its end can be read as long as it has these.
    place(kFields, header.field_count * sizeof(FieldRecord), 64);
    place(kDescription, config.description.size(), 64);
    place(kRuntime, kRuntimeBytes);
    place(kCounters, sizeof(Counters));
    place(kWriters, header.max_writers * sizeof(WriterRecord), 128);
    place(kBlocks, header.blocks * sizeof(BlockRecord), 64);
    place(kTimes, header.blocks * 8, 64);
    place(kChecksums, config.checksums ? header.slots * 4 : 0, 64);
    place(kWords, layout.word_is_embedded() ? 0 : header.slots * 8, 64);
    place(kGiven, header.sampler == 1 ? header.slots * 4 : 0, 64);
    place(kEpisodes, header.columns & kEpisodesColumn ? header.slots * sizeof(EpisodePlace) : 0, 64);
    place(kReads, header.columns & kReadsColumn ? header.slots * 4 : 0, 64);
    if (header.sampler) {
        const std::uint64_t bytes = priorities_bytes(header.blocks, header.slots);
        place(kPriorities, bytes, bytes >= kHugePageBytes ? kHugePageBytes : kPageBytes);
        place(kTree, tree_bytes(header.slots));
    }
    place(kFinals, derived ? header.slots * 8 : 0, 64);
    // Small tables stay small; only rows worth a huge page start on one.
    const auto place_large = [&](RegionId id, std::uint64_t bytes) {
        place(id, bytes, bytes >= kHugePageBytes ? kHugePageBytes : kPageBytes);
    };
    place(kSelectors, place_bytes ? header.slots * 8 : 0, 64);
    place_large(kMutables, header.slots * 2 * place_bytes);
    place_large(kRows, header.slots * header.row_bytes);
    // What fills as it is used comes last: a file gives it no space before.
    place(kHeap, header.blocks * header.block_heap_bytes);
    place(kWaiting, derived ? header.max_writers * header.width * 2 * header.waiting_bytes : 0);
    header.total_bytes = round_up(at, kPageBytes);
    return header;
}

std::uint64_t sparse_offset(const Header& header) {
    for (RegionId id : {kHeap, kWaiting}) {
        if (header.regions[id].bytes) return header.regions[id].offset;
    }
    return header.total_bytes;
}

void write_plan(std::byte* base, const Header& header, const TableConfig& config, const RowLayout& layout) {
    auto* counters = new (base + header.regions[kCounters].offset) Counters{};
    counters->incarnation.value = 1;
    for (const RealCounter& real : kRealCounters)
        (counters->*real.counter).value = std::bit_cast<std::uint64_t>(real.start);
    if (config.set_counters) config.set_counters(*counters);
    auto* writers = reinterpret_cast<WriterRecord*>(base + header.regions[kWriters].offset);
    for (std::uint64_t i = 0; i < header.max_writers; ++i) {
        (new (writers + i) WriterRecord{})->position = kNone;
    }
    auto* blocks = reinterpret_cast<BlockRecord*>(base + header.regions[kBlocks].offset);
    for (std::uint64_t i = 0; i < header.blocks; ++i) {
        auto* block = new (blocks + i) BlockRecord{};
        block->ticket = block->previous_ticket = block->next_ticket = block->linked_ticket = kNone;
    }
    auto* fields = reinterpret_cast<FieldRecord*>(base + header.regions[kFields].offset);
    for (const Field& field : layout.fields()) {
        FieldRecord& record = *new (fields++) FieldRecord{};
        std::memcpy(record.name, field.name.data(), field.name.size());
        std::memcpy(record.dtype, field.dtype.data(), field.dtype.size());
        std::copy(field.shape.begin(), field.shape.end(), record.shape);
        record.dimensions = static_cast<std::uint32_t>(field.shape.size());
        record.item_bytes = field.item_bytes;
        record.offset = field.offset;
        record.bytes = field.bytes;
        record.stack = field.stack;
        record.pads_zero = field.pads_zero;
        record.compression = static_cast<std::uint32_t>(field.codec);
        record.ragged = field.is_ragged;
        record.gives_next = field.gives_next;
        record.follows = static_cast<std::uint32_t>(field.follows + 1);
        record.is_mutable = field.is_mutable;
        record.full_bytes = field.full_bytes;
    }
    std::memcpy(base + header.regions[kDescription].offset, config.description.data(), config.description.size());
    auto* placed = new (base) Header(header);
    placed->schema_crc = schema_checksum(base, header);
    placed->header_crc = header_checksum(*placed);
}

std::uint32_t schema_checksum(const std::byte* base, const Header& header) {
    std::uint32_t crc = 0;
    for (RegionId id : {kFields, kDescription}) {
        crc = crc32c(crc, base + header.regions[id].offset, header.regions[id].bytes);
    }
    return crc;
}

std::uint32_t header_checksum(const Header& header) {
    Header copy = header;
    copy.header_crc = 0;
    return crc32c(0, &copy, sizeof copy);
}

Header check_header(const std::byte* base, std::uint64_t bytes, const std::string& path, bool may_be_shorter) {
    const auto refuse = [&](const std::string& why) { throw Error(ErrorKind::storage, "'" + path + "' " + why); };
    Header header;
    if (bytes < kPageBytes) refuse("is not a Sharpwave table: it is shorter than a header");
    std::memcpy(&header, base, sizeof header);
    if (std::memcmp(header.magic, kMagic, sizeof kMagic) != 0) refuse("is not a Sharpwave table");
    if (header.endian_mark != kEndianMark) refuse("was written on a machine of the other byte order");
    if (header.version != kVersion) {
        refuse("has format version " + std::to_string(header.version) + ", this Sharpwave reads version " +
               std::to_string(kVersion) +
               (header.version < kVersion ? "; read it with the version that wrote it and add its rows to a new buffer"
                                          : "; install a newer Sharpwave"));
    }
    if (header.header_crc != header_checksum(header)) refuse("is damaged: its header has a wrong checksum");
    if (header.total_bytes != bytes && !(may_be_shorter && bytes < header.total_bytes)) {
        refuse("is truncated or has grown: its header says " + std::to_string(header.total_bytes) +
               " bytes, the file has " + std::to_string(bytes) +
               (bytes < header.total_bytes ? "; open it with recover=True to save what is whole" : ""));
    }
    if (header.total_bytes >> 56) refuse("is damaged: its header contradicts itself");
    const std::uint64_t length = bytes;
    std::uint64_t end = kPageBytes;
    for (const Region& region : header.regions) {
        if (region.bytes >> 56 || region.offset >> 56) refuse("is damaged: its header contradicts itself");
        if (region.bytes) end = std::max(end, region.offset + region.bytes);
    }
    if (header.total_bytes != round_up(end, kPageBytes)) refuse("is damaged: its header contradicts itself");
    if (header.kind != kLive && header.has_checksums != 1) refuse("is damaged: its header contradicts itself");
    bytes = header.total_bytes;
    // The checksum holds, so what follows guards against files made to mislead, not against accidents.
    const auto need = [&](RegionId id, Wide size) {
        const Region& region = header.regions[id];
        const bool inside = region.offset >= kPageBytes &&
                            region.offset % (id == kWriters && header.kind == kLive ? 128 : 64) == 0 &&
                            region.offset <= bytes && region.bytes <= bytes - region.offset;
        if (size != region.bytes || (size != 0 && !inside)) refuse("is damaged: a region does not fit its header");
        if (size == 0 && region.offset != 0) refuse("is damaged: a region does not fit its header");
        for (std::uint32_t other = 0; size != 0 && other < kRegionCount; ++other) {
            const Region& there = header.regions[other];
            if (other != id && there.bytes != 0 && region.offset < there.offset + there.bytes &&
                there.offset < region.offset + region.bytes)
                refuse("is damaged: two regions lie in one place");
        }
    };
    const auto wide = [](std::uint64_t a, std::uint64_t b) { return static_cast<Wide>(a) * b; };
    if ((header.kind != kLive && header.kind != kSnapshot && header.kind != kIncrement) || header.width == 0 ||
        header.block_rows == 0 || header.block_rows % header.width || header.blocks == 0 || header.max_writers == 0 ||
        header.max_writers > 4096 || header.field_count == 0 || header.capacity + header.spare_rows != header.slots ||
        header.spare_rows > header.slots || header.saved_slots > header.slots || header.row_bytes % 8 != 0 ||
        header.blocks != (header.slots + header.block_rows - 1) / header.block_rows) {
        refuse("is damaged: its header contradicts itself");
    }
    if (header.slots % header.width || header.block_rows > header.slots + header.width ||
        (header.slots | header.width) >> 48 || (header.kind == kLive && header.saved_slots != header.slots)) {
        refuse("is damaged: its header contradicts itself");
    }
    need(kRuntime, header.kind != kLive ? 0 : kRuntimeBytes);
    need(kCounters, sizeof(Counters));
    need(kWriters, wide(header.max_writers, sizeof(WriterRecord)));
    need(kBlocks, wide(header.blocks, sizeof(BlockRecord)));
    need(kTimes, header.kind == kLive ? wide(header.blocks, 8) : 0);
    // How many bytes the fields tell: see read_layout().
    const bool has_mutables = header.regions[kMutables].bytes != 0;
    need(kMutables, header.regions[kMutables].bytes);
    need(kSelectors, header.kind == kLive && has_mutables ? wide(header.slots, 8) : 0);
    need(kFields, wide(header.field_count, sizeof(FieldRecord)));
    need(kDescription, header.regions[kDescription].bytes);
    // Without these nothing tells what the rows mean, nor how many there were: not even recover=True guesses.
    for (RegionId id : {kFields, kDescription}) {
        const Region& region = header.regions[id];
        if (region.offset + region.bytes > length) refuse("is damaged: it ends before its description");
    }
    for (RegionId id : {kCounters, kWriters, kBlocks}) {
        const Region& region = header.regions[id];
        if (region.offset + region.bytes > length) refuse("is damaged: it ends before the counts of its rows");
    }
    if (header.schema_crc != schema_checksum(base, header)) refuse("is damaged: its description has a wrong checksum");
    need(kRows, header.kind == kIncrement ? header.regions[kRows].bytes : wide(header.saved_slots, header.row_bytes));
    need(kDirty, header.kind == kIncrement ? header.regions[kDirty].bytes : 0);
    need(kWords, header.word_is_embedded ? 0 : wide(header.saved_slots, 8));
    need(kChecksums, header.has_checksums ? wide(header.saved_slots, 4) : 0);
    const bool derived = header.waiting_bytes != 0;
    if (header.sampler > 2 || header.columns > 3 || (header.columns && !header.sampler)) {
        refuse("is damaged: its header contradicts itself");
    }
    need(kGiven, header.sampler == 1 ? wide(header.saved_slots, 4) : 0);
    need(kEpisodes, header.columns & kEpisodesColumn ? wide(header.saved_slots, sizeof(EpisodePlace)) : 0);
    need(kReads, header.columns & kReadsColumn ? wide(header.saved_slots, 4) : 0);
    if (header.kind != kLive) {
        need(kPriorities, header.sampler ? saved_priorities_bytes(header.blocks, header.saved_slots) : 0);
        need(kFinals, derived ? wide(header.saved_slots, 8) : 0);
        need(kHeap, header.regions[kHeap].bytes);
        return header;
    }
    need(kPriorities, header.sampler ? priorities_bytes(header.blocks, header.slots) : 0);
    need(kTree, header.sampler ? tree_bytes(header.slots) : 0);
    need(kFinals, derived ? wide(header.slots, 8) : 0);
    need(kHeap, wide(header.blocks, header.block_heap_bytes));
    need(kWaiting, derived ? wide(header.max_writers * 2, header.width) * header.waiting_bytes : 0);
    return header;
}

RowLayout read_layout(const std::byte* base, const Header& header, const std::string& path) {
    const auto* records = reinterpret_cast<const FieldRecord*>(base + header.regions[kFields].offset);
    std::vector<Field> fields;
    for (std::uint64_t i = 0; i < header.field_count; ++i) {
        const FieldRecord& record = records[i];
        if (record.dimensions > 8 || record.name[sizeof record.name - 1] || record.dtype[sizeof record.dtype - 1]) {
            throw Error(ErrorKind::storage, "'" + path + "' is damaged: a field record is wrong");
        }
        Field field{record.name, record.dtype, record.item_bytes,
                    std::vector<std::int64_t>(record.shape, record.shape + record.dimensions)};
        if (record.compression > static_cast<std::uint32_t>(Codec::zstd)) {
            throw Error(ErrorKind::storage, "'" + path + "' has a field compressed in a way that is not known here");
        }
        field.stack = record.stack;
        field.pads_zero = record.pads_zero != 0;
        field.codec = static_cast<Codec>(record.compression);
        field.is_ragged = record.ragged != 0;
        field.gives_next = record.gives_next != 0;
        field.is_mutable = record.is_mutable != 0;
        field.follows = static_cast<int>(record.follows - 1);
        if (record.follows > header.field_count) {
            throw Error(ErrorKind::storage, "'" + path + "' is damaged: a field record is wrong");
        }
        fields.push_back(std::move(field));
    }
    const RowLayout layout = [&] {
        try {
            return RowLayout(std::move(fields));
        } catch (const Error& error) {
            throw Error(ErrorKind::storage, "'" + path + "' is damaged: " + error.what());
        }
    }();
    bool same = layout.stride() == header.row_bytes && layout.payload_offset() == header.payload_offset &&
                layout.word_is_embedded() == (header.word_is_embedded != 0) &&
                header.waiting_bytes == (layout.gives_next() ? layout.waiting_bytes() : 0) &&
                header.block_finals_bytes == block_finals_bytes(layout, header.block_rows, header.width) &&
                header.block_heap_bytes == block_heap_bytes(layout, header.block_rows, header.width);
    const std::uint64_t place_bytes = header.kind == kLive
                                          ? 2 * mutable_place_bytes(layout.mutable_bytes(), header.has_checksums != 0)
                                          : layout.mutable_bytes();
    const std::uint64_t rows_here = header.regions[kRows].bytes / std::max<std::uint64_t>(header.row_bytes, 1);
    same = same && static_cast<Wide>(rows_here) * place_bytes == header.regions[kMutables].bytes;
    for (std::uint64_t i = 0; i < header.field_count; ++i) {
        same = same && layout.fields()[i].offset == records[i].offset && layout.fields()[i].bytes == records[i].bytes &&
               layout.fields()[i].full_bytes == records[i].full_bytes;
    }
    if (!same) throw Error(ErrorKind::storage, "'" + path + "' is damaged: its fields do not fill its rows");
    return layout;
}

}  // namespace sharpwave
