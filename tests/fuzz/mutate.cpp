#include <algorithm>
#include <cstring>
#include <random>
#include <string>

#include "base/crc32c.h"
#include "base/error.h"
#include "base/process.h"
#include "fuzz_open.h"
#include "storage/format.h"
#include "table/geometry.h"
#include "table/snapshot.h"

namespace sharpwave::fuzz {

using namespace format;

namespace {

using Bytes = std::vector<std::uint8_t>;
using Random = std::mt19937_64;

template <class Value>
Value read_at(const Bytes& bytes, std::uint64_t at) {
    Value value;
    std::memcpy(&value, bytes.data() + at, sizeof value);
    return value;
}

template <class Value>
void write_at(Bytes& bytes, std::uint64_t at, const Value& value) {
    std::memcpy(bytes.data() + at, &value, sizeof value);
}

bool is_inside(const Bytes& bytes, const Region& region) {
    return region.bytes != 0 && region.offset <= bytes.size() && region.bytes <= bytes.size() - region.offset;
}

const Region& newest_words(const Header& header) { return header.regions[header.word_is_embedded ? kRows : kWords]; }

const std::byte* at(const Bytes& bytes, std::uint64_t offset) {
    return reinterpret_cast<const std::byte*>(bytes.data() + offset);
}

// The head of the place that a row's selector names.
void mend_place(Bytes& live, const Header& header, std::uint64_t value_bytes, std::uint64_t slot,
                std::uint64_t serial) {
    if (value_bytes == 0 || !header.has_checksums) return;
    const auto selector = read_at<std::uint64_t>(live, header.regions[kSelectors].offset + slot * 8);
    const std::uint64_t place = header.regions[kMutables].offset +
                                ((selector & 1) * header.slots + slot) * mutable_place_bytes(value_bytes, true);
    const std::uint64_t names[] = {serial, selector};
    const std::uint32_t crc = crc32c(0, names, sizeof names);
    write_at(live, place, MutableHead{selector, crc32c(crc, at(live, place + sizeof(MutableHead)), value_bytes), 0});
}

// The checksums of the rows that `source` holds, as docs/format.md tells them. An increment has the words, the places
// of final observations and the checksums of all rows, and the bytes of some.
void mend_rows(Bytes& newest, const Bytes& source) {
    const auto header = read_at<Header>(newest, 0), from = read_at<Header>(source, 0);
    const Region &words = newest_words(header), &finals = header.regions[kFinals], &heap = from.regions[kHeap];
    const std::uint64_t word_stride = header.word_is_embedded ? header.row_bytes : 8;
    try {
        check_header(at(newest, 0), newest.size(), "");
        check_header(at(source, 0), source.size(), "");
        const RowLayout layout = read_layout(at(newest, 0), header, "");
        std::uint64_t row = from.regions[kRows].offset;
        const auto bytes_at = [&](std::uint64_t place, std::uint64_t count) -> const std::byte* {
            if (place > heap.bytes || count > heap.bytes - place) return nullptr;
            return at(source, heap.offset + place);
        };
        const auto mend_row = [&](std::uint64_t slot) {
            if (row + header.row_bytes > source.size() || slot >= header.saved_slots) return;
            const auto word = header.word_is_embedded
                                  ? read_at<std::uint64_t>(source, row)
                                  : read_at<std::uint64_t>(newest, words.offset + slot * word_stride);
            const bool is_row = state_of(word) == kCommitted, is_live = header.kind == kLive;
            const bool is_void = is_live && state_of(word) == kVoid;
            const std::uint64_t name = is_live ? lasting_part(word) : word;
            std::uint32_t crc = crc32c(0, &name, 8);
            if (!is_void) crc = crc32c(crc, at(source, row + header.payload_offset), layout.payload_bytes());
            const std::uint64_t place =
                !is_live && finals.bytes ? read_at<std::uint64_t>(newest, finals.offset + slot * 8) : 0;
            if (is_row) crc = heap_checksum(crc, layout, at(source, row), place, bytes_at);
            if (is_row && !is_live) {
                const std::uint64_t number = (row - from.regions[kRows].offset) / header.row_bytes;
                crc = crc32c(crc, at(source, from.regions[kMutables].offset + number * layout.mutable_bytes()),
                             layout.mutable_bytes());
            }
            if (is_row && is_live) mend_place(newest, header, layout.mutable_bytes(), slot, serial_of(word));
            if (is_row || is_void || !is_live) write_at(newest, header.regions[kChecksums].offset + slot * 4, crc);
            row += header.row_bytes;
        };
        if (from.kind != kIncrement) {
            for (std::uint64_t slot = 0; slot < from.saved_slots; ++slot) mend_row(slot);
            return;
        }
        const Region& dirty = from.regions[kDirty];
        for (std::uint64_t i = 0; i < dirty.bytes / 8; ++i) {
            const std::uint64_t first = read_at<std::uint64_t>(source, dirty.offset + i * 8) * from.block_rows;
            const std::uint64_t end = std::min(first + from.block_rows, from.saved_slots);
            for (std::uint64_t slot = first; slot < end; ++slot) mend_row(slot);
        }
    } catch (const Error&) {
        // Header or fields make no sense: nobody will look at the rows.
    }
}

// The seal of a live file, over what rows' checksums do not cover.
void mend_seal(Bytes& bytes) {
    const auto header = read_at<Header>(bytes, 0);
    const Region &counters = header.regions[kCounters], &blocks = header.regions[kBlocks];
    try {
        check_header(at(bytes, 0), bytes.size(), "");
    } catch (const Error&) {
        return;  // nobody will look at it
    }
    if (header.kind != kLive) return;
    const std::uint64_t stride = header.word_is_embedded ? header.row_bytes : 8;
    std::vector<std::uint32_t> words(header.blocks, 0);
    for (std::uint64_t b = 0; b < header.blocks; ++b) {
        const std::uint64_t ticket_at = blocks.offset + b * sizeof(BlockRecord) + offsetof(BlockRecord, ticket);
        if (read_at<std::uint64_t>(bytes, ticket_at) == kNone) continue;
        const std::uint64_t end = std::min((b + 1) * header.block_rows, header.slots);
        for (std::uint64_t slot = b * header.block_rows; slot < end; ++slot)
            words[b] = crc32c(words[b], at(bytes, newest_words(header).offset + slot * stride), 8);
    }
    const std::uint64_t clean_at = counters.offset + offsetof(Counters, clean);
    const std::uint64_t seal_at = counters.offset + offsetof(Counters, seal), none = 0;
    const auto clean = read_at<std::uint64_t>(bytes, clean_at);
    write_at(bytes, clean_at, none);
    write_at(bytes, seal_at, none);
    std::uint32_t crc = crc32c(0, words.data(), words.size() * sizeof words[0]);
    for (RegionId id :
         {kCounters, kWriters, kBlocks, kChecksums, kPriorities, kGiven, kEpisodes, kReads, kFinals, kSelectors}) {
        crc = crc32c(crc, at(bytes, header.regions[id].offset), header.regions[id].bytes);
    }
    write_at(bytes, clean_at, clean);
    write_at(bytes, seal_at, std::uint64_t{crc});
}

void mend_header(Bytes& bytes, std::uint32_t base_crc) {
    auto header = read_at<Header>(bytes, 0);
    if (header.kind == kIncrement) header.base_crc = base_crc;
    if (header.kind != kLive) {
        header.meta_crc = 0;
        for (RegionId id : kMetaRegions) {
            const Region& region = header.regions[id];
            if (is_inside(bytes, region))
                header.meta_crc = crc32c(header.meta_crc, at(bytes, region.offset), region.bytes);
        }
    }
    if (is_inside(bytes, header.regions[kFields]) && is_inside(bytes, header.regions[kDescription])) {
        header.schema_crc = schema_checksum(reinterpret_cast<const std::byte*>(bytes.data()), header);
    }
    header.header_crc = header_checksum(header);
    write_at(bytes, 0, header);
}

// A number that is likely to be one too many or one too few somewhere.
std::uint64_t telling_number(const Bytes& bytes, const Header& header, Random& random) {
    const std::uint64_t sizes[] = {header.capacity,      header.slots,       header.blocks,
                                   header.block_rows,    header.width,       header.max_writers,
                                   header.row_bytes,     header.saved_slots, header.block_heap_bytes,
                                   header.waiting_bytes, header.total_bytes, header.block_finals_bytes,
                                   bytes.size(),         kPageBytes};
    switch (random() % 6) {
        case 0:
            return random() % 4;
        case 1:
            return ~std::uint64_t{0} - random() % 3;
        case 2:
            return std::uint64_t{1} << random() % 64;
        case 3:
            return (std::uint64_t{1} << random() % 64) - 1;
        case 4:
            return random();
        default:
            return sizes[random() % std::size(sizes)] + random() % 3 - 1;
    }
}

// One number within [from, to): flipped, replaced, or taken from elsewhere in there.
void change_number(Bytes& bytes, const Header& header, std::uint64_t from, std::uint64_t to, Random& random) {
    if (to > bytes.size() || to - from < 8) return;
    const std::uint64_t place = from + random() % ((to - from) / 4) * 4;
    const std::uint64_t wide = std::min<std::uint64_t>(place / 8 * 8, to - 8);
    switch (random() % 8) {
        case 0:
        case 1:
            bytes[from + random() % (to - from)] ^= static_cast<std::uint8_t>(1 << random() % 8);
            break;
        case 2:
        case 3:
            write_at(bytes, wide, telling_number(bytes, header, random));
            break;
        case 4:
            if (place + 4 <= to)
                write_at(bytes, place, static_cast<std::uint32_t>(telling_number(bytes, header, random)));
            break;
        case 5:
            write_at(bytes, wide, read_at<std::uint64_t>(bytes, wide) + random() % 5 - 2);
            break;
        case 6:
            write_at(bytes, wide, read_at<std::uint64_t>(bytes, from + random() % ((to - from) / 8) * 8));
            break;
        default:
            bytes[from + random() % (to - from)] = static_cast<std::uint8_t>(random());
    }
}

// A word with other flags, another state or another serial, and sense in the rest.
void change_word(Bytes& bytes, const Header& header, Random& random) {
    const Region& region = header.regions[header.word_is_embedded ? kRows : kWords];
    const std::uint64_t stride = header.word_is_embedded ? header.row_bytes : 8;
    if (!is_inside(bytes, region) || stride < 8 || region.bytes < stride) return;
    const std::uint64_t place = region.offset + random() % (region.bytes / stride) * stride;
    auto word = read_at<std::uint64_t>(bytes, place);
    switch (random() % 3) {
        case 0:
            word ^= std::uint64_t{1} << random() % kSerialShift;
            break;
        case 1:
            word += (random() % 5 - 2) << kSerialShift;
            break;
        default:
            word += (random() % 3 - 1) * header.slots << kSerialShift;
    }
    write_at(bytes, place, word);
}

}  // namespace

std::size_t length_of_first(const std::uint8_t* data, std::size_t size) {
    if (size < sizeof(Header)) return size;
    Header header;
    std::memcpy(&header, data, sizeof header);
    if (header.kind != kSnapshot || header.total_bytes >= size || size - header.total_bytes < sizeof(Header))
        return size;
    return std::memcmp(data + header.total_bytes, kMagic, sizeof kMagic) == 0 ? header.total_bytes : size;
}

void mend_checksums(Bytes& bytes) {
    const std::size_t length = length_of_first(bytes.data(), bytes.size());
    Bytes first(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(length));
    Bytes second(bytes.begin() + static_cast<std::ptrdiff_t>(length), bytes.end());
    if (first.size() < sizeof(Header)) return;
    const auto mend = [](Bytes& file, const Bytes* base) {
        const std::uint32_t base_crc = base ? read_at<Header>(*base, 0).header_crc : 0;
        mend_header(file, base_crc);
        if (base) mend_rows(file, *base);
        if (read_at<Header>(file, 0).has_checksums) mend_rows(file, Bytes(file));
        mend_header(file, base_crc);
        mend_seal(file);
    };
    mend(first, nullptr);
    if (!second.empty()) mend(second, &first);
    bytes = std::move(first);
    bytes.insert(bytes.end(), second.begin(), second.end());
}

void mutate(Bytes& whole, std::uint64_t seed) {
    Random random(seed);
    // Of a snapshot and its increment, one of them.
    const auto length = static_cast<std::ptrdiff_t>(length_of_first(whole.data(), whole.size()));
    Bytes first(whole.begin(), whole.begin() + length), second(whole.begin() + length, whole.end());
    Bytes& bytes = !second.empty() && random() % 2 ? second : first;
    if (bytes.size() < sizeof(Header)) {
        if (!whole.empty()) whole[random() % whole.size()] ^= static_cast<std::uint8_t>(1 << random() % 8);
        return;
    }
    for (std::uint64_t changes = 1 + random() % 4; changes > 0; --changes) {
        auto header = read_at<Header>(bytes, 0);
        const std::uint64_t kind = random() % 16;
        if (kind == 0) {
            change_number(bytes, header, 0, sizeof(Header), random);
        } else if (kind == 1) {
            // Another length, that the header knows of or not.
            const std::uint64_t size = random() % 2 ? bytes.size() - std::min(bytes.size(), kPageBytes)
                                                    : bytes.size() + kPageBytes * (random() % 3);
            if (size < sizeof(Header)) continue;
            bytes.resize(size);
            header.total_bytes = size;
            if (random() % 4) write_at(bytes, 0, header);
        } else if (kind == 2) {
            // One region stands elsewhere, or in another's place.
            Region& region = header.regions[random() % kRegionCount];
            if (random() % 2) {
                region.offset = header.regions[random() % kRegionCount].offset;
            } else {
                region.offset = random() % (bytes.size() + 1) / 8 * 8;
            }
            write_at(bytes, 0, header);
        } else if (kind <= 5) {
            change_word(bytes, header, random);
        } else if (kind == 6 && is_inside(bytes, header.regions[kCounters])) {
            // As a process that died leaves it, on this machine or on one that went down since.
            const std::uint64_t counters = header.regions[kCounters].offset;
            write_at(bytes, counters + offsetof(Counters, clean), std::uint64_t{0});
            const std::string boot = random() % 2 ? boot_id() : "another boot";
            if (boot.size() < sizeof(Counters::boot_id))
                std::memcpy(bytes.data() + counters + offsetof(Counters, boot_id), boot.c_str(), boot.size() + 1);
        } else {
            const auto id = static_cast<RegionId>(random() % kRegionCount);
            const Region& region = header.regions[id];
            // Nobody believes what the runtime region and the tree hold: little is lost by passing them over.
            if (!is_inside(bytes, region) || ((id == kRuntime || id == kTree) && random() % 8)) continue;
            change_number(bytes, header, region.offset, region.offset + region.bytes, random);
        }
    }
    whole = std::move(first);
    whole.insert(whole.end(), second.begin(), second.end());
    if (random() % 16) mend_checksums(whole);
}

}  // namespace sharpwave::fuzz

#if defined(SHARPWAVE_LIBFUZZER)
extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t most);

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size, std::size_t most, unsigned seed) {
    std::vector<std::uint8_t> bytes(data, data + size);
    if (seed % 4 == 0) {
        bytes.resize(most);
        bytes.resize(LLVMFuzzerMutate(bytes.data(), size, most));
        sharpwave::fuzz::mend_checksums(bytes);
    } else {
        sharpwave::fuzz::mutate(bytes, seed);
    }
    if (bytes.size() > most) bytes.resize(most);
    std::memcpy(data, bytes.data(), bytes.size());
    return bytes.size();
}
#endif
