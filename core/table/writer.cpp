#include "table/writer.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>

#include "base/crc32c.h"
#include "base/error.h"
#include "base/fault.h"
#include "table/codec.h"

namespace sharpwave {

using namespace format;

namespace {

using Word = std::atomic_ref<std::uint64_t>;

struct Value {
    const std::byte* data;
    std::uint64_t bytes;
};

// To a counter that nobody else writes: no locked instruction.
void add_to(auto& counter, auto value) {
    counter.store(counter.load(std::memory_order_relaxed) + value, std::memory_order_relaxed);
}

// A block that was taken, and is nobody's again where something throws before it is wanted.
class GiveBack {
public:
    GiveBack(BlockRecord& block, bool was_taken) : block_(was_taken ? &block : nullptr) {}
    ~GiveBack() {
        if (block_) block_->owner.store(0, std::memory_order_release);
    }
    GiveBack(const GiveBack&) = delete;
    GiveBack& operator=(const GiveBack&) = delete;
    void keep() { block_ = nullptr; }

private:
    BlockRecord* block_;
};

Value value_of(const FieldInput& input, const Field& field, std::size_t row) {
    if (input.starts) return {input.flat + input.starts[row], input.starts[row + 1] - input.starts[row]};
    return {input.flat + row * input.stride, field.full_bytes};
}

}  // namespace

Writer::Writer(std::shared_ptr<Table> table, std::uint64_t record_index)
    : table_(std::move(table)),
      record_(table_->writer_record(record_index)),
      owner_(static_cast<std::uint32_t>(record_index + 1)),
      derives_(table_->layout().gives_next()),
      stacks_(table_->layout().stack() > 1),
      is_plain_(!derives_ && !table_->layout().uses_heap() && table_->header().spare_rows == 0),
      is_bare_(is_plain_ && table_->width() == 1 && !table_->given() && !table_->checksums()),
      open_rows_(table_->width(), 0),
      halves_(derives_ ? table_->width() : 0, 0),
      image_(table_->header().waiting_bytes) {
    for (const Field& field : table_->layout().fields()) row_moves_.push_back({field.offset, field.bytes, nullptr, 0});
    origin_ = table_->counters().origin_ticket.value.load(std::memory_order_acquire);
    if (record_.origin.load(std::memory_order_relaxed) != origin_) {
        record_.live.store(0, std::memory_order_relaxed);
        record_.gone.store(0, std::memory_order_relaxed);
        record_.origin.store(origin_, std::memory_order_release);
    }
    // Writers that live for one episode must not leave the ring full of old tails.
    const Position position = table_->position(record_index);
    if (!table_->is_worth_filling(position)) return;
    const auto [ticket, head] = position;
    const std::uint64_t block = ticket % table_->blocks();
    std::uint32_t nobody = 0;
    BlockRecord& record = table_->block_record(block);
    if (!record.owner.compare_exchange_strong(nobody, owner_, std::memory_order_acq_rel)) return;
    GiveBack give_back(record, true);
    if (record.ticket.load(std::memory_order_relaxed) != ticket) return;
    take_block(ticket, head);
    give_back.keep();
}

Writer::~Writer() {
    try {
        close();
    } catch (const Error&) {
        // No space: the next observations of its newest rows stay where they wait.
    }
}

void Writer::take_block(std::uint64_t ticket, std::uint64_t head) {
    ticket_ = ticket;
    block_ = ticket % table_->blocks();
    head_ = head;
    length_ = table_->block_length(block_);
    if (table_->header().block_heap_bytes) heap_ = BlockHeap(*table_, block_);
}

void Writer::let_go_of_block() {
    if (length_ == 0) return;
    std::uint32_t mine = owner_;
    table_->block_record(block_).owner.compare_exchange_strong(mine, 0, std::memory_order_acq_rel);
}

// `waits`: without, a hold that begins in the middle of an add does not stop it. Small adds come with the interpreter's
// lock, which must not be kept during a wait; they looked before they began.
void Writer::claim_block(bool waits) {
    if (waits) table_->wait_while_held(Deadline::never(), false);
    Counters& counters = table_->counters();
    // A block that another writer still fills is passed over: its ticket stays without rows.
    for (std::uint64_t tries = 0; tries < 2 * table_->blocks(); ++tries) {
        const std::uint64_t ticket = counters.next_ticket.value.fetch_add(1, std::memory_order_acq_rel);
        SHARPWAVE_FAULT(claim_ticket);
        if (const std::uint64_t origin = counters.origin_ticket.value.load(std::memory_order_acquire);
            ticket < origin) {
            raise(counters.next_ticket, origin);  // cleared since, by a process that may have died in the middle
            continue;
        }
        BlockRecord& block = table_->block_record(ticket % table_->blocks());
        std::uint32_t holder = 0;
        // Its own full block may be the next one: a ring of one block.
        if (!block.owner.compare_exchange_strong(holder, owner_, std::memory_order_acq_rel) && holder != owner_)
            continue;
        SHARPWAVE_FAULT(claim_owner);
        // Lack of space below leaves a ticket without rows, and nothing else.
        GiveBack give_back(block, holder != owner_);
        if (table_->header().block_heap_bytes && table_->storage().is_file()) {
            BlockHeap(*table_, ticket % table_->blocks());  // what it looks at has its space from here on
            SHARPWAVE_FAULT(claim_space);
        }
        const std::uint64_t origin = counters.origin_ticket.value.load(std::memory_order_acquire);
        const std::uint64_t last = block.ticket.load(std::memory_order_relaxed);
        if (last == kNone || last < origin) block.live.store(0, std::memory_order_relaxed);
        if (const std::uint64_t spare = table_->header().spare_rows; spare && last != kNone) {
            // The first rows lose the way to the rows before them: they are in front of this writer now.
            const std::uint64_t base = ticket % table_->blocks() * table_->block_rows(), least = table_->least_word();
            for (std::uint64_t i = 0; i < std::min(spare, table_->block_rows()); ++i)
                table_->retire(base + i, table_->word(base + i), least, record_);
        }
        if (derives_ && last != kNone) {
            // Likewise the way from the first rows to those before them is known only until the record changes.
            BlockHeap heap(*table_, ticket % table_->blocks());
            const std::uint64_t base = ticket % table_->blocks() * table_->block_rows();
            for (std::uint64_t i = 0; i < open_rows_.size(); ++i) leave_to_previous(base + i, heap);
        }
        // A record's blocks form a chain, whoever wrote them: the index follows it. Episodes never do.
        const Position before = table_->position(owner_ - 1);
        // No way back at all while the block changes hands: rows of the lap before must not find those of this writer.
        give_back.keep();
        block.previous_ticket.store(kNone, std::memory_order_release);
        SHARPWAVE_FAULT(claim_unlinked);
        if (before.ticket != kNone && before.ticket >= origin) {
            // First, for the next block may be this very one.
            BlockRecord& previous = table_->block_record(before.ticket % table_->blocks());
            if (before.head < table_->block_length(before.ticket % table_->blocks())) {
                // Left half full: what stands behind its head is of the lap before.
                table_->mark_uneven(before.ticket % table_->blocks());
            } else if (previous.ticket.load(std::memory_order_relaxed) == before.ticket) {
                previous.linked_ticket.store(kNone, std::memory_order_relaxed);
                previous.next_ticket.store(ticket, std::memory_order_release);
                previous.linked_ticket.store(before.ticket, std::memory_order_release);
            }
        }
        if (length_ != 0 && block_ != ticket % table_->blocks()) let_go_of_block();
        SHARPWAVE_FAULT(claim_linked);
        block.heap_used.store(0, std::memory_order_relaxed);
        block.ticket.store(ticket, std::memory_order_release);
        SHARPWAVE_FAULT(claim_block_ticket);
        block.previous_ticket.store(before.ticket, std::memory_order_release);
        take_block(ticket, 0);
        table_->set_position(record_, ticket, 0);
        SHARPWAVE_FAULT(claim_record_ticket);
        return;
    }
    throw Error(ErrorKind::buffer_full,
                "add(): other writers hold every block of the ring; give a larger capacity or close a writer");
}

void Writer::notice_clear() {
    const std::uint64_t origin = table_->counters().origin_ticket.value.load(std::memory_order_acquire);
    if (origin == origin_) [[likely]]
        return;
    origin_ = origin;
    record_.live.store(0, std::memory_order_relaxed);
    record_.gone.store(0, std::memory_order_relaxed);
    record_.origin.store(origin, std::memory_order_release);
    std::fill(open_rows_.begin(), open_rows_.end(), 0);
    if (length_ != 0 && ticket_ < origin) {
        let_go_of_block();
        ticket_ = kNone;
        length_ = head_ = 0;
    }
}

std::unique_lock<std::timed_mutex> Writer::lock(Deadline deadline) {
    std::unique_lock<std::timed_mutex> guard(mutex_, std::try_to_lock);
    while (!guard.owns_lock()) {
        const double slice = std::min(deadline.left_s(), kWaitSlice);
#if defined(SHARPWAVE_TSAN)
        // GCC's ThreadSanitizer does not know the system call behind try_lock_for().
        for (Pauses pauses(Deadline::in(slice)); !guard.try_lock() && pauses.next();) {
        }
        if (guard.owns_lock()) break;
#else
        if (guard.try_lock_for(std::chrono::duration<double>(slice))) break;
#endif
        if (deadline.is_over()) {
            throw Error(ErrorKind::not_ready,
                        "add(): another thread adds through the same writer and was not done before the timeout; take "
                        "one for each thread with buf.writer()");
        }
        check_interrupt();
    }
    return guard;
}

// The rows need a block that a saver does not want to be claimed now.
inline bool Writer::is_held_back(const RowBatch& batch) const {
    if (batch.rows <= length_ - head_) [[likely]]
        return false;
    return table_->are_adds_held();
}

void Writer::append(const RowBatch& batch, Deadline deadline) {
    for (;;) {
        {
            const auto guard = lock(deadline);
            if (!is_held_back(batch)) return append_locked(batch, true);
        }
        if (!table_->wait_while_held(deadline, true)) {
            throw Error(ErrorKind::not_ready,
                        "add(): a save() holds adds back and was not done before the timeout; give a longer timeout=");
        }
    }
}

bool Writer::try_append(const RowBatch& batch) {
    std::unique_lock<std::timed_mutex> guard(mutex_, std::try_to_lock);
    if (!guard.owns_lock() || is_held_back(batch)) [[unlikely]]
        return false;
    append_locked(batch, false);
    return true;
}

void Writer::append_locked(const RowBatch& batch, bool waits) {
    table_->check_open();
    if (closed_) throw Error(ErrorKind::closed, "add(): this writer is closed; take a new one with buf.writer()");
    notice_clear();
    if (is_bare_ && batch.rows == 1 && head_ != length_) [[likely]]
        return append_row(batch);
    if (stacks_) check_stacks(batch);
    std::size_t done = 0;
    try {
        append_groups(batch, done, waits);
    } catch (const Error& error) {
        // What earlier groups wrote over is gone: they cannot be taken back, so they are told.
        if (done == 0) throw;
        throw Error(error.kind(), std::string(error.what()) + "; the first " + std::to_string(done) + " of the " +
                                      std::to_string(batch.rows) + " rows were added, the others were not");
    }
}

void Writer::append_groups(const RowBatch& batch, std::size_t& done, bool waits) {
    while (done < batch.rows) {
        if (head_ == length_) {
            claim_block(waits);
            notice_clear();
            if (head_ == length_) continue;  // cleared between the two: the block just claimed is history
        }
        std::size_t count = std::min<std::size_t>({kGroupRows, batch.rows - done, length_ - head_});
        // Where a row looks at its env's last one, a group is of one step.
        if (derives_ || stacks_) count = std::min<std::size_t>(count, open_rows_.size() - head_ % open_rows_.size());
        write_group(batch, done, count);
        done += count;
        head_ += count;
        if (head_ % table_->width() == 0) table_->set_position(record_, ticket_, head_);
        SHARPWAVE_FAULT(head_moved);
        // A full block is let go at once, not at the next add: small rings never wait for an idle writer. With derived
        // observations it is kept, for its heap takes the final ones of rows whose successor never comes.
        if (head_ == length_ && !derives_) let_go_of_block();
    }
}

// The shortest way of a row: what append_locked() and write_group() come to where there is nothing else to look at.
void Writer::append_row(const RowBatch& batch) {
    const std::uint64_t slot = block_ * table_->block_rows() + head_;
    const std::uint64_t serial = ticket_ * table_->block_rows() + head_;
    const std::uint8_t given = batch.flags ? batch.flags[0] : 0;
    const bool is_void = (given & kRowVoid) != 0;
    std::uint64_t flags = 0;
    if (is_void) {
        table_->mark_uneven(block_);  // before the head says that the row is done
    } else {
        if (open_rows_[0] == 0) flags |= kEpisodeStart;
        if (given & kRowTerminated) flags |= kTerminated;
        if (given & kRowTruncated) flags |= kTruncated;
        open_rows_[0] = flags & kEndMask ? 0 : serial + 1;
    }
    for (std::size_t f = 0; f < row_moves_.size(); ++f)
        row_moves_[f].flat = const_cast<std::byte*>(batch.fields[f].flat);

    Word word(table_->word(slot));
    const bool was_live = is_live(word.load(std::memory_order_relaxed), table_->least_word());
    word.store(make_word(serial, 0, kWriting), std::memory_order_relaxed);
    fence(std::memory_order_release);  // no payload byte before its word says WRITING
    SHARPWAVE_FAULT(row_writing);
    kernels().scatter(table_->view(), slot, 1, row_moves_.data(), row_moves_.size());
    SHARPWAVE_FAULT(row_copied);
    // Written last, with release: a reader that sees this word sees the whole row.
    word.store(make_word(serial, flags, is_void ? kVoid : kCommitted), std::memory_order_release);
    SHARPWAVE_FAULT(row_committed);

    if (is_void == was_live) count(is_void ? -1 : 1);
    SHARPWAVE_FAULT(row_counted);
    if (is_void) {
        record_.voided.fetch_add(1, std::memory_order_relaxed);
    } else {
        add_to(record_.added, 1u);
        if (flags & kEndMask) record_.episodes.fetch_add(1, std::memory_order_relaxed);
    }
    table_->set_position(record_, ticket_, ++head_);
    SHARPWAVE_FAULT(head_moved);
    if (head_ == length_) let_go_of_block();
}

// Live rows more, in the block and in the record. What both will be is said first: a process may die between the two,
// and whoever settles its affairs goes on from there.
void Writer::count(std::int64_t gained) {
    BlockRecord& block = table_->block_record(block_);
    // Every store releases those before it: a process that sees one of them sees the earlier ones. (Plain on x86.)
    constexpr std::memory_order in_order = std::memory_order_release;
    const std::int64_t gone = is_plain_ ? 0 : record_.gone.load(std::memory_order_relaxed);
    const std::int64_t in_block = static_cast<std::int64_t>(block.live.load(std::memory_order_relaxed)) + gained;
    const std::int64_t in_record = record_.live.load(std::memory_order_relaxed) + gained - gone;
    record_.settled_block.store(in_block, in_order);
    record_.settled_live.store(in_record, in_order);
    record_.settling.store(block_ + 1, in_order);
    if (is_plain_) {
        block.live.store(static_cast<std::uint64_t>(in_block), in_order);
    } else {
        // Other writers may retire rows of this block.
        block.live.fetch_add(static_cast<std::uint64_t>(gained), in_order);
    }
    SHARPWAVE_FAULT(row_half_counted);
    record_.live.store(in_record, in_order);
    SHARPWAVE_FAULT(count_stored);
    if (!is_plain_) record_.gone.store(0, in_order);
    record_.settling.store(0, in_order);
}

// Given stacks must be what the table will give back: each goes on from the frames added before it, or is one frame
// over and over and starts an episode. One that starts an episode while another is open ends that one: noted in
// resets_. The stack of a next observation goes on from that of its observation.
void Writer::check_stacks(const RowBatch& batch) {
    const std::vector<Field>& fields = table_->layout().fields();
    const std::size_t width = open_rows_.size();
    const auto refuse = [](const Field& field, const char* what, const char* mend) {
        throw Error(ErrorKind::schema, "add(): field '" + field.name + "': " + what + "; " + mend);
    };
    const auto is_void = [&](std::size_t i) { return batch.flags && (batch.flags[i] & kRowVoid); };
    const auto ends = [&](std::size_t i) { return batch.flags && (batch.flags[i] & (kRowTerminated | kRowTruncated)); };
    const auto check_next = [&](const Field& field, const FieldInput& own, const FieldInput& after) {
        if (own.frames <= 1 || after.frames <= 1) return;
        const std::uint64_t older = (own.frames - 1) * field.full_bytes;
        for (std::size_t i = 0; i < batch.rows; ++i) {
            if (is_void(i)) continue;
            const std::byte *now = own.flat + i * own.stride, *then = after.flat + i * after.stride;
            if (std::memcmp(then - older, now - older + field.full_bytes, older) == 0) continue;
            refuse(field, "the stack of next_obs does not go on from that of obs",
                   "its frames but the newest must be obs' frames but the oldest; pass single frames");
        }
    };
    resets_.assign(batch.rows, 0);
    std::size_t next = 0;
    for (std::size_t f = 0; f < fields.size(); ++f) {
        const Field& field = fields[f];
        const FieldInput& own = batch.fields[f];
        if (field.gives_next) check_next(field, own, batch.next[next++]);
        if (field.follows >= 0) {
            check_next(field, batch.fields[static_cast<std::size_t>(field.follows)], own);
            continue;
        }
        if (own.frames <= 1) continue;
        const std::uint64_t bytes = field.full_bytes, older = (own.frames - 1) * bytes;
        for (std::size_t i = 0; i < batch.rows; ++i) {
            if (is_void(i)) continue;
            const std::byte* newest = own.flat + i * own.stride;
            std::size_t before = i;  // the env's row before it in this batch; itself: there is none
            for (std::size_t j = i; j >= width && before == i;) {
                j -= width;
                if (!is_void(j)) before = j;
            }
            const std::uint64_t open_row = open_rows_[(head_ + i) % width];
            const bool starts = before != i ? ends(before) : open_row == 0;
            const bool goes_on =
                !starts &&
                (before != i ? std::memcmp(newest - older, own.flat + before * own.stride - older + bytes, older) == 0
                             : goes_on_from(field, open_row - 1, newest - bytes, own.frames - 1));
            if (goes_on) continue;
            bool is_start = true;
            for (std::uint32_t k = 1; k < own.frames && is_start; ++k)
                is_start = std::memcmp(newest, newest - k * bytes, bytes) == 0;
            if (!is_start && starts) {
                refuse(field, "the stack that starts an episode holds different frames",
                       "an episode's start is padded by its first frame: pass single frames, or pad that way");
            }
            if (!is_start) {
                refuse(field, "the stack does not go on from the frames added before",
                       "end an episode with truncated=True before a jump, or pass single frames");
            }
            resets_[i] |= !starts;
        }
    }
}

// Whether the frames of the rows from `serial` backwards are those at `newest` and before it, `count` of them.
bool Writer::goes_on_from(const Field& field, std::uint64_t serial, const std::byte* newest, std::uint32_t count) {
    std::uint64_t slot = table_->slot_of(serial), word = Word(table_->word(slot)).load(std::memory_order_relaxed);
    if (serial_of(word) != serial || state_of(word) != kCommitted) return true;  // nothing left to compare with
    std::vector<std::byte> decoded(field.is_in_heap() ? field.full_bytes : 0);
    bool gone = false;
    for (std::uint32_t k = 0; k < count; ++k, newest -= field.full_bytes) {
        const std::byte* frame = table_->view().rows + slot * table_->header().row_bytes + field.offset;
        if (field.is_in_heap()) {
            HeapPlace place;
            std::memcpy(&place, frame, sizeof place);
            if (!decode(table_->region(kHeap) + place.offset, place.kept_bytes, decoded.data(), place.value_bytes))
                return true;
            frame = decoded.data();
        }
        if (std::memcmp(frame, newest, field.full_bytes) != 0) return false;
        // At the episode's start the same frame stands for all before it.
        if (!table_->predecessor(slot, word, gone) && gone) return true;
    }
    return true;
}

// Takes out of the drawable rows what lies `spare_rows` ahead, so that no more than the capacity can be drawn, and
// whoever looks back to the rows about to be written over.
void Writer::retire_ahead(std::size_t count) {
    std::uint64_t early = 0;
    const std::uint64_t least = table_->least_word(), rows = table_->block_rows(), blocks = table_->blocks();
    const std::uint64_t writers = table_->counters().writers_used.value.load(std::memory_order_relaxed);
    for (std::size_t i = 0; i < count; ++i) {
        // The ticket whose rows stand where the ring comes to; while nothing is linked yet, that of the ring's order.
        std::uint64_t block = block_, offset = head_ + i + table_->header().spare_rows, hops = 0, told = kNone;
        while (offset >= table_->block_length(block)) {
            offset -= table_->block_length(block);
            const BlockRecord& record = table_->block_record(block);
            const std::uint64_t linked = record.linked_ticket.load(std::memory_order_relaxed);
            told = linked == kNone || linked == ticket_ ? kNone : record.next_ticket.load(std::memory_order_relaxed);
            // A record that nobody used for long goes on in one of the newest blocks: the ring does not come there
            // soon.
            if (told != kNone && told + blocks > ticket_ + hops + 1 + writers) told = kNone;
            block = told == kNone ? (block + 1) % blocks : told % blocks;
            ++hops;
        }
        const std::uint64_t slot = block * rows + offset;
        const std::uint64_t seen = Word(table_->word(slot)).load(std::memory_order_relaxed);
        const std::uint64_t its_ticket = serial_of(seen) / rows;
        const bool is_old = hops == 0       ? its_ticket < ticket_
                            : told != kNone ? its_ticket == told
                                            : its_ticket + blocks == ticket_ + hops;
        if (is_old) table_->retire(slot, seen, least, record_);

        std::uint64_t at = block_ * rows + head_ + i;
        std::uint64_t word = Word(table_->word(at)).load(std::memory_order_relaxed);
        if (state_of(word) != kCommitted || word < least) continue;
        for (std::uint32_t k = 1; k < table_->layout().stack() && table_->successor(at, word); ++k) {
            early += table_->retire(at, word, least, record_);
        }
    }
    // Steps that an env was masked out of lie between a row and its history, or several writers share the ring.
    if (early) table_->counters().rows_retired.value.fetch_add(early, std::memory_order_relaxed);
}

// Compresses and packs the values of a group that have no fixed size, and sees to it that there is space for them.
void Writer::pack(const RowBatch& batch, std::size_t first, std::size_t count) {
    const std::vector<Field>& fields = table_->layout().fields();
    places_.assign(fields.size() * kGroupRows, HeapPlace{});
    std::uint64_t used = 0, room = 0;
    for (std::size_t i = 0; i < count; ++i) {
        if (batch.flags && (batch.flags[first + i] & kRowVoid)) continue;
        for (std::size_t f = 0; f < fields.size(); ++f) {
            if (!fields[f].is_in_heap()) continue;
            const Value value = value_of(batch.fields[f], fields[f], first + i);
            if (packed_.size() < used + fields[f].full_bytes) packed_.resize(used + fields[f].full_bytes);
            const auto bytes = static_cast<std::uint32_t>(value.bytes);
            const std::uint32_t kept = bytes ? encode(fields[f], value.data, bytes, packed_.data() + used) : 0;
            places_[f * kGroupRows + i] = {used, kept, bytes};
            used += kept;
            room += piece_bytes(kept);
        }
    }
    heap_.ensure(room);
}

// Puts what pack() made into the heap, and points `moves` at where it went.
void Writer::place_in_heap(std::size_t count, FieldMove* moves) {
    const std::vector<Field>& fields = table_->layout().fields();
    const std::uint64_t serial = ticket_ * table_->block_rows() + head_;
    for (std::size_t i = 0; i < count; ++i) {
        for (std::size_t f = 0; f < fields.size(); ++f) {
            HeapPlace& place = places_[f * kGroupRows + i];
            if (!fields[f].is_in_heap() || place.value_bytes + place.offset + place.kept_bytes == 0) continue;
            const std::byte* from = packed_.data() + place.offset;
            place.offset = heap_.allocate(serial + i, place.kept_bytes, record_);
            racy_copy(table_->region(kHeap) + place.offset, from, place.kept_bytes);
            SHARPWAVE_FAULT(heap_placed);
        }
    }
    for (std::size_t f = 0; f < fields.size(); ++f) {
        if (!fields[f].is_in_heap()) continue;
        moves[f].flat = reinterpret_cast<std::byte*>(&places_[f * kGroupRows]);
        moves[f].stride = sizeof(HeapPlace);
    }
}

// Whether the rows that a stack needs before its newest frame are still there, from `serial` backwards.
bool Writer::has_history(std::uint64_t serial) const {
    std::uint64_t slot = table_->slot_of(serial);
    std::uint64_t word = Word(table_->word(slot)).load(std::memory_order_relaxed);
    if (serial_of(word) != serial || state_of(word) != kCommitted) return false;
    bool gone = false;
    for (std::uint32_t k = 2; k < table_->layout().stack() && table_->predecessor(slot, word, gone); ++k) {
    }
    return !gone;
}

// A row about to be written over may be what the row before it takes its next observation from. With one writer that
// one is gone already; with several it may stand in a block that the ring passed over. Then it gets an observation of
// its own.
void Writer::leave_to_previous(std::uint64_t slot, BlockHeap& heap) {
    std::uint64_t word = Word(table_->word(slot)).load(std::memory_order_relaxed);
    if (word < table_->least_word()) return;
    // Where the env was masked out, its next row is the one that the row before takes it from.
    if (state_of(word) == kVoid && !table_->successor(slot, word)) return;
    if (state_of(word) != kCommitted) return;
    std::uint64_t before = word, before_slot = slot;
    bool gone;
    if (!table_->predecessor(before_slot, before, gone) || (before & (kEndMask | kHasFinalObservation))) return;
    std::byte* value = image_.data() + kWaitingHead;
    const std::byte* row = table_->view().rows + slot * table_->header().row_bytes;
    for (const Field& field : table_->layout().fields()) {
        if (!field.gives_next) continue;
        HeapPlace place{0, 0, static_cast<std::uint32_t>(field.full_bytes)};
        if (field.is_in_heap()) {
            std::memcpy(&place, row + field.offset, sizeof place);
            const std::uint64_t room = table_->header().regions[kHeap].bytes;
            if (place.value_bytes > field.full_bytes || place.offset > room || place.kept_bytes > room - place.offset)
                return;
            if (!decode(table_->region(kHeap) + place.offset, place.kept_bytes, value + sizeof(FinalValue),
                        place.value_bytes)) {
                return;
            }
        } else {
            std::memcpy(value + sizeof(FinalValue), row + field.offset, field.full_bytes);
        }
        const FinalValue size{place.value_bytes, place.value_bytes, 0, 0};
        std::memcpy(value, &size, sizeof size);
        value += sizeof size + (field.full_bytes + 15) / 16 * 16;
    }
    // Its slot is another block's: nobody may write there meanwhile. Where somebody does, the row is about to go.
    BlockRecord& record = table_->block_record(table_->block_of(before_slot));
    std::uint32_t holder = 0;
    const bool borrowed = record.owner.compare_exchange_strong(holder, owner_, std::memory_order_acq_rel);
    if (!borrowed && holder != owner_) {
        table_->retire(before_slot, before, table_->least_word(), record_);
        return;
    }
    const GiveBack give_back(record, borrowed);
    if (serial_of(Word(table_->word(before_slot)).load(std::memory_order_acquire)) == serial_of(before)) {
        const std::uint64_t kept = keep_final(*table_, heap, serial_of(before), image_.data());
        if (kept != kNone) {
            Word(table_->final_place(before_slot)).store(kept, std::memory_order_relaxed);
            Word(table_->word(before_slot)).fetch_or(kHasFinalObservation, std::memory_order_release);
            table_->mark_changed(table_->block_of(before_slot));
        }
    }
}

// Compares what an env shows now with what was said to come next. If they differ, an episode ended untold: the row
// before keeps its next observation, and this one starts an episode.
void Writer::meet_previous(const RowBatch& batch, std::size_t row, std::uint64_t env) {
    std::uint64_t& open_row = open_rows_[env];
    if (open_row == 0) return;
    const std::uint64_t pair = (owner_ - 1) * open_rows_.size() + env;
    const std::byte* place = table_->waiting(pair, halves_[env]);
    const std::byte* value = place + kWaitingHead;
    bool same = *reinterpret_cast<const std::uint64_t*>(place) == open_row;
    const std::vector<Field>& fields = table_->layout().fields();
    for (std::size_t f = 0; same && f < fields.size(); ++f) {
        if (!fields[f].gives_next) continue;
        FinalValue size;
        std::memcpy(&size, value, sizeof size);
        const Value shown = value_of(batch.fields[f], fields[f], row);
        same = shown.bytes == size.value_bytes && std::memcmp(shown.data, value + sizeof size, shown.bytes) == 0;
        value += sizeof size + (fields[f].full_bytes + 15) / 16 * 16;
    }
    if (!same) end_untold(env);
}

// An episode ended that nobody ended: the env's last row is closed, with its next observation where it needs one.
void Writer::end_untold(std::uint64_t env) {
    std::uint64_t& open_row = open_rows_[env];
    if (open_row == 0) return;
    const std::uint64_t serial = open_row - 1, slot = table_->slot_of(serial);
    open_row = 0;
    table_->counters().resets_unflagged.value.fetch_add(1, std::memory_order_relaxed);
    Word word(table_->word(slot));
    if (serial_of(word.load(std::memory_order_relaxed)) != serial) return;
    std::uint64_t flags = kTruncated | kClosedByEngine;
    if (derives_) {
        const std::byte* place = table_->waiting((owner_ - 1) * open_rows_.size() + env, halves_[env]);
        const std::uint64_t kept = keep_final(*table_, heap_, serial, place);
        Word(table_->final_place(slot)).store(kept, std::memory_order_relaxed);
        flags |= kHasFinalObservation;
    }
    if (table_->add_flags(slot, serial, flags)) table_->mark_changed(table_->block_of(slot));
}

// Puts a row's next observation where it will be found: with an ended row into the heap, else into the waiting place
// that its predecessor does not use, so that at no instant is either without one.
void Writer::keep_next(const RowBatch& batch, std::size_t row, std::uint64_t env, std::uint64_t slot,
                       std::uint64_t serial, std::uint64_t& flags) {
    const std::uint64_t pair = (owner_ - 1) * open_rows_.size() + env;
    const bool is_over = (flags & kEndMask) != 0;
    if (!is_over) halves_[env] ^= 1;
    std::byte* place = is_over ? image_.data() : table_->waiting(pair, halves_[env]);
    if (!is_over) {
        table_->ensure(place, image_.size());
        Word(*reinterpret_cast<std::uint64_t*>(place)).store(0, std::memory_order_relaxed);
        fence(std::memory_order_release);
    }
    std::byte* value = place + kWaitingHead;
    const FieldInput* input = batch.next;
    for (const Field& field : table_->layout().fields()) {
        if (!field.gives_next) continue;
        const Value shown = value_of(*input, field, row);
        const auto bytes = static_cast<std::uint32_t>(shown.bytes);
        const std::uint32_t crc = table_->checksums() && !is_over ? next_checksum(serial, shown.data, bytes) : 0;
        const FinalValue size{bytes, bytes, crc, 0};
        racy_copy(value, reinterpret_cast<const std::byte*>(&size), sizeof size);
        racy_copy(value + sizeof size, shown.data, bytes);
        value += sizeof size + (field.full_bytes + 15) / 16 * 16;
        ++input;
    }
    if (is_over) {
        Word(table_->final_place(slot))
            .store(keep_final(*table_, heap_, serial, image_.data()), std::memory_order_relaxed);
        flags |= kHasFinalObservation;
    } else {
        Word(table_->final_place(slot)).store(pair, std::memory_order_relaxed);
        Word(*reinterpret_cast<std::uint64_t*>(place)).store(serial + 1, std::memory_order_release);
        SHARPWAVE_FAULT(next_waiting);
    }
}

void Writer::write_group(const RowBatch& batch, std::size_t first, std::size_t count) {
    const RowView view = table_->view();
    const std::uint64_t least = table_->least_word();
    const std::uint64_t slot = block_ * table_->block_rows() + head_;
    const std::uint64_t serial = ticket_ * table_->block_rows() + head_;
    const std::uint64_t width = open_rows_.size();
    const std::vector<Field>& fields = table_->layout().fields();
    const std::size_t field_count = fields.size();
    std::uint64_t commit[kGroupRows], before[kGroupRows];
    std::int64_t gained = 0;
    std::uint64_t voided = 0, ended = 0;
    const auto is_void = [&](std::size_t i) { return batch.flags && (batch.flags[first + i] & kRowVoid); };

    FieldMove few[32];
    std::vector<FieldMove> many;
    FieldMove* moves = few;
    if (field_count > 32) moves = (many.resize(field_count), many.data());
    for (std::size_t f = 0; f < field_count; ++f) {
        const FieldInput& input = batch.fields[f];
        moves[f] = {fields[f].offset, fields[f].bytes,
                    const_cast<std::byte*>(input.flat) + (input.starts ? 0 : first * input.stride), input.stride};
    }
    if (!is_plain_) {
        const bool uses_heap = table_->layout().uses_heap();
        // What may fail comes first: nothing has changed yet.
        if (uses_heap) pack(batch, first, count);
        if (derives_ && table_->storage().is_file()) {
            heap_.ensure_finals(3 * count + 2);
            for (std::size_t i = 0; i < count; ++i) {
                const std::uint64_t pair = (owner_ - 1) * width + (head_ + i) % width;
                table_->ensure(table_->waiting(pair, 0), 2 * image_.size());
            }
        }
        for (std::size_t i = 0; stacks_ && i < count; ++i) {
            if (resets_[first + i]) end_untold((head_ + i) % width);
        }
        if (table_->header().spare_rows) retire_ahead(count);
        for (std::size_t i = 0; derives_ && i < count; ++i) {
            leave_to_previous(slot + i, heap_);
            if (!is_void(i)) meet_previous(batch, first + i, (head_ + i) % width);
        }
        if (uses_heap) {
            // The rows written over go now: what is lost for their bytes is lost early only elsewhere.
            for (std::size_t i = 0; i < count; ++i) {
                Word word(table_->word(slot + i));
                gained -= is_live(word.load(std::memory_order_relaxed), least);
                word.store(make_word(serial + i, 0, kWriting), std::memory_order_relaxed);
            }
            place_in_heap(count, moves);
        }
    }
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint64_t env = width == 1 ? 0 : (head_ + i) % width;
        const std::uint8_t given = batch.flags ? batch.flags[first + i] : 0;
        std::uint64_t& open_row = open_rows_[env];
        std::uint64_t flags = open_row ? std::uint64_t{0} : kEpisodeStart;
        State state = kCommitted;
        if (given & kRowVoid) {
            state = kVoid;  // keeps the stride of its step; the episode neither starts nor goes on here
            flags = 0;
            before[i] = 0;
            ++voided;
        } else {
            if (given & kRowTerminated) flags |= kTerminated;
            if (given & kRowTruncated) flags |= kTruncated;
            const bool is_over = (flags & kEndMask) != 0;
            ++gained;
            if (stacks_) before[i] = open_row;
            open_row = is_over ? 0 : serial + i + 1;
            ended += is_over;
        }
        if (float* priorities = table_->given()) {
            // Stored as the index stores it: negated, so that 0 bytes mean that none was given.
            std::atomic_ref<float>(priorities[slot + i])
                .store(batch.priorities ? -std::fabs(batch.priorities[first + i]) : 0.0f, std::memory_order_relaxed);
        }
        commit[i] = make_word(serial + i, flags, state);
        Word word(table_->word(slot + i));
        const std::uint64_t old = word.load(std::memory_order_relaxed);
        gained -= is_live(old, least);
        word.store(make_word(serial + i, 0, kWriting), std::memory_order_relaxed);
    }
    for (std::size_t i = 0; stacks_ && i < count; ++i) {
        if (before[i] == 0 || has_history(before[i] - 1)) continue;
        // The ring went round since this env's last rows: kept for the rows to come, not drawn.
        commit[i] |= kRetired;
        --gained;
        table_->mark_uneven(block_);
        table_->counters().rows_retired.value.fetch_add(1, std::memory_order_relaxed);
    }
    if (voided) table_->mark_uneven(block_);
    fence(std::memory_order_release);  // no payload byte before its word says WRITING
    SHARPWAVE_FAULT(row_writing);
    kernels().scatter(view, slot, count, moves, field_count);
    for (std::size_t i = 0; derives_ && i < count; ++i) {
        if (!is_void(i)) keep_next(batch, first + i, (head_ + i) % width, slot + i, serial + i, commit[i]);
    }
    if (std::uint32_t* checksums = table_->checksums()) {
        for (std::size_t i = 0; i < count; ++i) {
            std::atomic_ref<std::uint32_t>(checksums[slot + i])
                .store(table_->row_checksum(slot + i, commit[i]), std::memory_order_relaxed);
        }
    }
    SHARPWAVE_FAULT(row_copied);
    for (std::size_t i = 0; i < count; ++i) {
        if (i == count / 2) SHARPWAVE_FAULT(row_half_committed);
        // Written last, with release: a reader that sees this word sees the whole row.
        Word(table_->word(slot + i)).store(commit[i], std::memory_order_release);
    }
    SHARPWAVE_FAULT(row_committed);

