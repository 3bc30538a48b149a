#include "table/cut.h"

#include <atomic>
#include <unordered_set>

namespace sharpwave {

using namespace format;

Cut cut_of(const Table& table) {
    // Positions first, with the tickets given out until then: rows that come afterwards are after the cut, also whole
    // blocks of them.
    const auto tickets = [&] { return table.counters().next_ticket.value.load(std::memory_order_acquire); };
    const std::uint64_t used = table.counters().writers_used.value.load(std::memory_order_acquire);
    Cut cut{std::vector<Reach>(table.blocks()), std::vector<Links>(table.blocks()), {}};
    std::uint64_t next = tickets();
    for (int tries = 0; tries < 1000; ++tries) {
        cut.positions.clear();
        for (std::uint64_t i = 0; i < used; ++i) cut.positions.push_back(table.position(i));
        const std::uint64_t again = tickets();
        if (again == next) break;
        next = again;
    }
    std::vector<Reach>& reach = cut.reach;
    for (std::uint64_t b = 0; b < table.blocks(); ++b) {
        const BlockRecord& block = table.block_record(b);
        reach[b].changed = block.changed.load(std::memory_order_acquire);
        reach[b].ticket = block.ticket.load(std::memory_order_acquire);
        if (reach[b].ticket == kNone) continue;
        reach[b].head = table.block_length(b);
        if (block.owner.load(std::memory_order_acquire) != 0) {
            // Held by the writer of this lap, or already by the writer of the next one: the last row tells which.
            const std::uint64_t end = reach[b].end(table.block_rows()) - 1;
            const std::uint64_t slot = b * table.block_rows() + reach[b].head - 1;
            const std::uint64_t seen = std::atomic_ref<std::uint64_t>(table.word(slot)).load(std::memory_order_acquire);
            const bool is_done = serial_of(seen) > end || (serial_of(seen) == end && state_of(seen) != kWriting);
            if (!is_done) reach[b].head = 0;
        }
        // The link back is written before the ticket that it is for: one that leads forward is the next lap's.
        const std::uint64_t before = block.previous_ticket.load();
        cut.links[b] = {before < reach[b].ticket ? before : kNone, block.next_ticket.load(),
                        block.linked_ticket.load()};
    }
    std::unordered_set<std::uint64_t> newest;
    for (const Position& position : cut.positions) newest.insert(position.ticket);
    for (std::uint64_t b = 0; b < table.blocks(); ++b) {
        const std::uint64_t ticket = reach[b].ticket, before = cut.links[b].previous;
        if (ticket == kNone || newest.count(ticket)) continue;
        bool is_since = ticket >= next;
        if (!is_since && before != kNone && newest.count(before)) {
            // It goes on from where a writer stood: believed only where the other block says the same.
            const BlockRecord& from = table.block_record(before % table.blocks());
            is_since = from.next_ticket.load() == ticket || from.ticket.load() != before;
        }
        if (is_since) reach[b].head = 0;
    }
    for (const Position& position : cut.positions) {
        if (position.ticket == kNone) continue;
        Reach& block = reach[position.ticket % table.blocks()];
        if (block.ticket == position.ticket) block.head = position.head;
    }
    return cut;
}

}  // namespace sharpwave
