#include "sampling/starts.h"

#include <algorithm>
#include <bit>

namespace sharpwave {

using namespace format;

EpisodePlace Starts::place(std::uint64_t slot) const {
    auto* bits = reinterpret_cast<std::uint64_t*>(places_ + slot);
    return std::bit_cast<EpisodePlace>(std::atomic_ref<std::uint64_t>(*bits).load(std::memory_order_relaxed));
}

void Starts::set_place(std::uint64_t slot, EpisodePlace place) {
    auto* bits = reinterpret_cast<std::uint64_t*>(places_ + slot);
    std::atomic_ref<std::uint64_t>(*bits).store(std::bit_cast<std::uint64_t>(place), std::memory_order_relaxed);
}

void Starts::number(std::uint64_t slot, std::uint64_t word, const std::uint64_t* cursors) {
    const std::uint64_t width = table_.width();
    const std::uint32_t own = state_of(word) == kVoid ? 0 : 1;  // what it adds itself
    std::uint64_t before = slot, seen = word;
    bool gone;
    std::uint32_t step = 0;
    if (table_.predecessor(before, seen, gone, rule_.across)) {
        step = place(before).step + own;
    } else if (gone) {
        // The row before was written over since the last look, but what stands there has not been numbered yet; or it
        // is a step that the env was masked out of, which knows what came before it.
        const std::uint64_t block = table_.block_of(slot), offset = slot - block * table_.block_rows();
        std::uint64_t serial = kNone;
        if (offset >= width) {
            serial = serial_of(word) - width;
        } else {
            const std::uint64_t ticket = table_.block_record(block).previous_ticket.load(std::memory_order_acquire);
            if (ticket != kNone) {
                const std::uint64_t length = table_.block_length(ticket % table_.blocks());
                serial = ticket * table_.block_rows() + length - width + offset % width;
            }
        }
        before = serial == kNone ? 0 : table_.slot_of(serial);
        if (serial != kNone && before < table_.header().slots) {
            const std::uint64_t there = std::atomic_ref<std::uint64_t>(table_.word(before)).load();
            const bool is_same = serial_of(there) == serial;
            const bool is_lost = is_same && state_of(there) == kEmpty;  // then a new run begins behind it
            const bool is_numbered = is_same || serial < cursors[table_.block_of(before)];
            if (is_numbered && !is_lost) step = place(before).step + own;
        }
    }
    set_place(slot, {step, kOpen});
}

bool Starts::is_on_grid(std::uint64_t slot, std::uint64_t word) const {
    if (rule_.stride == 1) return true;
    const std::uint64_t step = rule_.across ? serial_of(word) / table_.width() : place(slot).step;
    return step % rule_.stride == 0;
}

// Whether a slot holds a live row of that serial.
bool Starts::is_row(std::uint64_t slot, std::uint64_t serial, std::uint64_t& word) const {
    word = std::atomic_ref<std::uint64_t>(table_.word(slot)).load(std::memory_order_acquire);
    return serial_of(word) == serial && is_live(word, table_.least_word());
}

// Rows back in the same episode (or stream). Mostly the block holds them all: one look at where both stand tells that
// nothing lies between that should not.
bool Starts::back(std::uint64_t& slot, std::uint64_t& word, std::uint64_t count) const {
    const std::uint64_t width = table_.width();
    while (count > 0) {
        const std::uint64_t offset = slot - table_.block_of(slot) * table_.block_rows();
        const std::uint64_t jump = std::min(count, offset / width);
        std::uint64_t seen;
        if (jump > 1 && is_row(slot - jump * width, serial_of(word) - jump * width, seen) &&
            place(slot - jump * width).step + jump == place(slot).step) {
            slot -= jump * width;
            word = seen;
            count -= jump;
            continue;
        }
        bool gone;
        if (!table_.predecessor(slot, word, gone, rule_.across) || !is_live(word, table_.least_word())) return false;
        --count;
    }
    return true;
}

bool Starts::move(std::uint64_t& slot, std::uint64_t& word, std::int64_t offset) const {
    if (offset < 0) return back(slot, word, static_cast<std::uint64_t>(-offset));
    const std::uint64_t width = table_.width();
    for (auto count = static_cast<std::uint64_t>(offset); count > 0;) {
        const std::uint64_t jump = std::min(count, (table_.rows_left(slot) - 1) / width);
        std::uint64_t seen;
        if (jump > 1 && is_row(slot + jump * width, serial_of(word) + jump * width, seen) &&
            place(slot).step + jump == place(slot + jump * width).step &&
            place(slot).left == place(slot + jump * width).left + jump) {
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

std::vector<std::uint64_t> Starts::episode(std::uint64_t slot, std::uint64_t word) const {
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

// The row is the last of its episode.
void Starts::end(std::uint64_t slot, std::uint64_t word, std::vector<std::uint64_t>& legal) {
    if (rule_.needs == StartRule::Needs::rows) {
        // Too short for a whole window: its first row gives one nevertheless.
        const std::uint64_t step = place(slot).step;
        if (step + 1 < rule_.length && back(slot, word, step) && (word & kEpisodeStart)) legal.push_back(slot);
        return;
    }
    if (rule_.needs != StartRule::Needs::end || place(slot).left != kOpen) return;
    const std::uint64_t least = table_.least_word();
    bool gone;
    for (std::uint32_t left = 0; is_live(word, least); ++left) {
        set_place(slot, {place(slot).step, left});
        if (is_on_grid(slot, word)) legal.push_back(slot);
        if (!table_.predecessor(slot, word, gone)) break;
    }
}

void Starts::arrive(std::uint64_t slot, std::uint64_t word, std::vector<std::uint64_t>& legal, bool again) {
    std::uint64_t before = slot, seen = word;
    bool gone;
    switch (rule_.needs) {
        case StartRule::Needs::nothing:
            if (is_on_grid(slot, word)) legal.push_back(slot);
            return;
        case StartRule::Needs::rows:
            if (back(before, seen, rule_.length - 1) && is_on_grid(before, seen)) legal.push_back(before);
            if (rule_.across) return;
            break;
        case StartRule::Needs::end:
            if (again && place(slot).left != kOpen) legal.push_back(slot);
            break;
    }
    if (word & kEndMask) end(slot, word, legal);
    // A start says that the row before it was an end, told or not.
    before = slot, seen = word;
    if ((word & kEpisodeStart) && table_.predecessor(before, seen, gone, true)) end(before, seen, legal);
}

}  // namespace sharpwave
