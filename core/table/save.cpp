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
#include <fcntl.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <optional>

#include "base/crc32c.h"
#include "base/error.h"
#include "base/fault.h"
#include "base/process.h"
#include "storage/new_file.h"
#include "table/cut.h"
#include "table/geometry.h"
#include "table/save_pipe.h"
#include "table/snapshot.h"
#include "table/table.h"

namespace sharpwave {

using namespace format;

namespace {

constexpr std::uint64_t kChunkBytes = kPieceBytes;  // rows copied at a time

// Records are looked at in memory as they stand in a table: aligned alike.
template <class Value>
struct Aligned {
    using value_type = Value;
    Aligned() = default;
    template <class Other>
    Aligned(const Aligned<Other>&) {}
    Value* allocate(std::size_t count) {
        return static_cast<Value*>(::operator new(count * sizeof(Value), std::align_val_t{128}));
    }
    void deallocate(Value* place, std::size_t) { ::operator delete(place, std::align_val_t{128}); }
    bool operator==(const Aligned&) const { return true; }
};
using Records = std::vector<std::byte, Aligned<std::byte>>;

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

enum class Outcome { done, grew, outrun };

class Saver {
public:
    // `base`: the whole snapshot that this is an increment of. `slack`: rows that may come before the cut.
    Saver(const Table& table, const std::string& path, const std::optional<Header>& base, const std::string& base_path,
          std::uint64_t slack)
        : table_(table), layout_(table.layout()), file_(path), base_path_(base_path) {
        slots_ = std::min(table.visible_slots() + slack, table.header().slots);
        plan(base, slack);
    }

    // Nothing but a share of the blocks has changed.
    bool is_small() const { return dirty_.size() * 2 <= table_.blocks(); }

    Outcome save(bool replace) {
        file_.reserve(header_.total_bytes, "save()");
        {
            const bool large = slots_ * header_.row_bytes > 4 * kChunkBytes;
            SavePipe pipe(file_, header_, table_, large, [this](Chunk& chunk) { fill(chunk, 0, nullptr); });
            copied_.assign(table_.blocks(), Reach{});
            visited_.assign(table_.blocks(), false);
            for (std::uint64_t b = 0; b < table_.blocks(); ++b) {
                if (place_of_[b] == kNone) copied_[b] = clean_[b];
            }
            // The whole ring from its oldest block on, then again what has changed: a few times, if that helps.
            std::uint64_t left = kNone;
            for (int pass = 0; pass < 4; ++pass) {
                const std::uint64_t count = copy_changed(pipe, cut_of(table_).reach, false);
                if (outcome_ != Outcome::done) return outcome_;
                pipe.drain();  // the next pass may write the same rows again
                if (count < slots_ / 64 || count >= left) break;
                left = count;
            }
            SHARPWAVE_FAULT(save_rows_copied);
            take_cut();
            if (reaches_beyond()) return Outcome::grew;
            copy_changed(pipe, cut_.reach, true);
            if (outcome_ != Outcome::done) return outcome_;
            pipe.drain();
            if (header_.sampler) write_index();  // not before: writers go on, and the rows of the cut are in a hurry
            for (const SavePipe::Early& row : pipe.early()) {
                if (row.serial >= cut_.reach[table_.block_of(row.slot)].end(table_.block_rows())) leave_out(row.slot);
            }
            flush_heap();
        }
        finish();
        file_.sync();
        SHARPWAVE_FAULT(save_before_name);
        file_.publish(replace);
        return Outcome::done;
    }

private:
    void plan(const std::optional<Header>& base, std::uint64_t slack) {
        const std::uint64_t blocks = table_.blocks();
        place_of_.assign(blocks, kNone);
        clean_.assign(blocks, Reach{});
        if (base) read_base(*base);
        const std::uint64_t soon = table_.counters().next_ticket.value.load(std::memory_order_acquire);
        const std::vector<Reach> reach = cut_of(table_).reach;
        const std::uint64_t ahead = slack / table_.block_rows() + 2;  // blocks that will be claimed soon
        std::uint64_t rows = 0;
        for (std::uint64_t b = 0; b < blocks && b * table_.block_rows() < slots_; ++b) {
            const bool comes_soon = (b + blocks - soon % blocks) % blocks < ahead && slack;
            const bool is_held = table_.block_record(b).owner.load(std::memory_order_acquire) != 0;
            if (base && clean_[b] == reach[b] && reach[b].ticket != kNone && !is_held && !comes_soon) continue;
            place_of_[b] = rows;
            rows += std::min(table_.block_length(b), slots_ - b * table_.block_rows());
            dirty_.push_back(b);
        }
        header_ = table_.header();
        header_.kind = base ? kIncrement : kSnapshot;
        header_.base_crc = base ? base->header_crc : 0;
        header_.saved_slots = slots_;
        header_.has_checksums = 1;
        std::uint64_t at = kPageBytes;
        const auto place = [&](RegionId id, std::uint64_t bytes) {
            at = (at + 63) / 64 * 64;
            header_.regions[id] = bytes ? Region{at, bytes} : Region{};
            at += bytes;
        };
        header_.regions[kRuntime] = header_.regions[kTree] = header_.regions[kWaiting] = header_.regions[kTimes] = {};
        for (RegionId id : {kCounters, kWriters, kBlocks, kFields, kDescription}) place(id, header_.regions[id].bytes);
        place(kDirty, base ? dirty_.size() * 8 : 0);
        place(kChecksums, slots_ * 4);
        place(kWords, header_.word_is_embedded ? 0 : slots_ * 8);
        place(kPriorities, header_.sampler ? saved_priorities_bytes(blocks, slots_) : 0);
        place(kGiven, header_.sampler == 1 ? slots_ * 4 : 0);
        place(kEpisodes, header_.columns & kEpisodesColumn ? slots_ * sizeof(EpisodePlace) : 0);
        place(kReads, header_.columns & kReadsColumn ? slots_ * 4 : 0);
        place(kFinals, header_.waiting_bytes ? slots_ * 8 : 0);
        if (rows * header_.row_bytes >= 16 * kPieceBytes) at = (at + kPieceBytes - 1) / kPieceBytes * kPieceBytes;
        place(kRows, rows * header_.row_bytes);
        place(kHeap, 1);  // grows as it fills
        header_.total_bytes = at;
    }

