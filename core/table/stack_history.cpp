#include "table/stack_history.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/error.h"
#include "table/codec.h"

namespace sharpwave {

using namespace format;

namespace {

using Word = std::atomic_ref<std::uint64_t>;

[[noreturn]] void refuse(const Field& field, const char* what, const char* mend) {
    throw Error(ErrorKind::schema, "add(): field '" + field.name + "': " + what + "; " + mend);
}

bool ends_episode(const RowBatch& batch, std::size_t i) {
    return batch.flags && (batch.flags[i] & (kRowTerminated | kRowTruncated));
}

// The row of the same env before row i in this batch; i itself where there is none.
std::size_t row_before(const RowBatch& batch, std::size_t i, std::size_t width) {
    for (std::size_t j = i; j >= width;) {
        j -= width;
        if (!is_void(batch, j)) return j;
    }
    return i;
}

// Whether the stack that ends with the frame at `newest` is the first one of an episode.
bool is_start(const Field& field, const std::byte* newest, std::uint32_t frames) {
    const std::uint64_t bytes = field.full_bytes, older = (frames - 1) * bytes;
    const std::byte* oldest = newest - older;
    if (field.pads_zero) return std::all_of(oldest, newest, [](std::byte item) { return item == std::byte{0}; });
    return std::memcmp(oldest, oldest + bytes, older) == 0;  // each frame equals the one after it
}

}  // namespace

// Calls each(field, input of the observation, input of the next one) for the fields that have both.
template <class Each>
void StackHistory::each_next(const RowBatch& batch, Each each) const {
    const std::vector<Field>& fields = at_.table.layout().fields();
    std::size_t next = 0;
    for (std::size_t f = 0; f < fields.size(); ++f) {
        const Field& field = fields[f];
        if (field.gives_next) each(field, batch.fields[f], batch.next[next++]);
        if (field.follows >= 0) each(field, batch.fields[static_cast<std::size_t>(field.follows)], batch.fields[f]);
    }
}

void StackHistory::check(const RowBatch& batch) {
    const std::vector<Field>& fields = at_.table.layout().fields();
    resets_.assign(batch.rows, 0);
    starts_over_.assign(batch.rows, 0);
    if (!returned_.empty()) goes_on_.assign(batch.rows, 0);
    each_next(batch, [&](const Field& field, const FieldInput& own, const FieldInput& after) {
        check_next(batch, field, own, after);
    });
    if (std::any_of(starts_over_.begin(), starts_over_.end(), [](std::uint8_t starts) { return starts != 0; })) {
        each_next(batch, [&](const Field& field, const FieldInput&, const FieldInput& after) {
            check_starts(batch, field, after);
        });
    }
    for (std::size_t f = 0; f < fields.size(); ++f) {
        if (fields[f].follows < 0 && batch.fields[f].frames > 1) check_field(batch, fields[f], batch.fields[f]);
    }
}

void StackHistory::check_next(const RowBatch& batch, const Field& field, const FieldInput& own,
                              const FieldInput& after) {
    if (own.frames <= 1 || after.frames <= 1) return;
    const std::uint64_t older = (own.frames - 1) * field.full_bytes;
    for (std::size_t i = 0; i < batch.rows; ++i) {
        if (is_void(batch, i)) continue;
        const std::byte *now = own.flat + i * own.stride, *then = after.flat + i * after.stride;
        if (std::memcmp(then - older, now - older + field.full_bytes, older) == 0) continue;
        if (!is_start(field, then, after.frames)) {
            refuse(field, "the stack of next_obs does not go on from that of obs",
                   "its frames but the newest must be obs' frames but the oldest; pass single frames");
        }
        if (!ends_episode(batch, i)) {
            refuse(field, "the stack of next_obs starts an episode, and its row does not end one",
                   "give done=True or truncated=True with the last row before a reset");
        }
        starts_over_[i] = 1;
    }
}

// The stacks of one row start over together.
void StackHistory::check_starts(const RowBatch& batch, const Field& field, const FieldInput& after) const {
    for (std::size_t i = 0; after.frames > 1 && i < batch.rows; ++i) {
        if (!starts_over_[i] || is_start(field, after.flat + i * after.stride, after.frames)) continue;
        refuse(field, "the stack of next_obs goes on from that of obs, and another field's starts an episode",
               "give the next observation of one episode in all fields");
    }
}

void StackHistory::check_field(const RowBatch& batch, const Field& field, const FieldInput& own) {
    const std::size_t width = at_.open_rows.size();
    const std::uint64_t bytes = field.full_bytes, older = (own.frames - 1) * bytes;
    for (std::size_t i = 0; i < batch.rows; ++i) {
        if (is_void(batch, i)) continue;
        const std::byte* newest = own.flat + i * own.stride;
        const std::size_t before = row_before(batch, i, width);
        const std::uint64_t env = (at_.head + i) % width, open_row = at_.open_rows[env];
        const bool starts = before != i ? ends_episode(batch, before) : open_row == 0;
        const bool goes_on =
            !starts &&
            (before != i ? std::memcmp(newest - older, own.flat + before * own.stride - older + bytes, older) == 0
                         : goes_on_from(field, open_row - 1, newest - bytes, own.frames - 1,
                                        !lacking_.empty() && lacking_[env] != 0));
        if (goes_on) continue;
        const bool is_first = is_start(field, newest, own.frames);
        if (!is_first && starts && before == i && !returned_.empty() && returned_[env]) {
            goes_on_[i] = 1;
            continue;
        }
        if (!is_first && starts && field.pads_zero) {
            refuse(field, "the stack that starts an episode holds frames before the first that are not zero",
                   "the field has padding='zero': give padding='repeat', pass single frames, or pad that way");
        }
        if (!is_first && starts) {
            refuse(field, "the stack that starts an episode holds different frames",
                   "the field has padding='repeat', its first frame over and over: give padding='zero' if the others "
                   "are zero, pass single frames, or pad that way");
        }
        if (!is_first) {
            refuse(field, "the stack does not go on from the frames added before",
                   "end an episode with truncated=True before a jump, or pass single frames");
        }
        resets_[i] |= !starts;
    }
}

// Whether the frames of the rows from `serial` backwards are those at `newest` and before it, `count` of them.
bool StackHistory::goes_on_from(const Field& field, std::uint64_t serial, const std::byte* newest, std::uint32_t count,
                                bool is_cut_off) const {
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
        if (field.pads_zero && k + 1 < count) return is_start(field, newest, count - k);
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
    if (resets_[row]) lacking_[env] = 0;
    if (goes_on_[row]) lacking_[env] = at_.table.layout().stack() - 1;
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
