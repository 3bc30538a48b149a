// save(): a snapshot is the same format as a live file, with the rows up to the last one used and a checksum over
// everything. Writers never wait.
//
// Rows are copied oldest first, while writers go on, and then those that came meanwhile, until few are left. Then comes
// the cut: under the index lock, where there is one, the index, the counters and the writers' positions are taken. Last
// come the rows appended between the copy and the cut. What a writer wrote over after the cut was copied before it.
// Only a writer that goes round the whole ring meanwhile can outrun that: then all is done again, with adds held back
// at the next block for a bounded time.
//
// The incremental form writes the blocks that have changed since a whole snapshot, and everything that is not rows,
// into a file of its own beside it.
//
// What goes into the file and where: SavePlan. The rows: RowCopy. The index: IndexImage.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <filesystem>
#include <optional>

#include "base/crc32c.h"
#include "base/error.h"
#include "base/fault.h"
#include "storage/new_file.h"
#include "table/cut.h"
#include "table/geometry.h"
#include "table/index_image.h"
#include "table/row_copy.h"
#include "table/save_pipe.h"
#include "table/save_plan.h"
#include "table/snapshot.h"
#include "table/table.h"

namespace sharpwave {

using namespace format;

namespace {

// A header that stands at `path`, if it is one of ours.
std::optional<Header> header_at(const std::string& path) {
    Header header{};
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    const ssize_t got = fd < 0 ? -1 : read(fd, &header, sizeof header);
    if (fd >= 0) ::close(fd);
    if (got != static_cast<ssize_t>(sizeof header) || std::memcmp(header.magic, kMagic, sizeof kMagic) != 0) return {};
    return header;
}

void refuse_to_replace(const std::string& path) {
    std::error_code ignored;  // what cannot be looked at cannot be created either, and says why then
    if (!std::filesystem::exists(path, ignored)) return;
    const auto refuse = [&](const char* why) {
        throw Error(ErrorKind::storage, "save(): '" + path + "' " + why + "; give another path");
    };
    if (!std::filesystem::is_regular_file(path, ignored)) refuse("exists and is not a file");
    const std::optional<Header> header = header_at(path);
    if (!header) refuse("exists and is not a Sharpwave snapshot");
    if (header->kind == kLive) refuse("is a live table");
}

// Records change while they are copied: word by word, so that each number is one that was there.
void copy_records(std::byte* to, const std::byte* from, std::uint64_t bytes) {
    for (std::uint64_t at = 0; at < bytes; at += 8) {
        auto& number = *reinterpret_cast<std::uint64_t*>(const_cast<std::byte*>(from) + at);
        const std::uint64_t word = std::atomic_ref<std::uint64_t>(number).load(std::memory_order_relaxed);
        std::memcpy(to + at, &word, 8);
    }
}

// `grew`: rows came that the plan has no place for. `outrun`: rows of the cut were written over before they were
// copied.
enum class Outcome { done, grew, outrun };

// One attempt to write a snapshot.
class SnapshotSave {
public:
    // `base`: the whole snapshot that this is an increment of. `slack`: rows that may come before the cut.
    SnapshotSave(Table& table, const std::string& path, const std::optional<Header>& base, const std::string& base_path,
                 std::uint64_t slack)
        : table_(table),
          file_(path),
          plan_(table, base, base_path, slack),
          rows_(table, plan_, file_),
          index_(table, plan_.header) {}

    const SavePlan& plan() const { return plan_; }

    Outcome run() {
        file_.reserve(plan_.header.total_bytes, "save()");
        {
            const bool is_large = plan_.slots * plan_.header.row_bytes > 4 * kPieceBytes;
            SavePipe pipe(file_, plan_.header, table_, is_large,
                          [this](Chunk& chunk) { rows_.fill(chunk, 0, nullptr); });
            if (const Outcome outcome = copy_all(pipe); outcome != Outcome::done) return outcome;
            index_.write(file_);  // not before: writers go on, and the rows of the cut are in a hurry
            for (const SavePipe::Early& row : pipe.early()) {
                if (row.serial >= cut_.reach[table_.block_of(row.slot)].end(table_.block_rows()))
                    rows_.leave_out(row.slot);
            }
            rows_.flush_heap();
        }
        finish();
        file_.sync();
        SHARPWAVE_FAULT(save_before_name);
        file_.publish(true);
        return Outcome::done;
    }

private:
    // The rows up to the cut, and the cut.
    Outcome copy_all(SavePipe& pipe) {
        copied_.assign(table_.blocks(), Reach{});
        visited_.assign(table_.blocks(), false);
        for (std::uint64_t b = 0; b < table_.blocks(); ++b) {
            if (plan_.place_of[b] == kNone) copied_[b] = plan_.clean[b];
        }
        // The whole ring from its oldest block on, then again what has changed: a few times, if that helps.
        std::uint64_t left = kNone;
        for (int pass = 0; pass < 4; ++pass) {
            const std::uint64_t count = copy_changed(pipe, cut_of(table_).reach, false);
            if (outcome_ != Outcome::done) return outcome_;
            pipe.drain();  // the next pass may write the same rows again
            if (count < plan_.slots / 64 || count >= left) break;
            left = count;
        }
        SHARPWAVE_FAULT(save_rows_copied);
        take_cut();
        if (plan_.is_outgrown(cut_)) return Outcome::grew;
        copy_changed(pipe, cut_.reach, true);
        if (outcome_ == Outcome::done) pipe.drain();
        return outcome_;
    }