    // What the base holds of each block, and its columns for the blocks that stay as they are.
    void read_base(const Header& base) {
        base_fd_ = open(base_path_.c_str(), O_RDONLY | O_CLOEXEC);
        if (base_fd_ < 0) return;
        std::vector<BlockRecord> blocks(table_.blocks());
        Records writers(table_.max_writers() * sizeof(WriterRecord));
        if (base.regions[kBlocks].bytes != blocks.size() * sizeof(BlockRecord) ||
            base.regions[kWriters].bytes != writers.size())
            return;
        const auto read_region = [&](RegionId id, void* to) {
            return pread(base_fd_, to, base.regions[id].bytes, static_cast<off_t>(base.regions[id].offset)) ==
                   static_cast<ssize_t>(base.regions[id].bytes);
        };
        if (!read_region(kBlocks, blocks.data()) || !read_region(kWriters, writers.data())) return;
        base_ = base;
        const unsigned bits = static_cast<unsigned>(std::bit_width(table_.block_rows()));
        for (std::uint64_t b = 0; b < table_.blocks(); ++b) {
            const std::uint64_t begin = b * table_.block_rows();
            if (begin + table_.block_length(b) > base.saved_slots) continue;
            clean_[b] = {blocks[b].ticket.load(), table_.block_length(b), blocks[b].changed.load()};
        }
        for (std::uint64_t i = 0; i < table_.max_writers(); ++i) {
            const auto& record = *reinterpret_cast<const WriterRecord*>(writers.data() + i * sizeof(WriterRecord));
            const Position at = unpack(record.position.load(), bits);
            if (at.ticket == kNone) continue;
            Reach& block = clean_[at.ticket % table_.blocks()];
            if (block.ticket == at.ticket) block.head = at.head;
        }
    }

    bool reaches_beyond() const {
        for (std::uint64_t b = 0; b < table_.blocks(); ++b) {
            const std::uint64_t filled = cut_.reach[b].ticket == kNone ? 0 : cut_.reach[b].head;
            if (filled && b * table_.block_rows() + filled > slots_) return true;
        }
        return false;
    }

