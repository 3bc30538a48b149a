#include "views/next_copy.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "table/codec.h"
#include "table/racy.h"

namespace sharpwave {

using namespace format;

bool NextCopy::copy(ExampleWork& work, std::size_t position, const Outputs& out) const {
    const std::uint64_t slot = work.last_slots[position], word = work.last_words[position];
    const bool is_final = work.nexts[position] == Next::final_place;
    work.bytes.resize(std::max<std::size_t>(work.bytes.size(), 2 * table_.layout().final_bytes()));
    std::byte* image = work.bytes.data();
    const std::uint64_t place =
        std::atomic_ref<std::uint64_t>(table_.final_place(slot)).load(std::memory_order_acquire);
    if (!(is_final ? read_final(place, serial_of(word), image) : read_waiting(place, serial_of(word), image)))
        return false;
    // The row must still say the same before its image is decoded.
    if ((table_.load_word(slot) ^ word) & (~kFlagMask | kHasFinalObservation)) return false;
    return decode_image(image, is_final, work.begin + position, out);
}

bool NextCopy::read_final(std::uint64_t place, std::uint64_t serial, std::byte* image) const {
    const std::uint64_t heap = table_.header().regions[kHeap].bytes, bytes = table_.layout().final_bytes();
    if (place > heap || bytes > heap - place) return false;
    racy_copy(image, table_.region(kHeap) + place, bytes);
    fence(std::memory_order_acquire);
    return values_.is_owner(place, serial);
}

bool NextCopy::read_waiting(std::uint64_t pair, std::uint64_t serial, std::byte* image) const {
    if (pair >= table_.max_writers() * table_.width()) return false;
    for (std::uint64_t half = 0; half < 2; ++half) {
        std::byte* from = table_.waiting(pair, half);
        std::atomic_ref<std::uint64_t> tag(*reinterpret_cast<std::uint64_t*>(from));
        if (tag.load(std::memory_order_acquire) != serial + 1) continue;
        racy_copy(image, from + kWaitingHead, table_.layout().final_bytes());
        fence(std::memory_order_acquire);
        if (tag.load(std::memory_order_acquire) == serial + 1) return true;
    }
    return false;
}

bool NextCopy::decode_image(const std::byte* image, bool is_final, std::size_t example, const Outputs& out) const {
    const std::vector<Field>& fields = table_.layout().fields();
    const std::uint64_t image_bytes = table_.layout().final_bytes();
    std::uint64_t at = 0;
    for (std::size_t f = 0; f < fields.size(); ++f) {
        const Field& field = fields[f];
        if (!field.gives_next) continue;
        FinalValue value;
        if (at + sizeof value > image_bytes) return false;
        std::memcpy(&value, image + at, sizeof value);
        at += sizeof value;
        if (value.kept_bytes > image_bytes - at || value.value_bytes > field.full_bytes) return false;
        for (std::size_t i = 0; i < config_.leaves.size(); ++i) {
            const ViewLeaf& leaf = config_.leaves[i];
            if (leaf.role != Role::next || leaf.field != f) continue;
            std::byte* to = out.flats[i] + (example * field.stack + field.stack - 1) * field.full_bytes;
            if (!decode(image + at, value.kept_bytes, to, value.value_bytes)) return false;
            std::int64_t* length = out.lengths && out.lengths[i] ? out.lengths[i] + example : nullptr;
            if (!ValueCopy::finish(field, to, value.value_bytes, length)) return false;
        }
        const std::uint64_t room = is_final ? value.kept_bytes : field.full_bytes;
        at += (room + 15) / 16 * 16;
    }
    return true;
}

}  // namespace sharpwave