    // Copies what is not copied yet of what `reach` says. At the cut exactly that: rows that are gone are missed, and
    // what came later is left out. Returns how many rows.
    std::uint64_t copy_changed(SavePipe& pipe, const std::vector<Reach>& reach, bool cut) {
        rows_.go_by(reach);
        const std::uint64_t block_rows = table_.block_rows(), blocks = table_.blocks();
        const std::uint64_t oldest = table_.counters().next_ticket.value.load(std::memory_order_acquire) % blocks;
        std::uint64_t count = 0;
        for (std::uint64_t i = 0; i < blocks; ++i) {
            const std::uint64_t b = (oldest + i) % blocks, base = b * block_rows;
            if (base >= plan_.slots) continue;
            const std::uint64_t length = std::min(table_.block_length(b), plan_.slots - base);
            const Reach &now = reach[b], before = copied_[b];
            const bool is_first = !visited_[b] && plan_.place_of[b] != kNone;
            if (!is_first && now == before) continue;
            if (plan_.place_of[b] == kNone) {
                if (now == before) continue;
                outcome_ = Outcome::grew;  // a block that had not changed when this was planned
                return count;
            }
            // Also where the block went round more than once, or was half full when it was copied: what stands behind
            // its head is not what was copied.
            const bool is_lapped =
                before.ticket != kNone && now.ticket != before.ticket &&
                (now.ticket > before.ticket + table_.blocks() || before.head < table_.block_length(b));
            const bool is_whole = is_first || is_lapped || now.changed != before.changed;
            const std::uint64_t begin = is_whole || now.ticket != before.ticket ? 0 : before.head;
            const std::uint64_t end = is_whole ? length : std::min(now.head, length);
            if (end > begin) copy_rows(pipe, b, base + begin, end - begin, now, cut);
            if (outcome_ != Outcome::done) return count;
            count += end > begin ? end - begin : 0;
            copied_[b] = now;
            visited_[b] = true;
        }
        return count;
    }

    void copy_rows(SavePipe& pipe, std::uint64_t block, std::uint64_t slot, std::uint64_t count, const Reach& now,
                   bool cut) {
        const std::uint64_t most = std::max<std::uint64_t>(1, kPieceBytes / plan_.header.row_bytes);
        while (count > 0) {
            Chunk chunk = pipe.take();
            chunk.slot = slot;
            chunk.count = std::min(count, most);
            chunk.rows_at = plan_.place_of_row(block, slot);
            chunk.direct = nullptr;
            if (cut || !rows_.check_in_place(chunk)) rows_.fill(chunk, block, cut ? &now : nullptr);
            chunk.end = cut ? ~std::uint64_t{0} : now.end(table_.block_rows());
            slot += chunk.count;
            count -= chunk.count;
            if (rows_.was_outrun()) outcome_ = Outcome::outrun;
            pipe.put(std::move(chunk));
        }
    }

    // The index as it is under its lock, counters, records, and how far the writers are. Does not catch up: that would
    // alter the run.
    void take_cut() {
        index_.make_room();
        // No write is between its selector and the mark of its block then. Before the index lock: nobody who draws
        // waits for a write.
        std::optional<Table::WriteLock> writes;
        if (table_.layout().mutable_bytes()) writes.emplace(table_);
        std::optional<Table::IndexLock> lock;
        if (plan_.header.sampler) lock.emplace(table_);
        SHARPWAVE_FAULT(save_index_locked);
        index_.copy();
        save_records(kCounters);
        cut_ = cut_of(table_);
        index_.copy_given();
        for (RegionId id : {kWriters, kBlocks}) save_records(id);
    }

    void save_records(RegionId id) {
        RecordBytes& to = records_[id == kCounters ? 0 : id == kWriters ? 1 : 2];
        to.resize(plan_.header.regions[id].bytes);
        copy_records(to.data(), table_.region(id), to.size());
    }