    // Copies what is not copied yet of what `reach` says. At the cut exactly that: rows that are gone are missed, and
    // what came later is left out. Returns how many rows.
    std::uint64_t copy_changed(SavePipe& pipe, const std::vector<Reach>& reach, bool cut) {
        reach_ = &reach;
        const std::uint64_t rows = table_.block_rows(), blocks = table_.blocks();
        const std::uint64_t oldest = table_.counters().next_ticket.value.load(std::memory_order_acquire) % blocks;
        std::uint64_t count = 0;
        for (std::uint64_t i = 0; i < blocks; ++i) {
            const std::uint64_t b = (oldest + i) % blocks, base = b * rows;
            if (base >= slots_) continue;
            const std::uint64_t length = std::min(table_.block_length(b), slots_ - base);
            const Reach &now = reach[b], before = copied_[b];
            const bool is_first = !visited_[b] && place_of_[b] != kNone;
            if (!is_first && now == before) continue;
            if (place_of_[b] == kNone) {
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
        const std::uint64_t most = std::max<std::uint64_t>(1, kChunkBytes / header_.row_bytes);
        while (count > 0) {
            Chunk chunk = pipe.take();
            chunk.slot = slot;
            chunk.count = std::min(count, most);
            chunk.rows_at = header_.regions[kRows].offset +
                            (place_of_[block] + slot - block * table_.block_rows()) * header_.row_bytes;
            chunk.direct = nullptr;
            if (cut || !check_in_place(chunk)) fill(chunk, block, cut ? &now : nullptr);
            chunk.end = cut ? ~std::uint64_t{0} : now.end(table_.block_rows());
            slot += chunk.count;
            count -= chunk.count;
            pipe.put(std::move(chunk));
        }
    }

    // Rows that are as the file wants them need no copy of ours on their way: their checksums are taken where they
    // stand.
    bool check_in_place(Chunk& chunk) const {
#if defined(SHARPWAVE_TSAN)
        return false;  // formally a race; here the copy goes word by word
#endif
        if (layout_.uses_heap() || layout_.gives_next() || header_.payload_offset == 0) return false;
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

    void fill(Chunk& chunk, std::uint64_t block, const Reach* cut) {
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
        const bool is_plain = !layout_.uses_heap() && !layout_.gives_next();
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
            // A row that the cut has, and somebody has written over since.
            if (cut && word == 0) missed_ += is_missed(chunk.slot + i, block, *cut, least);
            if (state_of(word) != kCommitted) std::memset(row, 0, stride);
            if (offset) std::memcpy(row, &word, sizeof word);
        }
        if (missed_ > 0) outcome_ = Outcome::outrun;
        if (offset) {
            // The word stands in front of its payload.
            crc32c_each(chunk.checksums.data(), chunk.rows.data(), stride, offset + layout_.payload_bytes(),
                        chunk.count);
        } else {
            crc32c_each(chunk.checksums.data(), chunk.words.data(), 8, 8, chunk.count);
            crc32c_each(chunk.checksums.data(), chunk.rows.data(), stride, layout_.payload_bytes(), chunk.count);
        }
        for (std::uint64_t i = 0; !is_plain && i < chunk.count; ++i) {
            if (state_of(chunk.words[i]) != kCommitted) continue;
            const auto bytes_at = [&](std::uint64_t place, std::uint64_t) {
                return heap_.data() + (place - heap_begin_);
            };
            chunk.checksums[i] = heap_checksum(chunk.checksums[i], layout_, chunk.rows.data() + i * stride,
                                               chunk.finals.empty() ? 0 : chunk.finals[i], bytes_at);
        }
        if (heap_.size() > kChunkBytes) flush_heap();
    }

    // A row that was copied and came after the cut.
    void leave_out(std::uint64_t slot) {
        const std::uint64_t block = table_.block_of(slot), none = 0;
        const std::vector<std::byte> row(header_.row_bytes);
        std::uint32_t crc = crc32c(0, &none, sizeof none);
        crc = crc32c(crc, row.data(), layout_.payload_bytes());
        file_.write(
            header_.regions[kRows].offset + (place_of_[block] + slot - block * table_.block_rows()) * header_.row_bytes,
            row.data(), row.size());
        file_.write(header_.regions[kChecksums].offset + slot * 4, &crc, sizeof crc);
        for (RegionId id : {kWords, kFinals}) {
            if (header_.regions[id].bytes) file_.write(header_.regions[id].offset + slot * 8, &none, sizeof none);
        }
    }

    // A row of the cut that has been written over: of the lap that is being written, or of the one before, behind it.
    bool is_missed(std::uint64_t slot, std::uint64_t block, const Reach& cut, std::uint64_t least) const {
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
    std::uint64_t copy_row(Chunk& chunk, std::uint64_t i, std::uint64_t end) {
        const std::uint64_t slot = chunk.slot + i, least = table_.least_word();
        std::byte* row = chunk.rows.data() + i * header_.row_bytes;
        std::atomic_ref<std::uint64_t> word(table_.word(slot));
        for (int attempt = 0; attempt < 100; ++attempt) {
            const std::uint64_t seen = word.load(std::memory_order_acquire);
            if (seen < least || serial_of(seen) >= end) return 0;
            if (state_of(seen) == kVoid) return seen;
            if (state_of(seen) != kCommitted) return 0;
            const std::size_t used = heap_.size();
            racy_copy(row + header_.payload_offset,
                      table_.view().rows + slot * header_.row_bytes + header_.payload_offset, layout_.payload_bytes());
            bool whole = true;
            std::uint64_t final_place = 0;
            for (const Field& field : layout_.fields()) {
                if (!field.is_in_heap()) continue;
                HeapPlace place;
                std::memcpy(&place, row + field.offset, sizeof place);
                const std::uint64_t room = table_.header().regions[kHeap].bytes;
                whole = whole && place.kept_bytes <= field.full_bytes && place.offset <= room - place.kept_bytes;
                if (!whole) break;
                place.offset = put(table_.region(kHeap) + place.offset, place.kept_bytes);
                std::memcpy(row + field.offset, &place, sizeof place);
            }
            // A row that is no longer drawn may have lost its next observation; the row before takes its own from it.
            if (whole && layout_.gives_next()) whole = save_next(slot, seen, final_place) || (seen & kRetired);
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

    // The next observation of a row that has no successor in the snapshot, as a final one. False: it changed meanwhile.
    bool save_next(std::uint64_t slot, std::uint64_t word, std::uint64_t& place) {
        const std::vector<Field>& fields = layout_.fields();
        std::vector<std::byte> image(layout_.final_bytes());
        const std::uint64_t kept =
            std::atomic_ref<std::uint64_t>(table_.final_place(slot)).load(std::memory_order_acquire);
        place = 0;
        if (word & kHasFinalObservation) {
            if (kept > table_.header().regions[kHeap].bytes - image.size() || kept < sizeof(PieceHeader) || kept % 16)
                return false;
            racy_copy(image.data(), table_.region(kHeap) + kept, image.size());
            fence(std::memory_order_acquire);
            const auto* header =
                reinterpret_cast<const PieceHeader*>(table_.region(kHeap) + kept - sizeof(PieceHeader));
            const std::uint64_t owner = std::atomic_ref<std::uint64_t>(const_cast<std::uint64_t&>(header->owner))
                                            .load(std::memory_order_relaxed);
            if (owner != serial_of(word) + 1) return false;
            place = put(image.data(), image.size()) + 1;
            return true;
        }
        std::uint64_t next_word = word, next = slot;
        if (table_.successor(next, next_word)) {
            // Of the same block, and done: it is in the file as well. What else is known of it may not hold there,
            // where blocks may have been claimed anew by then.
            const std::uint64_t block = table_.block_of(next);
            if (block == table_.block_of(slot) && serial_of(next_word) < (*reach_)[block].end(table_.block_rows()))
                return true;
            // Else its observation is all that is taken of it.
            std::uint64_t at = 0;
            const std::byte* row = table_.view().rows + next * table_.header().row_bytes;
            for (const Field& field : fields) {
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
                std::memcpy(image.data() + at, &size, sizeof size);
                racy_copy(image.data() + at + sizeof size, from, value.kept_bytes);
                at += sizeof size + (value.kept_bytes + std::uint64_t{15}) / 16 * 16;
            }
            fence(std::memory_order_acquire);
            const std::uint64_t again =
                std::atomic_ref<std::uint64_t>(table_.word(next)).load(std::memory_order_acquire);
            if ((again ^ next_word) & ~kFlagMask) return false;
            place = put(image.data(), image.size()) + 1;
            return true;
        }
        if (kept >= table_.max_writers() * table_.width()) return false;
        for (std::uint64_t half = 0; half < 2; ++half) {
            std::byte* from = table_.waiting(kept, half);
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
                out += sizeof size + (size.kept_bytes + std::uint64_t{15}) / 16 * 16;
            }
            fence(std::memory_order_acquire);
            if (tag.load(std::memory_order_acquire) != serial_of(word) + 1) return false;
            place = put(image.data(), image.size()) + 1;
            return true;
        }
        return false;
    }

    // Bytes of no fixed size, one after the other; returns their place.
    std::uint64_t put(const std::byte* bytes, std::uint64_t count) {
        const std::uint64_t at = heap_.size();
        heap_.resize(at + (count + 15) / 16 * 16);
        racy_copy(heap_.data() + at, bytes, count);
        return heap_begin_ + at;
    }

    void flush_heap() {
        file_.write(header_.regions[kHeap].offset + heap_begin_, heap_.data(), heap_.size());
        heap_begin_ += heap_.size();
        heap_.clear();
    }

    // The index as it is under its lock, counters, records, and how far the writers are. Does not catch up: that would
    // alter the run.
    void take_cut() {
        if (header_.sampler) make_room_for_index();
        {
            std::optional<Table::IndexLock> lock;
            if (header_.sampler) lock.emplace(table_);
            SHARPWAVE_FAULT(save_index_locked);
            if (header_.sampler) copy_index();
            save_records(kCounters);
            cut_ = cut_of(table_);
            if (table_.given()) copy_given();
            for (RegionId id : {kWriters, kBlocks}) save_records(id);
        }
    }

    void save_records(RegionId id) {
        Records& to = records_[id == kCounters ? 0 : id == kWriters ? 1 : 2];
        to.resize(header_.regions[id].bytes);
        copy_records(to.data(), table_.region(id), to.size());
    }

    // The index as it was under its lock: 8 to 24 bytes a row, by what is counted beside the priorities. Written to the
    // file after the lock: a disk may take seconds, and no process could sample meanwhile.
    struct IndexImage {
        std::vector<std::byte> priorities;
        std::vector<std::byte> columns[std::size(kIndexColumns)];
        std::vector<float> given;
    };

    // Memory for the image, touched before the lock is taken: the kernel's zeroing takes longer than the copy.
    void make_room_for_index() {
        index_.priorities.assign(leaves_offset(table_.blocks()) + (slots_ + 15) / 16 * kLeafGroupBytes, std::byte{0});
        for (std::size_t i = 0; i < std::size(kIndexColumns); ++i) {
            const Column& column = kIndexColumns[i];
            if (header_.regions[column.region].bytes) index_.columns[i].assign(slots_ * column.row_bytes, std::byte{0});
        }
        if (table_.given()) index_.given.assign(slots_, 0);
    }

    void copy_index() {
        std::memcpy(index_.priorities.data(), table_.region(kPriorities), index_.priorities.size());
        for (std::size_t i = 0; i < std::size(kIndexColumns); ++i) {
            if (index_.columns[i].empty()) continue;
            std::memcpy(index_.columns[i].data(), table_.region(kIndexColumns[i].region), index_.columns[i].size());
        }
    }

    // Priorities that adds brought. Writers store them without the lock, before they commit the row: after the cut all
    // rows of the cut have theirs.
    void copy_given() {
        for (std::uint64_t slot = 0; slot < slots_; ++slot)
            index_.given[slot] = std::atomic_ref<float>(table_.given()[slot]).load(std::memory_order_relaxed);
    }

    void write_index() {
        const std::uint64_t head = leaves_offset(table_.blocks()), at = header_.regions[kPriorities].offset;
        file_.write(at, index_.priorities.data(), head);
        std::vector<std::byte> part;
        for (std::uint64_t slot = 0; slot < slots_;) {
            const std::uint64_t count = std::min<std::uint64_t>(slots_ - slot, 1 << 16);
            part.resize(count * 8);
            for (std::uint64_t i = 0; i < count; ++i) {
                const std::byte* leaf =
                    index_.priorities.data() + head + (slot + i) / 16 * kLeafGroupBytes + (slot + i) % 16 * 4;
                std::memcpy(part.data() + i * 8, leaf, 4);
                std::memcpy(part.data() + i * 8 + 4, leaf + kLeafGroupBytes / 2, 4);
            }
            file_.write(at + head + slot * 8, part.data(), part.size());
            slot += count;
        }
        for (std::size_t i = 0; i < std::size(kIndexColumns); ++i) {
            if (index_.columns[i].empty()) continue;
            file_.write(header_.regions[kIndexColumns[i].region].offset, index_.columns[i].data(),
                        index_.columns[i].size());
        }
        if (table_.given()) file_.write(header_.regions[kGiven].offset, index_.given.data(), slots_ * 4);
        index_ = {};
    }

    // The columns of blocks that stay in the base.
    void copy_columns_of_base() {
        std::vector<std::byte> part;
        const std::pair<RegionId, std::uint64_t> columns[] = {{kChecksums, 4}, {kWords, 8}, {kFinals, 8}};
        for (const auto& [id, bytes] : columns) {
            if (header_.regions[id].bytes == 0) continue;
            for (std::uint64_t b = 0; b < table_.blocks() && b * table_.block_rows() < slots_; ++b) {
                if (place_of_[b] != kNone) continue;
                const std::uint64_t begin = b * table_.block_rows() * bytes;
                part.resize(table_.block_length(b) * bytes);
                if (pread(base_fd_, part.data(), part.size(), static_cast<off_t>(base_->regions[id].offset + begin)) !=
                    static_cast<ssize_t>(part.size())) {
                    throw Error(ErrorKind::storage, "save(): cannot read '" + base_path_ + "'");
                }
                file_.write(header_.regions[id].offset + begin, part.data(), part.size());
            }
        }
    }

    void finish() {
        // Positions, laps and links of the cut, not those of a moment later.
        auto* writers = reinterpret_cast<WriterRecord*>(records_[1].data());
        auto* blocks = reinterpret_cast<BlockRecord*>(records_[2].data());
        const unsigned bits = static_cast<unsigned>(std::bit_width(table_.block_rows()));
        for (std::uint64_t i = 0; i < table_.max_writers(); ++i) {
            const Position at = i < cut_.positions.size() ? cut_.positions[i] : Position{kNone, 0};
            writers[i].position.store(at.ticket == kNone ? kNone : pack(at.ticket, at.head, bits));
        }
        for (std::uint64_t b = 0; b < table_.blocks(); ++b) {
            blocks[b].ticket.store(cut_.reach[b].ticket);
            blocks[b].previous_ticket.store(cut_.links[b].previous);
            blocks[b].next_ticket.store(cut_.links[b].next);
            blocks[b].linked_ticket.store(cut_.links[b].linked);
            blocks[b].changed.store(cut_.reach[b].changed);
        }
        const RegionId records[] = {kCounters, kWriters, kBlocks};
        for (int i = 0; i < 3; ++i) {
            file_.write(header_.regions[records[i]].offset, records_[i].data(), records_[i].size());
        }
        for (RegionId id : {kFields, kDescription})
            file_.write(header_.regions[id].offset, table_.region(id), header_.regions[id].bytes);
        if (header_.kind == kIncrement) {
            file_.write(header_.regions[kDirty].offset, dirty_.data(), dirty_.size() * 8);
            copy_columns_of_base();
        }
        const std::uint64_t heap_at = header_.regions[kHeap].offset;
        header_.regions[kHeap] = heap_begin_ ? Region{heap_at, heap_begin_} : Region{};
        header_.total_bytes = (heap_at + heap_begin_ + kPageBytes - 1) / kPageBytes * kPageBytes;
        file_.resize(header_.total_bytes, "save(): cannot write the snapshot");
        header_.meta_crc = meta_checksum();
        header_.header_crc = header_checksum(header_);
        file_.write(0, &header_, sizeof header_);
    }

    std::uint32_t meta_checksum() const {
        std::uint32_t crc = 0;
        std::vector<std::byte> part(kChunkBytes);
        for (RegionId id : kMetaRegions) {
            const Region& region = header_.regions[id];
            for (std::uint64_t at = 0; at < region.bytes; at += part.size()) {
                const std::uint64_t count = std::min<std::uint64_t>(part.size(), region.bytes - at);
                file_.read(region.offset + at, part.data(), count);
                crc = crc32c(crc, part.data(), count);
            }
        }
        return crc;
    }

public:
    ~Saver() {
        if (base_fd_ >= 0) ::close(base_fd_);
    }

private:
    const Table& table_;
    const RowLayout& layout_;
    NewFile file_;
    std::string base_path_;
    std::optional<Header> base_;
    int base_fd_ = -1;
    Header header_{};
    std::uint64_t slots_ = 0;
    std::vector<std::uint64_t> dirty_,
        place_of_;  // blocks in the file, and where their rows begin there; kNone: not in it
    std::vector<Reach> clean_, copied_;
    std::vector<bool> visited_;
    Cut cut_;
    const std::vector<Reach>* reach_ = nullptr;  // what the copy that is under way goes by
    Records records_[3];
    IndexImage index_;
    std::vector<std::byte> heap_;  // what is not written yet
    std::uint64_t heap_begin_ = 0, missed_ = 0;
    Outcome outcome_ = Outcome::done;
};

}  // namespace

void Table::save(const std::string& path, bool incremental) const {
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
        Saver saver(*this, base ? increment_path(path) : path, base, path, slack);
        if (base && !saver.is_small()) {
            base.reset();  // so much has changed that a whole one is as good
            --attempt;
            continue;
        }
        const Outcome outcome = saver.save(true);
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
