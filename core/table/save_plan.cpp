#include "table/save_plan.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "base/error.h"
#include "table/geometry.h"
#include "table/save_pipe.h"

namespace sharpwave {

using namespace format;

SavePlan::SavePlan(const Table& table, const std::optional<Header>& base, const std::string& base_path,
                   std::uint64_t slack)
    : table_(table), base_path_(base_path) {
    slots = std::min(table.visible_slots() + slack, table.header().slots);
    place_of.assign(table.blocks(), kNone);
    clean.assign(table.blocks(), Reach{});
    if (base) read_base(*base);
    choose_blocks(base.has_value(), slack);
    place_regions(base);
}

SavePlan::~SavePlan() {
    if (base_fd_ >= 0) ::close(base_fd_);
}

void SavePlan::choose_blocks(bool has_base, std::uint64_t slack) {
    const std::uint64_t blocks = table_.blocks();
    const std::uint64_t soon = table_.counters().next_ticket.value.load(std::memory_order_acquire);
    const std::vector<Reach> reach = cut_of(table_).reach;
    const std::uint64_t ahead = slack / table_.block_rows() + 2;  // blocks that will be claimed soon
    for (std::uint64_t b = 0; b < blocks && b * table_.block_rows() < slots; ++b) {
        const bool comes_soon = (b + blocks - soon % blocks) % blocks < ahead && slack;
        const bool is_held = table_.block_record(b).owner.load(std::memory_order_acquire) != 0;
        if (has_base && clean[b] == reach[b] && reach[b].ticket != kNone && !is_held && !comes_soon) continue;
        place_of[b] = rows_;
        rows_ += std::min(table_.block_length(b), slots - b * table_.block_rows());
        dirty.push_back(b);
    }
}

void SavePlan::place_regions(const std::optional<Header>& base) {
    header = table_.header();
    header.kind = base ? kIncrement : kSnapshot;
    header.base_crc = base ? base->header_crc : 0;
    header.saved_slots = slots;
    header.has_checksums = 1;
    std::uint64_t at = kPageBytes;
    const auto place = [&](RegionId id, std::uint64_t bytes) {
        at = (at + 63) / 64 * 64;
        header.regions[id] = bytes ? Region{at, bytes} : Region{};
        at += bytes;
    };
    for (RegionId id : {kRuntime, kTree, kWaiting, kTimes, kSelectors}) header.regions[id] = {};
    for (RegionId id : {kCounters, kWriters, kBlocks, kFields, kDescription}) place(id, header.regions[id].bytes);
    place(kDirty, base ? dirty.size() * 8 : 0);
    place(kChecksums, slots * 4);
    place(kWords, header.word_is_embedded ? 0 : slots * 8);
    place(kPriorities, header.sampler ? saved_priorities_bytes(table_.blocks(), slots) : 0);
    place(kGiven, header.sampler == 1 ? slots * 4 : 0);
    place(kEpisodes, header.columns & kEpisodesColumn ? slots * sizeof(EpisodePlace) : 0);
    place(kReads, header.columns & kReadsColumn ? slots * 4 : 0);
    place(kFinals, header.waiting_bytes ? slots * 8 : 0);
    if (rows_ * header.row_bytes >= 16 * kPieceBytes) at = (at + kPieceBytes - 1) / kPieceBytes * kPieceBytes;
    place(kRows, rows_ * header.row_bytes);
    place(kMutables, rows_ * table_.layout().mutable_bytes());
    place(kHeap, 1);  // grows as it fills
    header.total_bytes = at;
}

// What the base holds of each block, and its columns for the blocks that stay as they are.
void SavePlan::read_base(const Header& base) {
    base_fd_ = open(base_path_.c_str(), O_RDONLY | O_CLOEXEC);
    if (base_fd_ < 0) return;
    std::vector<BlockRecord> blocks(table_.blocks());
    RecordBytes writers(table_.max_writers() * sizeof(WriterRecord));
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
        clean[b] = {blocks[b].ticket.load(), table_.block_length(b), blocks[b].changed.load()};
    }
    for (std::uint64_t i = 0; i < table_.max_writers(); ++i) {
        const auto& record = *reinterpret_cast<const WriterRecord*>(writers.data() + i * sizeof(WriterRecord));
        const Position at = unpack(record.position.load(), bits);
        if (at.ticket == kNone) continue;
        Reach& block = clean[at.ticket % table_.blocks()];
        if (block.ticket == at.ticket) block.head = at.head;
    }
}

bool SavePlan::is_outgrown(const Cut& cut) const {
    for (std::uint64_t b = 0; b < table_.blocks(); ++b) {
        const std::uint64_t filled = cut.reach[b].ticket == kNone ? 0 : cut.reach[b].head;
        if (filled && b * table_.block_rows() + filled > slots) return true;
    }
    return false;
}

void SavePlan::copy_columns_of_base(NewFile& file) const {
    std::vector<std::byte> part;
    const std::pair<RegionId, std::uint64_t> columns[] = {{kChecksums, 4}, {kWords, 8}, {kFinals, 8}};
    for (const auto& [id, bytes] : columns) {
        if (header.regions[id].bytes == 0) continue;
        for (std::uint64_t b = 0; b < table_.blocks() && b * table_.block_rows() < slots; ++b) {
            if (place_of[b] != kNone) continue;
            const std::uint64_t begin = b * table_.block_rows() * bytes;
            part.resize(table_.block_length(b) * bytes);
            if (pread(base_fd_, part.data(), part.size(), static_cast<off_t>(base_->regions[id].offset + begin)) !=
                static_cast<ssize_t>(part.size())) {
                throw Error(ErrorKind::storage, "save(): cannot read '" + base_path_ + "'");
            }
            file.write(header.regions[id].offset + begin, part.data(), part.size());
        }
    }
}

}  // namespace sharpwave
