#include "sampling/starts.h"

#include <atomic>

namespace sharpwave {

using namespace format;

void Starts::number(std::uint64_t slot, std::uint64_t word, const std::uint64_t* cursors) {
    const std::uint64_t width = table_.width();
    const std::uint32_t own = state_of(word) == kVoid ? 0 : 1;  // what it adds itself
    std::uint64_t before = slot, seen = word;
    bool gone;
    std::uint32_t step = 0;
    if (table_.predecessor(before, seen, gone, rule_.across)) {
        step = places_.at(before).step + own;
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
            if (is_numbered && !is_lost) step = places_.at(before).step + own;
        }
    }
    places_.set(slot, {step, EpisodePlaces::kOpen});
}

bool Starts::is_on_grid(std::uint64_t slot, std::uint64_t word) const {
    if (rule_.first_rows) return (word & kEpisodeStart) != 0;
    if (rule_.stride == 1) return true;
    const std::uint64_t step = rule_.across ? serial_of(word) / table_.width() : places_.at(slot).step;
    return step % rule_.stride == 0;
}

// The row is the last of its episode.
void Starts::end(std::uint64_t slot, std::uint64_t word, std::vector<std::uint64_t>& legal) {
    if (rule_.needs == StartRule::Needs::rows) {
        // Too short for a whole window: its first row gives one nevertheless.
        const std::uint64_t step = places_.at(slot).step;
        if (step + 1 < rule_.length && places_.back(slot, word, step) && (word & kEpisodeStart)) legal.push_back(slot);
        return;
    }
    if (rule_.needs != StartRule::Needs::end || places_.at(slot).left != EpisodePlaces::kOpen) return;
    const std::uint64_t least = table_.least_word();
    bool gone;
    for (std::uint32_t left = 0; is_live(word, least); ++left) {
        places_.set(slot, {places_.at(slot).step, left});
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
            if (places_.back(before, seen, rule_.length - 1) && is_on_grid(before, seen)) legal.push_back(before);
            if (rule_.across) return;
            break;
        case StartRule::Needs::end:
            if (again && places_.at(slot).left != EpisodePlaces::kOpen) legal.push_back(slot);
            break;
    }
    if (word & kEndMask) end(slot, word, legal);
    // A start says that the row before it was an end, told or not.
    before = slot, seen = word;
    if ((word & kEpisodeStart) && table_.predecessor(before, seen, gone, true)) end(before, seen, legal);
}

}  // namespace sharpwave