    if (gained || !is_plain_) this->count(gained);
    SHARPWAVE_FAULT(row_counted);
    add_to(record_.added, count - voided);
    if (voided) record_.voided.fetch_add(voided, std::memory_order_relaxed);
    if (ended) record_.episodes.fetch_add(ended, std::memory_order_relaxed);
}

void Writer::end_open_episodes() {
    if (derives_ && length_ != 0) {
        settle_waiting(*table_, heap_, (owner_ - 1) * open_rows_.size());
        return;
    }
    for (std::uint64_t open_row : open_rows_) {
        if (open_row) table_->end_episode(open_row - 1);
    }
}

void Writer::close() {
    // A forked child never writes through its parent's writer, and may have got its mutex locked.
    if (table_->is_from_another_process()) return;
    const auto guard = lock(Deadline::never());
    if (closed_) return;
    closed_ = true;
    // Whatever happens to the last rows, the place is given back.
    const auto give_back = [&](std::uint64_t owner) {
        let_go_of_block();
        record_.owner.store(owner, std::memory_order_release);
    };
    try {
        end_open_episodes();
        table_->counters().late_ends.value.fetch_add(1, std::memory_order_acq_rel);
        SHARPWAVE_FAULT(close_ended);
    } catch (...) {
        // No space for final observations: rows find theirs where they wait, so the record is nobody's for now.
        give_back(kParked);
        throw;
    }
    give_back(0);
}

}  // namespace sharpwave
