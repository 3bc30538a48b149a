// save() and load(): a snapshot is the same format as a live file, with the rows up to the last one used and a
// checksum over everything.
//
// The cut is the state of the writers' heads when save() begins. Rows appended later are left out; rows that were
// overwritten before the copy reached them are missing, and they are the oldest. Writers never wait.
#include <fcntl.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>

#include "base/crc32c.h"
#include "base/error.h"
#include "table/geometry.h"
#include "table/table.h"

namespace sharpwave {

using namespace format;

namespace {

constexpr RegionId kMetaRegions[] = {kCounters, kWriters, kBlocks, kFields, kDescription, kChecksums};

std::uint32_t meta_checksum(const std::byte* base, const Header& header) {
    std::uint32_t crc = 0;
    for (RegionId id : kMetaRegions) crc = crc32c(crc, base + header.regions[id].offset, header.regions[id].bytes);
    return crc;
}

// Where the words stand in a snapshot or a table: with the rows, or in their own column.
struct Words {
    Words(std::byte* base, const Header& header)
        : first(base + header.regions[header.word_is_embedded ? kRows : kWords].offset),
          stride(header.word_is_embedded ? header.row_bytes : 8) {}
    std::uint64_t& at(std::uint64_t slot) const { return *reinterpret_cast<std::uint64_t*>(first + slot * stride); }
    std::byte* first;
    std::uint64_t stride;
};

void refuse_to_replace(const std::string& path) {
    std::error_code ignored;  // what cannot be looked at cannot be created either, and says why then
    if (!std::filesystem::exists(path, ignored)) return;
    const auto refuse = [&](const char* why) {
        throw Error(ErrorKind::storage, "save(): '" + path + "' " + why + "; give another path");
    };
    if (!std::filesystem::is_regular_file(path, ignored)) refuse("exists and is not a file");
    Header header{};
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    const ssize_t got = fd < 0 ? -1 : read(fd, &header, sizeof header);
    if (fd >= 0) ::close(fd);
    if (got != static_cast<ssize_t>(sizeof header) || std::memcmp(header.magic, kMagic, sizeof kMagic) != 0) {
        refuse("exists and is not a Sharpwave snapshot");
    }
    if (header.kind == kLive) refuse("is a live table");
}

// Per block, the first serial that lies after the cut.
std::vector<std::uint64_t> cut_of(const Table& table) {
    const std::uint64_t next = table.counters().next_ticket.value.load(std::memory_order_acquire);
    std::vector<std::uint64_t> cut(table.blocks(), next * table.block_rows());
    const std::uint64_t used = table.counters().writers_used.value.load(std::memory_order_acquire);
    for (std::uint64_t i = 0; i < used; ++i) {
        const WriterRecord& writer = table.writer_record(i);
        // Head before ticket and again after: the pair must be of one block.
        for (;;) {
            const std::uint64_t ticket = writer.ticket.load(std::memory_order_acquire);
            const std::uint64_t head = writer.head.load(std::memory_order_acquire);
            if (ticket != writer.ticket.load(std::memory_order_acquire)) continue;
            if (ticket == kNone || ticket >= next) break;
            const std::uint64_t block = ticket % table.blocks();
            if (table.block_record(block).ticket.load(std::memory_order_acquire) == ticket) {
                cut[block] = ticket * table.block_rows() + head;
            }
            break;
        }
    }
    return cut;
}

Header plan_snapshot(const Table& table, std::uint64_t slots) {
    Header header = table.header();
    header.kind = kSnapshot;
    header.saved_slots = slots;
    header.has_checksums = 1;
    std::uint64_t at = kPageBytes;
    const auto place = [&](RegionId id, std::uint64_t bytes) {
        at = (at + 63) / 64 * 64;
        header.regions[id] = bytes ? Region{at, bytes} : Region{};
        at += bytes;
    };
    header.regions[kRuntime] = {};
    for (RegionId id : {kCounters, kWriters, kBlocks, kFields, kDescription}) place(id, header.regions[id].bytes);
    place(kChecksums, slots * 4);
    place(kWords, header.word_is_embedded ? 0 : slots * 8);
    place(kRows, slots * header.row_bytes);
    header.total_bytes = (at + kPageBytes - 1) / kPageBytes * kPageBytes;
    return header;
}

// Records change while they are copied: word by word, so that each number is one that was there.
void copy_records(std::byte* to, std::byte* from, std::uint64_t bytes) {
    for (std::uint64_t at = 0; at < bytes; at += 8) {
        const std::uint64_t word = std::atomic_ref<std::uint64_t>(*reinterpret_cast<std::uint64_t*>(from + at))
                                       .load(std::memory_order_relaxed);
        std::memcpy(to + at, &word, 8);
    }
}

// Copies a row if it is whole and before the cut. Returns its word, or 0.
std::uint64_t copy_row(const Table& table, std::uint64_t slot, std::uint64_t least, std::uint64_t cut, std::byte* to) {
    const RowView view = table.view();
    std::atomic_ref<std::uint64_t> word(table.word(slot));
    const std::uint64_t payload = table.layout().payload_bytes();
    const FieldMove whole{table.header().payload_offset, payload, to + table.header().payload_offset};
    std::uint64_t seen;
    std::uint32_t missed;
    if (state_of(seen = word.load(std::memory_order_acquire)) == kVoid) {
        return seen >= least && serial_of(seen) < cut ? seen : 0;
    }
    const Gather job{view, least, &slot, &whole, 1, &seen, false};
    if (kernels().gather(job, 0, 1, &missed) != 0 || serial_of(seen) >= cut) return 0;
    return seen;
}

}  // namespace

void Table::save(const std::string& path) const {
    check_open();
    refuse_to_replace(path);
    const std::vector<std::uint64_t> cut = cut_of(*this);
    const std::uint64_t slots = visible_slots(), least = least_word();
    Header header = plan_snapshot(*this, slots);
    Storage file = Storage::create(path, header.total_bytes);
    std::byte* base = file.data();
    for (RegionId id : {kCounters, kWriters, kBlocks}) {
        copy_records(base + header.regions[id].offset, storage_.data() + header_->regions[id].offset,
                     header.regions[id].bytes);
    }
    for (RegionId id : {kFields, kDescription}) {
        std::memcpy(base + header.regions[id].offset, storage_.data() + header_->regions[id].offset,
                    header.regions[id].bytes);
    }
    auto* checksums = reinterpret_cast<std::uint32_t*>(base + header.regions[kChecksums].offset);
    std::byte* rows = base + header.regions[kRows].offset;
    const Words words(base, header);
    for (std::uint64_t slot = 0; slot < slots; ++slot) {
        std::byte* row = rows + slot * header.row_bytes;
        const std::uint64_t seen = copy_row(*this, slot, least, cut[slot / header.block_rows], row);
        if (state_of(seen) != kCommitted) std::memset(row, 0, header.row_bytes);
        words.at(slot) = seen;
        const std::uint64_t serial = serial_of(seen);
        checksums[slot] =
            crc32c(crc32c(0, &serial, sizeof serial), row + header.payload_offset, layout_->payload_bytes());
        header.words_crc = crc32c(header.words_crc, &seen, sizeof seen);
    }
    header.meta_crc = meta_checksum(base, header);
    header.header_crc = header_checksum(header);
    std::memcpy(base, &header, sizeof header);
    file.flush();
    file.publish(true);
}

std::shared_ptr<Table> Table::load(const std::string& path) {
    const Storage file = Storage::attach(path, true);
    const auto damaged = [&](const std::string& what) {
        throw Error(ErrorKind::storage, "'" + path + "' is damaged: " + what + " has a wrong checksum");
    };
    std::byte* base = file.data();
    const Header saved = check_header(base, file.bytes(), path);
    if (saved.kind != kSnapshot) {
        throw Error(ErrorKind::storage,
                    "'" + path + "' is a live table; open it in place with \"file://" + path + "\"");
    }
    if (meta_checksum(base, saved) != saved.meta_crc) damaged("its index");
    const Words saved_words(base, saved);
    std::uint32_t words_crc = 0;
    for (std::uint64_t slot = 0; slot < saved.saved_slots; ++slot) {
        words_crc = crc32c(words_crc, &saved_words.at(slot), 8);
    }
    if (words_crc != saved.words_crc) damaged("the column of words");

    TableConfig config;
    const RowLayout layout = read_layout(base, saved, path);
    config.fields = layout.fields();
    config.capacity = saved.capacity;
    config.width = saved.width;
    config.max_writers = saved.max_writers;
    config.seed = saved.seed;
    config.block_rows = saved.block_rows;
    const Region& text = saved.regions[kDescription];
    config.description.assign(reinterpret_cast<const char*>(base + text.offset), text.bytes);
    auto table = Table::create(config);

    for (RegionId id : {kCounters, kWriters, kBlocks}) {
        std::memcpy(table->storage_.data() + table->header_->regions[id].offset, base + saved.regions[id].offset,
                    saved.regions[id].bytes);
    }
    const auto* checksums = reinterpret_cast<const std::uint32_t*>(base + saved.regions[kChecksums].offset);
    const std::byte* rows = base + saved.regions[kRows].offset;
    for (std::uint64_t slot = 0; slot < saved.saved_slots; ++slot) {
        const std::uint64_t word = saved_words.at(slot), serial = serial_of(word);
        const std::byte* row = rows + slot * saved.row_bytes;
        const std::uint32_t crc =
            crc32c(crc32c(0, &serial, sizeof serial), row + saved.payload_offset, layout.payload_bytes());
        if (crc != checksums[slot]) damaged("row " + std::to_string(serial));
        if (state_of(word) == kEmpty) continue;  // untouched memory stays uncommitted
        std::memcpy(table->rows_ + slot * saved.row_bytes, row, saved.row_bytes);
        table->word(slot) = word;
    }
    table->check_records();
    table->counters_->incarnation.value.fetch_add(1);
    table->recover(false);
    return table;
}

}  // namespace sharpwave
