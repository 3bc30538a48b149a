#include "sampling/waiting_rows.h"

#include <algorithm>

#include "sampling/ranks.h"

namespace sharpwave {

using namespace format;

// Rows that waited and may be drawn now. Those that were let in before, and those consumed since, stay as they are.
void WaitingRows::let_in(bool again) {
    float last = -1, last_mass = 0;  // mostly all have the same
    for (std::uint64_t slot : legal_) {
        const float stored = masses_.tree.stored(slot);
        if (!is_waiting(stored)) continue;
        const float priority = priority_of_waiting(stored);
        if (priority != last) {
            last = priority;
            last_mass = masses_.mass_of(priority);
        }
        // Where everything is made anew, a row that was in before has its rank still.
        const bool has_rank = again && masses_.config.rank_based && masses_.head->ranked && masses_.tree.mass(slot) > 0;
        masses_.set_leaf(slot, priority, has_rank ? masses_.tree.mass(slot) : last_mass);
        masses_.changed.push_back(slot);
    }
}

void WaitingRows::share_episode(std::uint64_t slot) {
    const std::uint64_t word = masses_.table.load_word(slot);
    if (!is_live(word, masses_.table.least_word())) return;
    std::vector<std::uint64_t> rows = starts_.places().episode(slot, word);
    std::erase_if(rows, [&](std::uint64_t row) { return !is_row(masses_.tree.stored(row)); });
    const float share = 1 / static_cast<float>(rows.size());
    for (std::uint64_t row : rows) {
        if (masses_.tree.stored(row) == stored_priority(share)) continue;
        masses_.set_leaf(row, share, masses_.mass_of(share));
        masses_.changed.push_back(row);
    }
}

void WaitingRows::share_changed() {
    if (!masses_.config.starts.per_episode) return;
    const std::vector<std::uint64_t> slots = masses_.changed;
    for (std::uint64_t slot : slots) share_episode(slot);
}

void WaitingRows::number(std::vector<std::uint64_t>& words) {
    const std::uint64_t least = masses_.table.least_word();
    legal_.clear();
    if (!std::is_sorted(words.begin(), words.end())) std::sort(words.begin(), words.end());
    std::uint64_t slot = 0, next = kNone;
    for (std::uint64_t word : words) {
        const std::uint64_t serial = serial_of(word);
        // Mostly the one after the last, which needs no division.
        slot = serial == next && slot + 1 < masses_.tree.leaf_count ? slot + 1 : masses_.table.slot_of(serial);
        next = serial + 1;
        starts_.number(slot, word, masses_.cursors);
        if (is_live(word, least)) starts_.arrive(slot, word, legal_, false);
    }
    let_in(false);
}

// The newest row of an env that the index knows of a block, `known` rows from its start on. `is_gone`: it was written
// over, and so was what came before it. False: the env was masked out of all of them.
bool WaitingRows::newest_known(std::uint64_t block, std::uint64_t first, std::uint64_t known, std::uint64_t env,
                               std::uint64_t& slot, std::uint64_t& word, bool& is_gone) const {
    const std::uint64_t width = masses_.table.width(), base = block * masses_.table.block_rows();
    is_gone = false;
    for (std::uint64_t step = known / width; step > 0;) {
        const std::uint64_t offset = --step * width + env;
        slot = base + offset;
        word = masses_.table.load_word(slot);
        is_gone = serial_of(word) != first + offset;
        if (is_gone || state_of(word) == kCommitted) return true;
    }
    return false;
}

bool WaitingRows::take_late_ends() {
    const Table& table = masses_.table;
    const std::uint64_t used = table.counters().writers_used.value.load(std::memory_order_acquire);
    const std::uint64_t width = table.width(), least = table.least_word();
    std::vector<std::uint64_t> last_rows;
    legal_.clear();
    for (std::uint64_t i = 0; i < used; ++i) {
        const std::uint64_t ticket = table.writer_record(i).indexed_ticket;
        const std::uint64_t block = ticket % table.blocks(), first = ticket * table.block_rows();
        const std::uint64_t known = masses_.cursors[block] > first ? masses_.cursors[block] - first : 0;
        if (known == 0 || known > table.block_length(block)) continue;
        for (std::uint64_t env = 0; env < width; ++env) {
            std::uint64_t slot = 0, word = 0;
            bool is_gone = false;
            if (!newest_known(block, first, known, env, slot, word, is_gone)) return false;
            if (is_gone || !(word & kEndMask) || !is_live(word, least)) continue;
            starts_.arrive(slot, word, legal_, false);
            last_rows.push_back(slot);
        }
    }
    masses_.changed.clear();
    let_in(false);
    for (std::uint64_t slot : last_rows) {
        if (masses_.config.starts.per_episode) share_episode(slot);
    }
    masses_.refresh_changed();
    return true;
}

void WaitingRows::rebuild() {
    const std::uint64_t least = masses_.table.least_word();
    std::vector<std::uint64_t> last_rows;
    legal_.clear();
    for (std::uint64_t slot = 0; slot < masses_.tree.leaf_count; ++slot) {
        std::uint64_t word = masses_.table.load_word(slot);
        if (!is_live(word, least) || serial_of(word) >= masses_.cursors[masses_.table.block_of(slot)]) continue;
        starts_.arrive(slot, word, legal_, true);
        std::uint64_t next = slot;
        if (masses_.config.starts.per_episode && !masses_.table.successor(next, word)) last_rows.push_back(slot);
    }
    masses_.changed.clear();
    masses_.head->massless = 0;
    let_in(true);
    for (std::uint64_t slot = 0; slot < masses_.tree.leaf_count; ++slot) {
        if (!is_row(masses_.tree.stored(slot))) masses_.tree.mass(slot) = 0;
    }
    for (std::uint64_t slot : last_rows) share_episode(slot);
    if (Ranks ranks(masses_); masses_.config.rank_based && !ranks.are_kept()) return ranks.make();
    masses_.refresh_all();
}

}  // namespace sharpwave
