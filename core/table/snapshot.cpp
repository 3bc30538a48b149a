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
#include "base/fault.h"
#include "table/geometry.h"
#include "table/heap.h"
#include "table/table.h"

namespace sharpwave {

using namespace format;

namespace {

constexpr RegionId kMetaRegions[] = {kCounters,   kWriters, kBlocks, kFields,   kDescription, kChecksums,
                                     kPriorities, kGiven,   kFinals, kEpisodes, kReads};

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
        const auto [ticket, head] = table.position(i);
        if (ticket == kNone || ticket >= next) continue;
        const std::uint64_t block = ticket % table.blocks();
        if (table.block_record(block).ticket.load(std::memory_order_acquire) == ticket) {
            cut[block] = ticket * table.block_rows() + head;
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
    header.regions[kRuntime] = header.regions[kTree] = header.regions[kWaiting] = {};
    for (RegionId id : {kCounters, kWriters, kBlocks, kFields, kDescription}) place(id, header.regions[id].bytes);
    place(kChecksums, slots * 4);
    place(kWords, header.word_is_embedded ? 0 : slots * 8);
    place(kPriorities, header.sampler ? saved_priorities_bytes(header.blocks, slots) : 0);
    place(kGiven, header.sampler == 1 ? slots * 4 : 0);
    place(kEpisodes, header.columns & kEpisodesColumn ? slots * sizeof(EpisodePlace) : 0);
    place(kReads, header.columns & kReadsColumn ? slots * 4 : 0);
    place(kFinals, header.waiting_bytes ? slots * 8 : 0);
    place(kRows, slots * header.row_bytes);
    // What the heaps hold now and a little more; the file is cut to what was used.
    std::uint64_t heap = 0;
    for (std::uint64_t b = 0; header.block_heap_bytes && b < header.blocks; ++b) {
        heap +=
            std::min(table.block_length(b), slots) * (table.layout().heap_row_bytes() + table.layout().final_bytes());
    }
    place(kHeap, heap);
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

// Bytes of no fixed size on their way into a snapshot, one after the other.
class SnapshotHeap {
public:
    SnapshotHeap(Storage& file, std::uint64_t offset) : file_(file), offset_(offset) {}
    std::uint64_t used() const { return used_; }
    void rewind(std::uint64_t used) { used_ = used; }
    const std::byte* at(std::uint64_t place) const { return file_.data() + offset_ + place; }
    std::uint64_t put(const std::byte* bytes, std::uint64_t count) {
        const std::uint64_t place = used_;
        used_ += (count + 15) / 16 * 16;
        file_.ensure(offset_ + place, used_ - place);
        racy_copy(file_.data() + offset_ + place, bytes, count);
        return place;
    }

private:
    Storage& file_;
    std::uint64_t offset_, used_ = 0;
};

// The next observation of a row that has no successor in the snapshot, as a final one. False: it changed meanwhile.
bool save_next(const Table& table, std::uint64_t slot, std::uint64_t word, const std::vector<std::uint64_t>& cut,
               SnapshotHeap& heap, std::uint64_t& place) {
    const std::vector<Field>& fields = table.layout().fields();
    std::vector<std::byte> image(table.layout().final_bytes());
    const std::uint64_t kept = std::atomic_ref<std::uint64_t>(table.final_place(slot)).load(std::memory_order_acquire);
    place = 0;
    if (word & kHasFinalObservation) {
        if (kept > table.header().regions[kHeap].bytes - image.size() || kept < sizeof(PieceHeader)) return false;
        racy_copy(image.data(), table.region(kHeap) + kept, image.size());
        fence(std::memory_order_acquire);
        const auto* header = reinterpret_cast<const PieceHeader*>(table.region(kHeap) + kept - sizeof(PieceHeader));
        if (header->owner != serial_of(word) + 1) return false;
        place = heap.put(image.data(), image.size()) + 1;
        return true;
    }
    std::uint64_t next_word = word, next = slot;
    if (table.successor(next, next_word)) {
        if (serial_of(next_word) < cut[table.block_of(next)]) return true;
        // It came after the cut: its observation is all that is taken of it.
        std::uint64_t at = 0;
        const std::byte* row = table.view().rows + next * table.header().row_bytes;
        for (const Field& field : fields) {
            if (!field.gives_next) continue;
            const auto full = static_cast<std::uint32_t>(field.full_bytes);
            HeapPlace value{0, full, full};
            const std::byte* from = row + field.offset;
            if (field.is_in_heap()) {
                racy_copy(reinterpret_cast<std::byte*>(&value), from, sizeof value);
                from = table.region(kHeap) + value.offset;
                if (value.offset > table.header().regions[kHeap].bytes || value.kept_bytes > field.full_bytes)
                    return false;
            }
            const FinalValue size{value.kept_bytes, value.value_bytes, 0, 0};
            std::memcpy(image.data() + at, &size, sizeof size);
            racy_copy(image.data() + at + sizeof size, from, value.kept_bytes);
            at += sizeof size + (value.kept_bytes + 15u) / 16 * 16;
        }
        fence(std::memory_order_acquire);
        const std::uint64_t again = std::atomic_ref<std::uint64_t>(table.word(next)).load(std::memory_order_acquire);
        if ((again ^ next_word) & ~kFlagMask) return false;
        place = heap.put(image.data(), image.size()) + 1;
        return true;
    }
    if (kept >= table.max_writers() * table.width()) return false;
    for (std::uint64_t half = 0; half < 2; ++half) {
        std::byte* from = table.waiting(kept, half);
        std::atomic_ref<std::uint64_t> tag(*reinterpret_cast<std::uint64_t*>(from));
        if (tag.load(std::memory_order_acquire) != serial_of(word) + 1) continue;
        // Waiting values stand at their whole size, final ones close up.
        std::uint64_t at = 0, out = 0;
        for (const Field& field : fields) {
            if (!field.gives_next) continue;
            FinalValue size;
            racy_copy(reinterpret_cast<std::byte*>(&size), from + kWaitingHead + at, sizeof size);
            if (size.kept_bytes > field.full_bytes) return false;
            std::memcpy(image.data() + out, &size, sizeof size);
            racy_copy(image.data() + out + sizeof size, from + kWaitingHead + at + sizeof size, size.kept_bytes);
            at += sizeof size + (field.full_bytes + 15) / 16 * 16;
            out += sizeof size + (size.kept_bytes + 15u) / 16 * 16;
        }
        fence(std::memory_order_acquire);
        if (tag.load(std::memory_order_acquire) != serial_of(word) + 1) return false;
        place = heap.put(image.data(), image.size()) + 1;
        return true;
    }
    return false;
}

// Copies a row, with its bytes in the heap, if it is whole and before the cut. Returns its word, or 0.
std::uint64_t copy_row(const Table& table, std::uint64_t slot, std::uint64_t least,
                       const std::vector<std::uint64_t>& cuts, std::byte* to, SnapshotHeap& heap,
                       std::uint64_t& final_place) {
    const RowView view = table.view();
    const std::uint64_t cut = cuts[table.block_of(slot)];
    std::atomic_ref<std::uint64_t> word(table.word(slot));
    const std::uint64_t payload = table.layout().payload_bytes();
    for (int attempt = 0; attempt < 100; ++attempt) {
        const std::uint64_t seen = word.load(std::memory_order_acquire);
        final_place = 0;
        if (seen < least || serial_of(seen) >= cut) return 0;
        if (state_of(seen) == kVoid) return seen;
        if (state_of(seen) != kCommitted) return 0;
        const std::uint64_t start = heap.used();
        racy_copy(to + table.header().payload_offset, view.rows + slot * view.stride + table.header().payload_offset,
                  payload);
        bool whole = true;
        for (const Field& field : table.layout().fields()) {
            if (!field.is_in_heap()) continue;
            HeapPlace place;
            std::memcpy(&place, to + field.offset, sizeof place);
            const std::uint64_t room = table.header().regions[kHeap].bytes;
            whole = whole && place.kept_bytes <= field.full_bytes && place.offset <= room - place.kept_bytes;
            if (!whole) break;
            place.offset = heap.put(table.region(kHeap) + place.offset, place.kept_bytes);
            std::memcpy(to + field.offset, &place, sizeof place);
        }
        if (whole && table.layout().gives_next()) whole = save_next(table, slot, seen, cuts, heap, final_place);
        fence(std::memory_order_acquire);
        const std::uint64_t again = word.load(std::memory_order_acquire);
        if (whole && ((seen ^ again) & (~kFlagMask | kHasFinalObservation)) == 0) {
            return final_place ? seen | kHasFinalObservation : seen;
        }
        heap.rewind(start);
    }
    return 0;
}

// Over a row as a snapshot holds it: serial, payload, its bytes in the heap, its final observation.
std::uint32_t saved_checksum(const RowLayout& layout, const Header& header, const std::byte* base, std::uint64_t word,
                             const std::byte* row, std::uint64_t final_place) {
    const std::uint64_t serial = serial_of(word);
    std::uint32_t crc = crc32c(crc32c(0, &serial, sizeof serial), row + header.payload_offset, layout.payload_bytes());
    if (state_of(word) != kCommitted) return crc;
    const Region& heap = header.regions[kHeap];
    for (const Field& field : layout.fields()) {
        if (!field.is_in_heap()) continue;
        HeapPlace place;
        std::memcpy(&place, row + field.offset, sizeof place);
        if (place.offset > heap.bytes || place.kept_bytes > heap.bytes - place.offset) return ~crc;
        crc = crc32c(crc, base + heap.offset + place.offset, place.kept_bytes);
    }
    if (final_place) {
        if (final_place - 1 > heap.bytes || layout.final_bytes() > heap.bytes - (final_place - 1)) return ~crc;
        crc = crc32c(crc, base + heap.offset + final_place - 1, layout.final_bytes());
    }
    return crc;
}

// The columns of the index beside the priorities: the same bytes in a table and in a snapshot.
struct Column {
    RegionId region;
    std::uint64_t row_bytes;
};
constexpr Column kIndexColumns[] = {{kEpisodes, sizeof(EpisodePlace)}, {kReads, 4}};

// The index as it is under its lock. Does not catch up: that would alter the run.
void save_index(const Table& table, std::byte* base, const Header& header, std::uint64_t slots) {
    std::byte* priorities = base + header.regions[kPriorities].offset;
    const std::byte* region = table.region(kPriorities);
    const std::uint64_t head = leaves_offset(table.blocks());
    std::optional<Table::IndexLock> lock(table);
    SHARPWAVE_FAULT(save_index_locked);
    std::memcpy(priorities, region, head);
    for (std::uint64_t slot = 0; slot < slots; ++slot) {
        std::memcpy(priorities + head + slot * 4, region + head + slot / 16 * kLeafGroupBytes + slot % 16 * 4, 4);
    }
    for (const Column& column : kIndexColumns) {
        if (header.regions[column.region].bytes == 0) continue;
        std::memcpy(base + header.regions[column.region].offset, table.region(column.region), slots * column.row_bytes);
    }
    lock.reset();
    if (!table.given()) return;
    racy_copy(base + header.regions[kGiven].offset, reinterpret_cast<const std::byte*>(table.given()), slots * 4);
}

void load_index(Table& table, const std::byte* base, const Header& saved) {
    const std::byte* priorities = base + saved.regions[kPriorities].offset;
    const std::uint64_t slots = saved.saved_slots;
    for (const Column& column : kIndexColumns) {
        if (saved.regions[column.region].bytes == 0) continue;
        std::memcpy(table.region(column.region), base + saved.regions[column.region].offset, slots * column.row_bytes);
    }
    std::byte* region = table.region(kPriorities);
    const std::uint64_t head = leaves_offset(table.blocks());
    std::memcpy(region, priorities, head);
    for (std::uint64_t slot = 0; slot < slots; ++slot) {
        std::memcpy(region + head + slot / 16 * kLeafGroupBytes + slot % 16 * 4, priorities + head + slot * 4, 4);
    }
    if (table.given()) std::memcpy(table.given(), base + saved.regions[kGiven].offset, slots * 4);
    // No cursor beyond the rows that are here: their serials will be given to others.
    auto* cursors = reinterpret_cast<std::uint64_t*>(region + kIndexHeadBytes);
    for (std::uint64_t b = 0; b < table.blocks(); ++b) {
        const std::uint64_t ticket = table.block_record(b).ticket.load();
        std::uint64_t end = ticket == kNone ? 0 : ticket * table.block_rows() + table.block_length(b);
        for (std::uint64_t i = 0; i < table.max_writers(); ++i) {
            const auto [its_ticket, head] = table.position(i);
            if (its_ticket == ticket && ticket != kNone) end = ticket * table.block_rows() + head;
        }
        cursors[b] = std::min(cursors[b], end);
    }
    table.counters().index_epoch.value.store(kNone);
}

// Gives each row of a block its bytes again: this lap's rows first, as the block's next writer will go on behind them.
void load_heap(Table& table, std::uint64_t block, const std::byte* heap, const std::uint64_t* finals,
               std::uint64_t saved_slots) {
    const std::uint64_t base = block * table.block_rows();
    const std::uint64_t first = table.block_record(block).ticket.load() * table.block_rows();
    std::uint64_t used = 0;
    WriterRecord nobody{};
    table.block_record(block).heap_used.store(0);
    BlockHeap place_in(table, block);
    for (const bool this_lap : {true, false}) {
        for (std::uint64_t slot = base; slot < std::min(base + table.block_length(block), saved_slots); ++slot) {
            std::uint64_t& word = table.word(slot);
            if (state_of(word) != kCommitted || (serial_of(word) >= first) != this_lap) continue;
            for (const Field& field : table.layout().fields()) {
                if (!field.is_in_heap()) continue;
                std::byte* at = table.view().rows + slot * table.header().row_bytes + field.offset;
                HeapPlace place;
                std::memcpy(&place, at, sizeof place);
                const std::byte* from = heap + place.offset;
                place.offset = place_in.allocate(serial_of(word), place.kept_bytes, nobody);
                std::memcpy(table.region(kHeap) + place.offset, from, place.kept_bytes);
                std::memcpy(at, &place, sizeof place);
            }
            if (finals && finals[slot]) {
                const std::uint64_t place = place_in.allocate_final(serial_of(word));
                std::memcpy(table.region(kHeap) + place, heap + finals[slot] - 1, table.layout().final_bytes());
                table.final_place(slot) = place;
            }
        }
        if (this_lap) used = table.block_record(block).heap_used.load();
    }
    table.block_record(block).heap_used.store(used);
}

}  // namespace

void Table::save(const std::string& path) const {
    check_open();
    refuse_to_replace(path);
    const std::vector<std::uint64_t> cut = cut_of(*this);
    const std::uint64_t slots = visible_slots(), least = least_word();
    Header header = plan_snapshot(*this, slots);
    Storage file = Storage::create(path, header.total_bytes,
                                   header.regions[kHeap].bytes ? header.regions[kHeap].offset : header.total_bytes);
    std::byte* base = file.data();
    for (RegionId id : {kCounters, kWriters, kBlocks}) {
        copy_records(base + header.regions[id].offset, storage_.data() + header_->regions[id].offset,
                     header.regions[id].bytes);
    }
    for (RegionId id : {kFields, kDescription}) {
        std::memcpy(base + header.regions[id].offset, storage_.data() + header_->regions[id].offset,
                    header.regions[id].bytes);
    }
    if (header.sampler) save_index(*this, base, header, slots);
    auto* checksums = reinterpret_cast<std::uint32_t*>(base + header.regions[kChecksums].offset);
    auto* finals = reinterpret_cast<std::uint64_t*>(base + header.regions[kFinals].offset);
    std::byte* rows = base + header.regions[kRows].offset;
    SnapshotHeap heap(file, header.regions[kHeap].offset);
    const Words words(base, header);
    for (std::uint64_t slot = 0; slot < slots; ++slot) {
        std::byte* row = rows + slot * header.row_bytes;
        std::uint64_t final_place = 0;
        const std::uint64_t seen = copy_row(*this, slot, least, cut, row, heap, final_place);
        if (state_of(seen) != kCommitted) std::memset(row, 0, header.row_bytes);
        words.at(slot) = seen;
        if (layout_->gives_next()) finals[slot] = final_place;
        checksums[slot] = saved_checksum(*layout_, header, base, seen, row, final_place);
        header.words_crc = crc32c(header.words_crc, &seen, sizeof seen);
    }
    SHARPWAVE_FAULT(save_rows_copied);
    if (header.regions[kHeap].bytes) {
        header.regions[kHeap].bytes = heap.used();
        header.total_bytes = (header.regions[kHeap].offset + heap.used() + kPageBytes - 1) / kPageBytes * kPageBytes;
        file.ensure(header.regions[kHeap].offset, header.total_bytes - header.regions[kHeap].offset);
        file.shorten(header.total_bytes);
    }
    header.meta_crc = meta_checksum(base, header);
    header.header_crc = header_checksum(header);
    std::memcpy(base, &header, sizeof header);
    file.flush();
    SHARPWAVE_FAULT(save_before_name);
    file.publish(true);
}

std::shared_ptr<Table> Table::load(const std::string& path, bool recover) {
    Storage file = Storage::attach(path, true);
    const auto damaged = [&](const std::string& what) {
        if (recover) return true;
        throw Error(ErrorKind::storage, "'" + path + "' is damaged: " + what + " has a wrong checksum; " +
                                            "open it with recover=True to save what is whole");
    };
    const Header saved = check_header(file.data(), file.bytes(), path, recover);
    if (file.bytes() < saved.total_bytes) {
        Storage whole = Storage::anonymous(saved.total_bytes);
        std::memcpy(whole.data(), file.data(), file.bytes());
        file = std::move(whole);
    }
    std::byte* base = file.data();
    if (saved.kind != kSnapshot) {
        throw Error(ErrorKind::storage,
                    "'" + path + "' is a live table; open it in place with \"file://" + path + "\"");
    }
    // Counters, records and index; made anew from the rows where they are wrong.
    const bool remakes = meta_checksum(base, saved) != saved.meta_crc && damaged("its index");
    const Words saved_words(base, saved);
    std::uint32_t words_crc = 0;
    for (std::uint64_t slot = 0; slot < saved.saved_slots; ++slot) {
        words_crc = crc32c(words_crc, &saved_words.at(slot), 8);
    }
    const bool doubts = words_crc != saved.words_crc && damaged("the column of words");

    TableConfig config;
    const RowLayout layout = read_layout(base, saved, path);
    config.fields = layout.fields();
    config.capacity = saved.capacity;
    config.width = saved.width;
    config.max_writers = saved.max_writers;
    config.seed = saved.seed;
    config.block_rows = saved.block_rows;
    config.sampler.is_by_priority = saved.sampler == 1;
    config.sampler.has_index = saved.sampler != 0;
    config.sampler.numbers_steps = saved.columns & kEpisodesColumn;
    config.sampler.counts_reads = saved.columns & kReadsColumn;
    const Region& text = saved.regions[kDescription];
    config.description.assign(reinterpret_cast<const char*>(base + text.offset), text.bytes);
    const Header made = [&] {
        try {
            return plan(config, layout);
        } catch (const Error& error) {
            throw Error(ErrorKind::storage, "'" + path + "' is damaged: " + error.what());
        }
    }();
    if (made.slots != saved.slots || made.blocks != saved.blocks || made.row_bytes != saved.row_bytes ||
        made.block_heap_bytes != saved.block_heap_bytes || made.block_finals_bytes != saved.block_finals_bytes) {
        throw Error(ErrorKind::storage, "'" + path + "' is damaged: its header contradicts itself");
    }
    auto table = Table::create(config);

    for (RegionId id : {kCounters, kWriters, kBlocks}) {
        std::memcpy(table->storage_.data() + table->header_->regions[id].offset, base + saved.regions[id].offset,
                    saved.regions[id].bytes);
    }
    const auto* checksums = reinterpret_cast<const std::uint32_t*>(base + saved.regions[kChecksums].offset);
    const std::byte* rows = base + saved.regions[kRows].offset;
    const auto* finals =
        layout.gives_next() ? reinterpret_cast<const std::uint64_t*>(base + saved.regions[kFinals].offset) : nullptr;
    std::uint64_t lost = 0;
    for (std::uint64_t slot = 0; slot < saved.saved_slots; ++slot) {
        const std::uint64_t word = saved_words.at(slot);
        const std::byte* row = rows + slot * saved.row_bytes;
        const std::uint32_t crc = saved_checksum(layout, saved, base, word, row, finals ? finals[slot] : 0);
        const bool is_elsewhere = state_of(word) != kEmpty && table->slot_of(serial_of(word)) != slot;
        if ((crc != checksums[slot] && damaged("row " + std::to_string(serial_of(word)))) || (doubts && is_elsewhere)) {
            ++lost;
            continue;
        }
        if (state_of(word) == kEmpty) continue;  // untouched memory stays uncommitted
        std::memcpy(table->rows_ + slot * saved.row_bytes, row, saved.row_bytes);
        table->word(slot) = word;
    }
    // Counters, writers and blocks were copied one after the other while writers went on: no ticket that any of them
    // names is given again.
    std::atomic<std::uint64_t>& next = table->counters_->next_ticket.value;
    const auto after = [&](std::uint64_t ticket) {
        if (ticket != kNone) next.store(std::max(next.load(), ticket + 1));
    };
    for (std::uint64_t i = 0; i < saved.max_writers; ++i) after(table->position(i).ticket);
    for (std::uint64_t b = 0; b < saved.blocks; ++b) {
        after(table->blocks_[b].ticket);
        after(table->blocks_[b].next_ticket);
    }
    if (remakes || (recover && !table->are_records_sane())) table->remake_records();
    table->check_records();
    for (std::uint64_t b = 0; saved.block_heap_bytes && b < table->blocks(); ++b) {
        load_heap(*table, b, base + saved.regions[kHeap].offset, finals, saved.saved_slots);
    }
    if (saved.sampler && !remakes) load_index(*table, base, saved);
    table->counters_->rows_lost.value.fetch_add(lost);
    table->counters_->incarnation.value.fetch_add(1);
    table->recover(recover);
    return table;
}

}  // namespace sharpwave
