#include "table/episode_places.h"

#include <algorithm>
#include <atomic>

namespace sharpwave {

using namespace format;

namespace {

// So many steps of `width` rows, or as many as fit into these rows. Mostly all do: no division.
std::uint64_t steps_within(std::uint64_t count, std::uint64_t rows, std::uint64_t width) {
    return count <= rows && count * width <= rows ? count : std::min(count, rows / width);
}

}  // namespace

// Whether a slot holds a live row of that serial.
bool EpisodePlaces::is_row(std::uint64_t slot, std::uint64_t serial, std::uint64_t& word) const {
    word = std::atomic_ref<std::uint64_t>(table_.word(slot)).load(std::memory_order_acquire);
    return serial_of(word) == serial && is_live(word, table_.least_word());
}

// Rows back in the same episode (or stream). Mostly the block holds them all: one look at where both stand tells that
// nothing lies between that should not.
bool EpisodePlaces::back(std::uint64_t& slot, std::uint64_t& word, std::uint64_t count) const {
    const std::uint64_t width = table_.width();
    while (count > 0) {
        const std::uint64_t offset = slot - table_.block_of(slot) * table_.block_rows();
        const std::uint64_t jump = steps_within(count, offset, width);
        std::uint64_t seen;
        if (jump > 1 && is_row(slot - jump * width, serial_of(word) - jump * width, seen) &&
            at(slot - jump * width).step + jump == at(slot).step) {
            slot -= jump * width;
            word = seen;
            count -= jump;
            continue;
        }
        bool gone;
        if (!table_.predecessor(slot, word, gone, across_) || !is_live(word, table_.least_word())) return false;
        --count;
    }
    return true;
}

bool EpisodePlaces::move(std::uint64_t& slot, std::uint64_t& word, std::int64_t offset) const {
    if (offset < 0) return back(slot, word, static_cast<std::uint64_t>(-offset));
    const std::uint64_t width = table_.width();
    for (auto count = static_cast<std::uint64_t>(offset); count > 0;) {
        const std::uint64_t jump = steps_within(count, table_.rows_left(slot) - 1, width);
        std::uint64_t seen;
        if (jump > 1 && is_row(slot + jump * width, serial_of(word) + jump * width, seen) &&
            at(slot).step + jump == at(slot + jump * width).step &&
            at(slot).left == at(slot + jump * width).left + jump) {
            slot += jump * width;
            word = seen;
            count -= jump;
            continue;
        }
        if (!table_.successor(slot, word)) return false;
        --count;
    }
    return true;
}

std::vector<std::uint64_t> EpisodePlaces::episode(std::uint64_t slot, std::uint64_t word) const {
    std::vector<std::uint64_t> rows;
    const std::uint64_t least = table_.least_word();
    std::uint64_t at = slot, seen = word;
    for (bool gone; is_live(seen, least);) {
        rows.push_back(at);
        if (!table_.predecessor(at, seen, gone)) break;
    }
    std::reverse(rows.begin(), rows.end());
    while (table_.successor(slot, word)) rows.push_back(slot);
    return rows;
}

}  // namespace sharpwave
