#include "table/block_claim.h"

#include <algorithm>

#include "base/error.h"
#include "base/fault.h"

namespace sharpwave {

using namespace format;

void BlockClaim::enter(std::uint64_t ticket, std::uint64_t head) {
    at_.ticket = ticket;
    at_.block = ticket % at_.table.blocks();
    at_.head = head;
    at_.length = at_.table.block_length(at_.block);
    if (at_.table.header().block_heap_bytes) at_.heap = BlockHeap(at_.table, at_.block);
}

void BlockClaim::let_go() {
    if (at_.length == 0) return;
    std::uint32_t mine = at_.owner;
    at_.table.block_record(at_.block).owner.compare_exchange_strong(mine, 0, std::memory_order_acq_rel);
}

void BlockClaim::resume() {
    // Writers that live for one episode must not leave the ring full of old tails.
    const Position position = at_.table.position(at_.owner - 1);
    if (!at_.table.is_worth_filling(position)) return;
    const auto [ticket, head] = position;
    std::uint32_t holder = 0;
    BlockRecord& record = at_.table.block_record(ticket % at_.table.blocks());
    if (!record.owner.compare_exchange_strong(holder, at_.owner, std::memory_order_acq_rel)) return;
    BorrowedBlock borrowed(record, true);
    if (record.ticket.load(std::memory_order_relaxed) != ticket) return;
    enter(ticket, head);
    borrowed.keep();
}

void BlockClaim::claim(bool waits) {
    if (waits) at_.table.wait_while_held(Deadline::never(), false);
    Counters& counters = at_.table.counters();
    for (std::uint64_t tries = 0; tries < 2 * at_.table.blocks(); ++tries) {
        const std::uint64_t ticket = counters.next_ticket.value.fetch_add(1, std::memory_order_acq_rel);
        SHARPWAVE_FAULT(claim_ticket);
        const std::uint64_t origin = counters.origin_ticket.value.load(std::memory_order_acquire);
        if (ticket < origin) {
            raise(counters.next_ticket, origin);  // cleared since, by a process that may have died in the middle
        } else if (take(ticket)) {
            return;
        }
    }
    throw Error(ErrorKind::buffer_full,
                "add(): other writers hold every block of the ring; give a larger capacity or close a writer");
}

// False: another writer still fills the block.
bool BlockClaim::take(std::uint64_t ticket) {
    const std::uint64_t number = ticket % at_.table.blocks();
    BlockRecord& block = at_.table.block_record(number);
    std::uint32_t holder = 0;
    // Its own full block may be the next one: a ring of one block.
    if (!block.owner.compare_exchange_strong(holder, at_.owner, std::memory_order_acq_rel) && holder != at_.owner)
        return false;
    SHARPWAVE_FAULT(claim_owner);
    // Lack of space below leaves a ticket without rows, and nothing else.
    BorrowedBlock borrowed(block, holder != at_.owner);
    if (at_.table.header().block_heap_bytes && at_.table.storage().is_file()) {
        BlockHeap(at_.table, number);  // what it looks at has its space from here on
        SHARPWAVE_FAULT(claim_space);
    }
    const std::uint64_t origin = at_.table.counters().origin_ticket.value.load(std::memory_order_acquire);
    const std::uint64_t last = block.ticket.load(std::memory_order_relaxed);
    if (last == kNone || last < origin) block.live.store(0, std::memory_order_relaxed);
    if (last != kNone) leave_last_lap(number);
    // A record's blocks form a chain, also where several writers wrote them: the index follows it. Episodes never do.
    const Position before = at_.table.position(at_.owner - 1);
    // No way back at all while the block changes hands: rows of the lap before must not find those of this writer.
    borrowed.keep();
    block.previous_ticket.store(kNone, std::memory_order_release);
    SHARPWAVE_FAULT(claim_unlinked);
    link(before, ticket, origin);
    if (at_.length != 0 && at_.block != number) let_go();
    SHARPWAVE_FAULT(claim_linked);
    block.heap_used.store(0, std::memory_order_relaxed);
    block.ticket.store(ticket, std::memory_order_release);
    SHARPWAVE_FAULT(claim_block_ticket);
    block.previous_ticket.store(before.ticket, std::memory_order_release);
    enter(ticket, 0);
    at_.table.set_position(at_.record, ticket, 0);
    SHARPWAVE_FAULT(claim_record_ticket);
    return true;
}

// The first rows of the lap before lose the way to the rows before them: that way is known only until the block's
// record changes.
void BlockClaim::leave_last_lap(std::uint64_t block) {
    const std::uint64_t base = block * at_.table.block_rows();
    if (const std::uint64_t spare = at_.table.header().spare_rows) {
        // Their stacks cannot be made any more.
        const std::uint64_t least = at_.table.least_word();
        for (std::uint64_t i = 0; i < std::min(spare, at_.table.block_rows()); ++i)
            at_.table.retire(base + i, at_.table.word(base + i), least, at_.record);
    }
    if (at_.table.layout().gives_next()) {
        BlockHeap heap(at_.table, block);
        for (std::uint64_t i = 0; i < at_.open_rows.size(); ++i) next_.leave_to_previous(base + i, heap);
    }
}

// Says in the record's block before where its rows go on. Before the new block's record changes: it may be the same
// one.
void BlockClaim::link(const Position& before, std::uint64_t ticket, std::uint64_t origin) {
    if (before.ticket == kNone || before.ticket < origin) return;
    const std::uint64_t number = before.ticket % at_.table.blocks();
    BlockRecord& previous = at_.table.block_record(number);
    if (before.head < at_.table.block_length(number)) {
        // Left half full: what stands behind its head is of the lap before.
        at_.table.mark_uneven(number);
    } else if (previous.ticket.load(std::memory_order_relaxed) == before.ticket) {
        previous.linked_ticket.store(kNone, std::memory_order_relaxed);
        previous.next_ticket.store(ticket, std::memory_order_release);
        previous.linked_ticket.store(before.ticket, std::memory_order_release);
    }
}

}  // namespace sharpwave
