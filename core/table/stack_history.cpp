#include "table/stack_history.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "table/codec.h"

namespace sharpwave {

using namespace format;

namespace {

using Word = std::atomic_ref<std::uint64_t>;

}  // namespace

bool StackHistory::goes_on(const Field& field, std::uint64_t env, const std::byte* newest, std::uint32_t count) const {
    const std::uint64_t serial = at_.open_rows[env] - 1;
    const bool is_cut_off = !lacking_.empty() && lacking_[env] != 0;
    std::uint64_t slot = at_.table.slot_of(serial), word = Word(at_.table.word(slot)).load(std::memory_order_relaxed);
    if (serial_of(word) != serial || state_of(word) != kCommitted) return true;  // nothing left to compare with
    std::vector<std::byte> decoded(field.is_in_heap() ? field.full_bytes : 0);
    bool gone = false;
    for (std::uint32_t k = 0; k < count; ++k, newest -= field.full_bytes) {
        const std::byte* frame = at_.table.view().rows + slot * at_.table.header().row_bytes + field.offset;
        if (field.is_in_heap()) {
            HeapPlace place;
            std::memcpy(&place, frame, sizeof place);
            if (!decode(at_.table.region(kHeap) + place.offset, place.kept_bytes, decoded.data(), place.value_bytes))
                return true;
            frame = decoded.data();
        }
        if (std::memcmp(frame, newest, field.full_bytes) != 0) return false;
        // At the episode's start the same frame stands for all before it, or zeros do.
        if (at_.table.predecessor(slot, word, gone)) continue;
        if (gone || is_cut_off) return true;
        if (field.pads_zero && k + 1 < count) return is_first_stack(field, newest, count - k);
    }
    return true;
}

// The row `spare_rows` behind the one that is `ahead` rows from the head: the ring comes there next.
void StackHistory::retire_one_ahead(std::size_t ahead, std::uint64_t least, std::uint64_t writers) {
    const std::uint64_t rows = at_.table.block_rows(), blocks = at_.table.blocks();
    // The ticket whose rows stand where the ring comes to; while nothing is linked yet, that of the ring's order.
    std::uint64_t block = at_.block, offset = at_.head + ahead + at_.table.header().spare_rows, hops = 0, told = kNone;
    while (offset >= at_.table.block_length(block)) {
        offset -= at_.table.block_length(block);
        const BlockRecord& record = at_.table.block_record(block);
        const std::uint64_t linked = record.linked_ticket.load(std::memory_order_relaxed);
        told = linked == kNone || linked == at_.ticket ? kNone : record.next_ticket.load(std::memory_order_relaxed);
        // What was linked before a clear says nothing of the rows that came since.
        if (told != kNone && told < at_.origin) told = kNone;
        // A record that was not used for long goes on in one of the newest blocks: the ring does not come there
        // soon.
        if (told != kNone && told + blocks > at_.ticket + hops + 1 + writers) told = kNone;
        block = told == kNone ? (block + 1) % blocks : told % blocks;
        ++hops;
    }
    const std::uint64_t slot = block * rows + offset;
    const std::uint64_t seen = Word(at_.table.word(slot)).load(std::memory_order_relaxed);
    const std::uint64_t its_ticket = serial_of(seen) / rows;
    const bool is_old = hops == 0       ? its_ticket < at_.ticket
                        : told != kNone ? its_ticket == told
                                        : its_ticket + blocks == at_.ticket + hops;
    if (is_old) at_.table.retire(slot, seen, least, at_.record);
}

void StackHistory::retire_ahead(std::size_t count) {
    std::uint64_t early = 0;
    const std::uint64_t least = at_.table.least_word(), rows = at_.table.block_rows();
    const std::uint64_t writers = at_.table.counters().writers_used.value.load(std::memory_order_relaxed);
    for (std::size_t i = 0; i < count; ++i) {
        retire_one_ahead(i, least, writers);
        std::uint64_t at = at_.block * rows + at_.head + i;
        std::uint64_t word = Word(at_.table.word(at)).load(std::memory_order_relaxed);
        if (state_of(word) != kCommitted || word < least) continue;
        for (std::uint32_t k = 1; k < at_.table.layout().stack() && at_.table.successor(at, word); ++k) {
            early += at_.table.retire(at, word, least, at_.record);
        }
    }
    // Steps that an env was masked out of lie between a row and its history, or several writers share the ring.
    if (early) at_.table.counters().rows_retired.value.fetch_add(early, std::memory_order_relaxed);
}

bool StackHistory::lacks_frames(std::size_t row, std::uint64_t env, bool is_end) {
    if (returned_.empty()) return false;
    returned_[env] = 0;
    if (check_.is_reset(row)) lacking_[env] = 0;
    if (check_.starts_inside(row)) lacking_[env] = at_.table.layout().stack() - 1;
    const bool lacks = lacking_[env] != 0;
    lacking_[env] = lacks && !is_end ? lacking_[env] - 1 : 0;
    return lacks;
}

bool StackHistory::is_whole(std::uint64_t serial) const {
    std::uint64_t slot = at_.table.slot_of(serial);
    std::uint64_t word = Word(at_.table.word(slot)).load(std::memory_order_relaxed);
    if (serial_of(word) != serial || state_of(word) != kCommitted) return false;
    bool gone = false;
    for (std::uint32_t k = 2; k < at_.table.layout().stack() && at_.table.predecessor(slot, word, gone); ++k) {
    }
    return !gone;
}

}  // namespace sharpwave
