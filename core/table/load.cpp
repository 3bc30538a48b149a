// load(): a snapshot, with its increment where there is one, into memory. Every byte is checked.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <optional>

#include "base/crc32c.h"
#include "base/error.h"
#include "base/workers.h"
#include "table/check.h"
#include "table/geometry.h"
#include "table/heap.h"
#include "table/mutable_values.h"
#include "table/recovery.h"
#include "table/snapshot.h"
#include "table/table.h"

namespace sharpwave {

using namespace format;

namespace {

constexpr std::uint64_t kChunkBytes = 1 << 20;

// A file of saved rows: a whole snapshot or an increment.
struct Saved {
    Storage file;
    Header header;
    const std::byte* base = nullptr;
    std::vector<std::uint64_t> place_of;  // one a block: where its rows begin, in rows; kNone: not in here
    bool is_sound = true;                 // everything but the rows has the checksum that it should have

    const std::byte* at(RegionId id) const { return base + header.regions[id].offset; }
};

std::uint32_t meta_checksum(const std::byte* base, const Header& header) {
    std::uint32_t crc = 0;
    for (RegionId id : kMetaRegions) crc = crc32c(crc, base + header.regions[id].offset, header.regions[id].bytes);
    return crc;
}

Saved read_file(const std::string& path, Kind kind, bool recover) {
    Saved saved;
    saved.file = Storage::attach(path, true);
    saved.header = check_header(saved.file.data(), saved.file.bytes(), path, recover);
    if (saved.header.kind != kind) {
        throw Error(ErrorKind::storage,
                    saved.header.kind == kLive
                        ? "'" + path + "' is a live table; open it in place with \"file://" + path + "\""
                        : "'" + path + "' holds changes to a snapshot; open the snapshot");
    }
    if (saved.file.bytes() < saved.header.total_bytes) {
        Storage whole = Storage::anonymous(saved.header.total_bytes);
        std::memcpy(whole.data(), saved.file.data(), saved.file.bytes());
        saved.file = std::move(whole);
    }
    saved.base = saved.file.data();
    saved.is_sound = meta_checksum(saved.base, saved.header) == saved.header.meta_crc;
    if (!saved.is_sound && !recover) {
        throw Error(ErrorKind::storage, "'" + path + "' is damaged: its index has a wrong checksum; " +
                                            "open it with recover=True to save what is whole");
    }
    const Header& header = saved.header;
    saved.place_of.assign(header.blocks, kNone);
    std::uint64_t rows = 0;
    const auto place = [&](std::uint64_t block) {
        saved.place_of[block] = rows;
        rows += std::min(std::min(header.block_rows, header.slots - block * header.block_rows),
                         header.saved_slots - block * header.block_rows);
    };
    if (header.kind == kSnapshot) {
        for (std::uint64_t b = 0; b < header.blocks && b * header.block_rows < header.saved_slots; ++b) place(b);
    } else {
        const auto* dirty = reinterpret_cast<const std::uint64_t*>(saved.at(kDirty));
        bool sane = true;
        for (std::uint64_t i = 0; sane && i < header.regions[kDirty].bytes / 8; ++i) {
            sane = dirty[i] < header.blocks && dirty[i] * header.block_rows < header.saved_slots &&
                   saved.place_of[dirty[i]] == kNone;
            if (sane) place(dirty[i]);
        }
        if (!sane || rows * header.row_bytes != header.regions[kRows].bytes) {
            throw Error(ErrorKind::storage, "'" + path + "' is damaged: its blocks do not fill its rows");
        }
    }
    return saved;
}

// What stands beside a snapshot, if it goes with it. One that is damaged or of another snapshot is as if it were not
// there, unless it says that it belongs here: then it is refused.
std::optional<Saved> read_increment(const std::string& path, const Header& base, bool recover) {
    if (access(path.c_str(), F_OK) != 0) return {};
    Header header{};
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    const ssize_t got = fd < 0 ? -1 : read(fd, &header, sizeof header);
    if (fd >= 0) ::close(fd);
    if (got != static_cast<ssize_t>(sizeof header) || header.base_crc != base.header_crc) return {};
    try {
        Saved saved = read_file(path, kIncrement, recover);
        if (std::memcmp(saved.header.uuid, base.uuid, sizeof base.uuid) != 0 || saved.header.blocks != base.blocks ||
            saved.header.block_rows != base.block_rows || saved.header.slots != base.slots ||
            saved.header.row_bytes != base.row_bytes || saved.header.sampler != base.sampler ||
            saved.header.columns != base.columns || saved.header.max_writers != base.max_writers) {
            return {};
        }
        return saved;
    } catch (const Error&) {
        if (!recover) throw;
        return {};
    }
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
        std::byte* leaf = region + head + slot / 16 * kLeafGroupBytes + slot % 16 * 4;
        std::memcpy(leaf, priorities + head + slot * 8, 4);
        std::memcpy(leaf + kLeafGroupBytes / 2, priorities + head + slot * 8 + 4, 4);
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
    table.counters().index_origin.value.store(kNone);
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
                const std::byte* from = place.kept_bytes ? heap + place.offset : heap;  // the place of nothing is any
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

// What a table is made with, as a snapshot tells.
TableConfig config_of(const Header& saved, const std::byte* base, const RowLayout& layout) {
    TableConfig config;
    config.fields = layout.fields();
    config.capacity = saved.capacity;
    config.width = saved.width;
    config.max_writers = saved.max_writers;
    config.seed = saved.seed;
    config.block_rows = saved.block_rows;
    config.index.is_by_priority = saved.sampler == 1;
    config.index.has_index = saved.sampler != 0;
    config.index.numbers_steps = saved.columns & kEpisodesColumn;
    config.index.counts_reads = saved.columns & kReadsColumn;
    const Region& text = saved.regions[kDescription];
    config.description.assign(reinterpret_cast<const char*>(base + text.offset), text.bytes);
    return config;
}

// Whether a table made with this configuration has the geometry that the file's header says.
void check_geometry(const TableConfig& config, const RowLayout& layout, const Header& saved, const std::string& path) {
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
}

// A snapshot, with its increment, on its way into a new table.
class SnapshotLoad {
public:
    SnapshotLoad(const std::string& path, bool recover)
        : path_(path),
          recovers_(recover),
          whole_(read_file(path, kSnapshot, recover)),
          increment_(read_increment(increment_path(path), whole_.header, recover)),
          newest_(increment_ ? *increment_ : whole_),
          saved_(newest_.header),
          layout_(read_layout(newest_.base, saved_, path)),
          finals_(layout_.gives_next() ? reinterpret_cast<const std::uint64_t*>(newest_.at(kFinals)) : nullptr) {}

    std::shared_ptr<Table> run() {
        const TableConfig config = config_of(saved_, newest_.base, layout_);
        check_geometry(config, layout_, saved_, path_);
        for (const Saved* file : {&whole_, &newest_}) {  // the fields were read from one of them
            const std::uint64_t rows = file->header.regions[kRows].bytes / saved_.row_bytes;
            if (file->header.regions[kMutables].bytes != rows * layout_.mutable_bytes())
                throw Error(ErrorKind::storage, "'" + path_ + "' is damaged: its fields do not fill its rows");
        }
        table_ = Table::create(config);
        for (RegionId id : {kCounters, kWriters, kBlocks}) {
            std::memcpy(table_->region(id), newest_.base + saved_.regions[id].offset, saved_.regions[id].bytes);
        }
        load_blocks();
        if (lost_.load() && !recovers_) {
            throw Error(ErrorKind::storage,
                        "'" + path_ + "' is damaged: the row in slot " + std::to_string(first_wrong_.load()) +
                            " has a wrong checksum; open it with recover=True to save what is whole");
        }
        mend_records();
        for (std::uint64_t b = 0; saved_.block_heap_bytes && b < table_->blocks(); ++b) {
            if (const Saved* source = source_of(b)) {
                load_heap(*table_, b, source->at(kHeap), finals_, saved_.saved_slots);
            }
        }
        if (saved_.sampler && newest_.is_sound) load_index(*table_, newest_.base, saved_);
        return table_;
    }

    // After run(): makes counts and writers agree. Returns how many rows were lost in all.
    std::uint64_t recover() {
        table_->counters().rows_lost.value.fetch_add(lost_.load());
        table_->counters().incarnation.value.fetch_add(1);
        Recovery recovery(*table_);
        if (is_settled()) return lost_.load() + recovery.finish(torn_.load(), {});
        std::vector<std::uint64_t> dropped;
        for (const std::uint64_t slot : wrong_) {
            recovery.note_dropped(table_->block_of(slot), slot % saved_.block_rows, dropped);
        }
        return lost_.load() + recovery.run(recovers_, std::move(dropped));
    }

private:
    // What needs no second look is settled block by block, while it is in the cache.
    bool is_settled() const { return newest_.is_sound && !recovers_; }

    // The file that holds a block's rows; null: none does.
    const Saved* source_of(std::uint64_t block) const {
        if (increment_ && increment_->place_of[block] != kNone) return &*increment_;
        return whole_.place_of[block] != kNone && block * saved_.block_rows < whole_.header.saved_slots ? &whole_
                                                                                                        : nullptr;
    }

    // By several threads: each chunk is copied and checked while it is in the cache.
    void load_blocks() {
        const std::uint64_t most = std::max<std::uint64_t>(1, kChunkBytes / saved_.row_bytes);
        if (is_settled()) TableCheck(*table_).check_records();
        in_parallel(saved_.blocks, [&](std::size_t first, std::size_t last) {
            for (std::size_t b = first; b < last; ++b) {
                const Saved* source = source_of(b);
                const std::uint64_t begin = b * saved_.block_rows;
                const std::uint64_t end = std::min({begin + table_->block_length(b), saved_.saved_slots,
                                                    source ? source->header.saved_slots : saved_.saved_slots});
                for (std::uint64_t slot = begin; source && slot < end; slot += most) {
                    load_rows(*source, b, slot, std::min(most, end - slot));
                }
                std::vector<std::uint64_t> none;  // a sound snapshot has no half-written rows
                if (is_settled()) torn_ += Recovery(*table_).mend_block(b, false, none);
            }
        });
    }

    void load_rows(const Saved& source, std::uint64_t block, std::uint64_t slot, std::uint64_t count) {
        const std::uint64_t stride = saved_.row_bytes, begin = block * saved_.block_rows;
        const std::byte* from = source.at(kRows) + (source.place_of[block] + slot - begin) * stride;
        std::byte* to = table_->view().rows + slot * stride;
        std::memcpy(to, from, count * stride);
        std::vector<std::uint32_t> crcs(count, 0);
        if (saved_.word_is_embedded) {
            crc32c_each(crcs.data(), to, stride, saved_.payload_offset + layout_.payload_bytes(), count);
        } else {
            const auto* words = reinterpret_cast<const std::uint64_t*>(newest_.at(kWords));
            crc32c_each(crcs.data(), words + slot, 8, 8, count);
            crc32c_each(crcs.data(), to, stride, layout_.payload_bytes(), count);
            for (std::uint64_t i = 0; i < count; ++i) table_->word(slot + i) = words[slot + i];
        }
        const std::uint64_t bytes = layout_.mutable_bytes();
        const std::byte* values = source.at(kMutables) + (source.place_of[block] + slot - begin) * bytes;
        const MutableValues mutables(*table_);
        for (std::uint64_t i = 0; bytes && i < count; ++i) {
            if (state_of(table_->word(slot + i)) == kCommitted)
                std::memcpy(mutables.values(slot + i, 0), values + i * bytes, bytes);
        }
        check_rows(source, slot, to, values, crcs);
    }

    // Rows with a wrong checksum, or a word of another slot, are dropped and noted.
    void check_rows(const Saved& source, std::uint64_t slot, const std::byte* rows, const std::byte* mutables,
                    std::vector<std::uint32_t>& crcs) {
        const auto* checksums = reinterpret_cast<const std::uint32_t*>(newest_.at(kChecksums));
        const Region& heap = source.header.regions[kHeap];
        bool is_outside = false;
        const auto bytes_at = [&](std::uint64_t place, std::uint64_t bytes) -> const std::byte* {
            if (place <= heap.bytes && bytes <= heap.bytes - place) return source.base + heap.offset + place;
            is_outside = true;
            return nullptr;
        };
        for (std::uint64_t i = 0; i < crcs.size(); ++i) {
            std::uint64_t& word = table_->word(slot + i);
            is_outside = false;
            if (state_of(word) == kCommitted && (layout_.uses_heap() || finals_)) {
                const std::uint64_t final_place = finals_ ? finals_[slot + i] : 0;
                crcs[i] = heap_checksum(crcs[i], layout_, rows + i * saved_.row_bytes, final_place, bytes_at);
            }
            if (const std::uint64_t bytes = layout_.mutable_bytes(); bytes && state_of(word) == kCommitted)
                crcs[i] = crc32c(crcs[i], mutables + i * bytes, bytes);
            const bool is_elsewhere = state_of(word) != kEmpty && table_->slot_of(serial_of(word)) != slot + i;
            if (crcs[i] == checksums[slot + i] && !is_elsewhere && !is_outside) continue;
            std::uint64_t none = kNone;
            first_wrong_.compare_exchange_strong(none, slot + i);
            ++lost_;
            word = 0;
            const std::lock_guard<std::mutex> guard(mutex_);
            wrong_.push_back(slot + i);
        }
    }

    // No ticket that anything here names is given again.
    void mend_records() {
        const TableCheck check(*table_);
        if (!newest_.is_sound || (recovers_ && !check.are_records_sane())) Recovery(*table_).remake_records();
        check.check_records();
        const auto pass = [&](std::uint64_t ticket) {
            if (ticket != kNone) raise(table_->counters().next_ticket, ticket + 1);
        };
        for (std::uint64_t i = 0; i < saved_.max_writers; ++i) pass(table_->position(i).ticket);
        for (std::uint64_t b = 0; b < saved_.blocks; ++b) {
            pass(table_->block_record(b).ticket.load());
            pass(table_->block_record(b).next_ticket.load());
        }
        check.check_records();
    }

    const std::string& path_;
    const bool recovers_;
    const Saved whole_;
    const std::optional<Saved> increment_;
    const Saved& newest_;  // everything that is not rows is that of the newer one
    const Header& saved_;
    const RowLayout layout_;
    const std::uint64_t* const finals_;  // null: next observations are not derived
    std::shared_ptr<Table> table_;
    std::atomic<std::uint64_t> lost_{0}, torn_{0}, first_wrong_{kNone};
    std::mutex mutex_;
    std::vector<std::uint64_t> wrong_;  // slots of rows that were dropped
};

}  // namespace

std::shared_ptr<Table> Table::load(const std::string& path, bool recover) {
    SnapshotLoad load(path, recover);
    std::shared_ptr<Table> table = load.run();
    table->lost_at_open_ = load.recover();
    return table;
}

}  // namespace sharpwave