    // Positions, laps and links of the cut, not those of a moment later.
    void put_cut_into_records() {
        auto* writers = reinterpret_cast<WriterRecord*>(records_[1].data());
        auto* blocks = reinterpret_cast<BlockRecord*>(records_[2].data());
        const unsigned bits = static_cast<unsigned>(std::bit_width(table_.block_rows()));
        for (std::uint64_t i = 0; i < table_.max_writers(); ++i) {
            const Position at = i < cut_.positions.size() ? cut_.positions[i] : Position{kNone, 0};
            writers[i].position.store(at.ticket == kNone ? kNone : pack(at.ticket, at.head, bits));
            // Clients are forgotten: what is accepted after the cut is not in the snapshot.
            for (auto* number : {&writers[i].client_token[0], &writers[i].client_token[1], &writers[i].client_sequence,
                                 &writers[i].pending_sequence, &writers[i].pending_position, &writers[i].client_used})
                number->store(0);
        }
        for (std::uint64_t b = 0; b < table_.blocks(); ++b) {
            blocks[b].ticket.store(cut_.reach[b].ticket);
            blocks[b].previous_ticket.store(cut_.links[b].previous);
            blocks[b].next_ticket.store(cut_.links[b].next);
            blocks[b].linked_ticket.store(cut_.links[b].linked);
            blocks[b].changed.store(cut_.reach[b].changed);
        }
    }

    void finish() {
        put_cut_into_records();
        const RegionId records[] = {kCounters, kWriters, kBlocks};
        for (int i = 0; i < 3; ++i) {
            file_.write(plan_.header.regions[records[i]].offset, records_[i].data(), records_[i].size());
        }
        for (RegionId id : {kFields, kDescription})
            file_.write(plan_.header.regions[id].offset, table_.region(id), plan_.header.regions[id].bytes);
        if (plan_.header.kind == kIncrement) {
            file_.write(plan_.header.regions[kDirty].offset, plan_.dirty.data(), plan_.dirty.size() * 8);
            plan_.copy_columns_of_base(file_);
        }
        const std::uint64_t heap_bytes = rows_.heap_bytes();
        const std::uint64_t heap_at = plan_.header.regions[kHeap].offset;
        plan_.header.regions[kHeap] = heap_bytes ? Region{heap_at, heap_bytes} : Region{};
        plan_.header.total_bytes = (heap_at + heap_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
        file_.resize(plan_.header.total_bytes, "save(): cannot write the snapshot");
        plan_.header.meta_crc = meta_checksum();
        plan_.header.header_crc = header_checksum(plan_.header);
        file_.write(0, &plan_.header, sizeof plan_.header);
    }

    std::uint32_t meta_checksum() const {
        std::uint32_t crc = 0;
        std::vector<std::byte> part(kPieceBytes);
        for (RegionId id : kMetaRegions) {
            const Region& region = plan_.header.regions[id];
            for (std::uint64_t at = 0; at < region.bytes; at += part.size()) {
                const std::uint64_t count = std::min<std::uint64_t>(part.size(), region.bytes - at);
                file_.read(region.offset + at, part.data(), count);
                crc = crc32c(crc, part.data(), count);
            }
        }
        return crc;
    }

    Table& table_;
    NewFile file_;
    SavePlan plan_;
    RowCopy rows_;
    IndexImage index_;
    std::vector<Reach> copied_;  // one a block: what of it is in the file
    std::vector<bool> visited_;
    Cut cut_;
    RecordBytes records_[3];  // counters, writers, blocks
    Outcome outcome_ = Outcome::done;
};

}  // namespace

void Table::save(const std::string& path, bool incremental) {
    check_open();
    refuse_to_replace(path);
    std::optional<Header> base = incremental ? header_at(path) : std::nullopt;
    const bool fits = base && base->kind == kSnapshot && base->version == kVersion &&
                      std::memcmp(base->uuid, header_->uuid, sizeof base->uuid) == 0 &&
                      base->header_crc == header_checksum(*base) && base->blocks == header_->blocks &&
                      base->block_rows == header_->block_rows && base->max_writers == header_->max_writers;
    std::error_code ignored;
    if (!fits || std::filesystem::file_size(path, ignored) != base->total_bytes) base.reset();  // one that lost its end
    constexpr double kHoldSeconds = 2;
    std::uint64_t slack = 0;
    for (int attempt = 0; attempt < 4; ++attempt) {
        const std::uint64_t before = visible_slots();
        // The last one but one holds adds back; the last one knows how much comes meanwhile.
        std::optional<AddHold> hold;
        if (attempt >= 2) hold.emplace(*this, kHoldSeconds);
        SnapshotSave save(*this, base ? increment_path(path) : path, base, path, slack);
        if (base && !save.plan().is_small()) {
            base.reset();  // so much has changed that a whole one is as good
            --attempt;
            continue;
        }
        const Outcome outcome = save.run();
        hold.reset();
        if (outcome == Outcome::done) {
            if (!base) unlink(increment_path(path).c_str());
            return;
        }
        slack = std::max<std::uint64_t>(2 * (visible_slots() - before), 4 * block_rows()) + 4096;
    }
    throw Error(
        ErrorKind::not_ready,
        "save(): rows are written over faster than they can be copied; give a larger capacity, or save while fewer "
        "rows are added");
}

}  // namespace sharpwave
