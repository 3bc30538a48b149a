#include "table/index_image.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace sharpwave {

using namespace format;

void IndexImage::make_room() {
    if (!header_.sampler) return;
    priorities_.assign(leaves_offset(table_.blocks()) + (header_.saved_slots + 15) / 16 * kLeafGroupBytes,
                       std::byte{0});
    for (std::size_t i = 0; i < std::size(kIndexColumns); ++i) {
        const Column& column = kIndexColumns[i];
        if (header_.regions[column.region].bytes)
            columns_[i].assign(header_.saved_slots * column.row_bytes, std::byte{0});
    }
    if (table_.given()) given_.assign(header_.saved_slots, 0);
}

void IndexImage::copy() {
    if (!header_.sampler) return;
    std::memcpy(priorities_.data(), table_.region(kPriorities), priorities_.size());
    for (std::size_t i = 0; i < std::size(kIndexColumns); ++i) {
        if (columns_[i].empty()) continue;
        std::memcpy(columns_[i].data(), table_.region(kIndexColumns[i].region), columns_[i].size());
    }
}

void IndexImage::copy_given() {
    if (!table_.given()) return;
    for (std::uint64_t slot = 0; slot < header_.saved_slots; ++slot)
        given_[slot] = std::atomic_ref<float>(table_.given()[slot]).load(std::memory_order_relaxed);
}

void IndexImage::write(NewFile& file) {
    if (!header_.sampler) return;
    const std::uint64_t head = leaves_offset(table_.blocks()), at = header_.regions[kPriorities].offset;
    file.write(at, priorities_.data(), head);
    std::vector<std::byte> part;
    for (std::uint64_t slot = 0; slot < header_.saved_slots;) {
        const std::uint64_t count = std::min<std::uint64_t>(header_.saved_slots - slot, 1 << 16);
        part.resize(count * 8);
        for (std::uint64_t i = 0; i < count; ++i) {
            const std::byte* leaf = priorities_.data() + head + (slot + i) / 16 * kLeafGroupBytes + (slot + i) % 16 * 4;
            std::memcpy(part.data() + i * 8, leaf, 4);
            std::memcpy(part.data() + i * 8 + 4, leaf + kLeafGroupBytes / 2, 4);
        }
        file.write(at + head + slot * 8, part.data(), part.size());
        slot += count;
    }
    for (std::size_t i = 0; i < std::size(kIndexColumns); ++i) {
        if (columns_[i].empty()) continue;
        file.write(header_.regions[kIndexColumns[i].region].offset, columns_[i].data(), columns_[i].size());
    }
    if (table_.given()) file.write(header_.regions[kGiven].offset, given_.data(), header_.saved_slots * 4);
    priorities_ = {};
    for (std::vector<std::byte>& column : columns_) column = {};
    given_ = {};
}

}  // namespace sharpwave
