#include "schema/schema.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"
#include "base/wide.h"

namespace sharpwave {
namespace {

// A row of this size is a mistake in a shape; the bound also keeps products of sizes inside 64 bits.
constexpr std::uint64_t kMaxRowBytes = std::uint64_t{1} << 40;
constexpr std::uint64_t kMaxHeapValue = std::uint64_t{1} << 31;
constexpr std::uint32_t kMaxStack = 256;
// Fields from here on stand at multiples of 16 bytes, as rows that have one do: so that a copy, by a GPU over its bus
// above all, reads whole words. Of such a row the padding is a hundredth at most.
constexpr std::uint64_t kLargeField = 1024;
constexpr std::uint64_t kLargeAlignment = 16;

std::uint64_t checked_bytes(const Field& field) {
    Wide total = field.item_bytes;
    for (std::int64_t extent : field.shape) {
        if (extent <= 0) throw Error(ErrorKind::schema, "field '" + field.name + "': shape holds no items");
        total *= static_cast<std::uint64_t>(extent);
        if (total > kMaxRowBytes) throw Error(ErrorKind::schema, "field '" + field.name + "': more than 1 TiB a row");
    }
    return static_cast<std::uint64_t>(total);
}

std::uint64_t alignment(const Field& field) {
    if (field.is_in_heap()) return 8;
    const std::uint64_t lowest_bit = field.item_bytes & (~field.item_bytes + 1);
    return std::min<std::uint64_t>(lowest_bit, 8);
}

}  // namespace

RowLayout::RowLayout(std::vector<Field> fields) : fields_(std::move(fields)) {
    if (fields_.empty()) throw Error(ErrorKind::schema, "a row needs at least one field");
    std::uint64_t total = 0, apart = 0;  // bytes of all fields, and of those that do not stand in the row
    for (Field& field : fields_) {
        if (field.item_bytes == 0) throw Error(ErrorKind::schema, "field '" + field.name + "': item size is 0");
        field.full_bytes = checked_bytes(field);
        if (field.is_in_heap() && field.full_bytes >= kMaxHeapValue) {
            throw Error(ErrorKind::schema,
                        "field '" + field.name + "': more than 2 GiB cannot be compressed or ragged");
        }
        if (field.is_ragged && (field.shape.empty() || field.stack > 1)) {
            throw Error(ErrorKind::schema, "field '" + field.name + "': ragged needs a first axis and no stack");
        }
        if (field.stack == 0 || field.stack > kMaxStack) {
            throw Error(ErrorKind::schema, "field '" + field.name + "': stack: expected 1 to 256");
        }
        if (field.is_mutable && (field.is_in_heap() || field.stack > 1 || field.gives_next)) {
            throw Error(ErrorKind::schema, "field '" + field.name + "': only a plain field can be mutable");
        }
        field.bytes = field.is_in_heap() ? sizeof(HeapPlace) : field.full_bytes;
        const std::uint64_t rounded = (field.full_bytes + 15) / 16 * 16;
        if (field.is_in_heap()) heap_row_bytes_ += 16 + rounded;
        if (field.gives_next) final_bytes_ += 16 + rounded;
        gives_next_ = gives_next_ || field.gives_next;
        stack_ = std::max(stack_, field.stack);
        total += field.bytes;
        if (total > kMaxRowBytes) throw Error(ErrorKind::schema, "more than 1 TiB a row");
        if (field.is_mutable) apart += field.bytes;
    }
    total -= apart;
    if (total == 0) throw Error(ErrorKind::schema, "a row needs at least one field that is not mutable");
    embedded_ = total < kEmbeddedBelow;

    std::vector<std::size_t> order(fields_.size());
    std::iota(order.begin(), order.end(), 0);
    // Small fields stand near the word: who follows an episode from row to row reads one line of each.
    const auto is_large = [&](std::size_t i) { return fields_[i].bytes >= kLargeField; };
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
        if (is_large(a) != is_large(b)) return is_large(b);
        const std::uint64_t first = alignment(fields_[a]), second = alignment(fields_[b]);
        return first != second ? first > second : fields_[a].bytes < fields_[b].bytes;
    });
    const auto round_up = [](std::uint64_t bytes, std::uint64_t to) { return (bytes + to - 1) / to * to; };
    for (std::size_t i : order) {
        if (!fields_[i].is_mutable) continue;
        fields_[i].offset = mutable_bytes_;
        mutable_bytes_ += fields_[i].bytes;
    }
    mutable_bytes_ = round_up(mutable_bytes_, 8);
    std::erase_if(order, [&](std::size_t i) { return fields_[i].is_mutable; });
    std::uint64_t offset = payload_offset();
    for (std::size_t i : order) {
        if (is_large(i)) offset = round_up(offset, kLargeAlignment);
        fields_[i].offset = offset;
        offset += fields_[i].bytes;
    }
    payload_bytes_ = offset - payload_offset();
    stride_ = round_up(offset, is_large(order.back()) ? kLargeAlignment : 8);
}

}  // namespace sharpwave
