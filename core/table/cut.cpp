#include "table/cut.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

namespace sharpwave {

using namespace format;

Cut cut_of(const Table& table) {
    // Positions first: rows that come afterwards are after the cut, also whole blocks of them.
    const std::uint64_t next = table.counters().next_ticket.value.load(std::memory_order_acquire);
    const std::uint64_t used = table.counters().writers_used.value.load(std::memory_order_acquire);
    Cut cut{std::vector<Reach>(table.blocks()), {}};
    for (std::uint64_t i = 0; i < used; ++i) cut.positions.push_back(table.position(i));
    std::vector<Reach>& reach = cut.reach;
    std::vector<std::pair<std::uint64_t, std::uint64_t>> links;  // ticket and the same writer's ticket before
    for (std::uint64_t b = 0; b < table.blocks(); ++b) {
        const BlockRecord& block = table.block_record(b);
        reach[b].changed = block.changed.load(std::memory_order_acquire);
        reach[b].ticket = block.ticket.load(std::memory_order_acquire);
        reach[b].head = block.owner.load(std::memory_order_acquire) != 0 ? 0 : table.block_length(b);
        if (reach[b].ticket != kNone) links.emplace_back(reach[b].ticket, block.previous_ticket.load());
    }
    // A block that goes on from where a writer stood was claimed since.
    std::sort(links.begin(), links.end());
    std::unordered_set<std::uint64_t> newest;
    for (const Position& position : cut.positions) newest.insert(position.ticket);
    for (const auto& [ticket, before] : links) {
        if (newest.count(ticket) || (ticket < next && (before == kNone || !newest.count(before)))) continue;
        reach[ticket % table.blocks()].head = 0;
        newest.insert(ticket);
    }
    for (const Position& position : cut.positions) {
        if (position.ticket == kNone) continue;
        Reach& block = reach[position.ticket % table.blocks()];
        if (block.ticket == position.ticket) block.head = position.head;
    }
    return cut;
}

}  // namespace sharpwave
