#include "table/writer.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>

#include "base/error.h"
#include "base/fault.h"
#include "table/client_rows.h"
#include "table/mutable_values.h"

namespace sharpwave {

using namespace format;

namespace {

using Word = std::atomic_ref<std::uint64_t>;

// Rows fetched ahead for writing, from the one being written on: the first look at the row that is there would wait for
// memory otherwise, which is nearly half of a bulk add into a ring that no cache holds.
constexpr std::uint64_t kFetchedAhead = 2 * kGroupRows;

// To a counter that has no other writer: no locked instruction.
void add_to(auto& counter, auto value) {
    counter.store(counter.load(std::memory_order_relaxed) + value, std::memory_order_relaxed);
}

}  // namespace

Writer::Writer(std::shared_ptr<Table> table, std::uint64_t record_index, bool has_client)
    : table_(std::move(table)),
      at_(*table_, record_index),
      next_(at_),
      history_(at_),
      values_(at_),
      claim_(at_, next_),
      derives_(at_.table.layout().gives_next()),
      stacks_(at_.table.layout().stack() > 1),
      has_mutables_(at_.table.layout().mutable_bytes() != 0),
      is_plain_(!derives_ && !at_.table.layout().uses_heap() && at_.table.header().spare_rows == 0),
      fetched_bytes_(at_.table.layout().word_is_embedded() ? at_.table.header().row_bytes : 0),
      is_bare_(is_plain_ && at_.table.width() == 1 && !at_.table.given() && !at_.table.checksums() && !has_mutables_),
      has_client_(has_client) {
    for (const Field& field : at_.table.layout().fields())
        row_moves_.push_back({field.offset, field.bytes, nullptr, 0});
    at_.origin = at_.table.counters().origin_ticket.value.load(std::memory_order_acquire);
    if (at_.record.origin.load(std::memory_order_relaxed) != at_.origin) {
        at_.record.live.store(0, std::memory_order_relaxed);
        at_.record.gone.store(0, std::memory_order_relaxed);
        at_.record.origin.store(at_.origin, std::memory_order_release);
    }
    claim_.resume();
    if (!has_client_) return;
    ClientRows client(at_.record);
    accepted_.store(client.accepted());
    client.touch(ClientRows::next_stamp(at_.table));
    if (stacks_) history_.expect_episodes_inside();
}

Writer::~Writer() {
    try {
        close();
    } catch (const Error&) {
        // No space: the next observations of its newest rows stay where they wait.
    }
}

// (Inlined by order, as check_usable() and append_locked(): with several callers they would be calls, which every add
// pays for.)
inline __attribute__((always_inline)) void Writer::notice_clear() {
    const std::uint64_t origin = at_.table.counters().origin_ticket.value.load(std::memory_order_acquire);
    if (origin != at_.origin) [[unlikely]]
        follow_clear(origin);
}

[[gnu::noinline, gnu::cold]] void Writer::follow_clear(std::uint64_t origin) {
    at_.origin = origin;
    at_.record.live.store(0, std::memory_order_relaxed);
    at_.record.gone.store(0, std::memory_order_relaxed);
    at_.record.origin.store(origin, std::memory_order_release);
    std::fill(at_.open_rows.begin(), at_.open_rows.end(), 0);
    if (at_.length != 0 && at_.ticket < origin) {
        claim_.let_go();
        at_.ticket = kNone;
        at_.length = at_.head = 0;
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
    if (batch.rows <= at_.length - at_.head) [[likely]]
        return false;
    return at_.table.are_adds_held();
}

inline __attribute__((always_inline)) void Writer::check_usable() {
    at_.table.check_open();
    if (closed_) throw Error(ErrorKind::closed, "add(): this writer is closed; take a new one with buf.writer()");
    notice_clear();
}

inline __attribute__((always_inline)) void Writer::append_locked(const RowBatch& batch, bool waits) {
    check_usable();
    if (is_bare_ && batch.rows == 1 && at_.head != at_.length) [[likely]]
        return append_row(batch);
    append_all(batch, nullptr, waits);
}

void Writer::append(const RowBatch& batch, Deadline deadline) {
    for (;;) {
        {
            const auto guard = lock(deadline);
            if (!is_held_back(batch)) return append_locked(batch, true);
        }
        wait_for_saver(deadline);
    }
}

void Writer::append(const RowBatch& batch, std::uint64_t* serials, Deadline deadline) {
    for (;;) {
        {
            const auto guard = lock(deadline);
            if (!is_held_back(batch)) return append_named(batch, serials, true);
        }
        wait_for_saver(deadline);
    }
}

void Writer::wait_for_saver(Deadline deadline) {
    if (at_.table.wait_while_held(deadline, true)) return;
    throw Error(ErrorKind::not_ready,
                "add(): a save() holds adds back and was not done before the timeout; give a longer timeout=");
}

bool Writer::try_append(const RowBatch& batch) {
    std::unique_lock<std::timed_mutex> guard(mutex_, std::try_to_lock);
    if (!guard.owns_lock() || is_held_back(batch)) [[unlikely]]
        return false;
    append_locked(batch, false);
    return true;
}

bool Writer::try_append(const RowBatch& batch, std::uint64_t* serials) {
    std::unique_lock<std::timed_mutex> guard(mutex_, std::try_to_lock);
    if (!guard.owns_lock() || is_held_back(batch)) return false;
    append_named(batch, serials, false);
    return true;
}

std::uint64_t Writer::append_once(const RowBatch& batch, std::uint64_t first_row, std::uint64_t* serials,
                                  Deadline deadline) {
    for (;;) {
        {
            const auto guard = lock(deadline);
            if (!is_held_back(batch)) {
                check_usable();
                return append_later(batch, first_row, serials, true);
            }
        }
        wait_for_saver(deadline);
    }
}

bool Writer::try_append_once(const RowBatch& batch, std::uint64_t first_row, std::uint64_t* serials,
                             std::uint64_t& accepted) {
    const std::unique_lock<std::timed_mutex> guard(mutex_, std::try_to_lock);
    if (!guard.owns_lock() || is_held_back(batch)) return false;
    check_usable();
    accepted = append_later(batch, first_row, serials, false);
    return true;
}

void Writer::append_named(const RowBatch& batch, std::uint64_t* serials, bool waits) {
    check_usable();
    append_all(batch, serials, waits);
}

// Of a group that was written at the head.
void Writer::tell_serials(const RowBatch& batch, std::size_t first, std::size_t count, std::uint64_t* serials) const {
    const std::uint64_t serial = at_.ticket * at_.table.block_rows() + at_.head;
    for (std::size_t i = 0; i < count; ++i) serials[first + i] = is_void(batch, first + i) ? kNone : serial + i;
}

inline __attribute__((always_inline)) void Writer::append_groups(const RowBatch& batch, std::uint64_t* serials,
                                                                 std::size_t& done, std::size_t end, bool waits) {
    while (done < end) {
        if (at_.head == at_.length) {
            claim_.claim(waits);
            notice_clear();
            if (at_.head == at_.length) continue;  // cleared between the two: the block just claimed is history
        }
        std::size_t count = std::min<std::size_t>({kGroupRows, end - done, at_.length - at_.head});
        // Where a row looks at its env's last one, a group is of one step.
        if (derives_ || stacks_)
            count = std::min<std::size_t>(count, at_.open_rows.size() - at_.head % at_.open_rows.size());
        write_group(batch, done, count);
        if (serials) tell_serials(batch, done, count, serials);
        done += count;
        at_.head += count;
        if (at_.head % at_.table.width() == 0) at_.table.set_position(at_.record, at_.ticket, at_.head);
        SHARPWAVE_FAULT(head_moved);
        // A full block is let go at once, not at the next add: small rings never wait for an idle writer. With derived
        // observations it is kept, for its heap takes the final ones of rows whose successor never comes.
        if (at_.head == at_.length && !derives_) claim_.let_go();
    }
}

// Apart from append_locked(), so that the shortest way of a row has no part in its frame.
[[gnu::noinline]] void Writer::append_all(const RowBatch& batch, std::uint64_t* serials, bool waits) {
    if (stacks_) history_.check(batch);
    std::size_t done = 0;
    try {
        append_groups(batch, serials, done, batch.rows, waits);
    } catch (const Error& error) {
        // What earlier groups wrote over is gone: they cannot be taken back, so they are told.
        if (done == 0) throw;
        throw Error(error.kind(), std::string(error.what()) + "; the first " + std::to_string(done) + " of the " +
                                      std::to_string(batch.rows) + " rows were added, the others were not");
    }
}

// Rows [done, end) of a piece, which lie in the block that is held.
[[gnu::noinline, gnu::cold]] void Writer::append_held(const RowBatch& batch, std::uint64_t* serials, std::size_t& done,
                                                      std::size_t end, bool waits) {
    append_groups(batch, serials, done, end, waits);
}

// False: cleared meanwhile, the block just claimed is history.
bool Writer::hold_block(bool waits) {
    if (at_.head != at_.length) return true;
    claim_.claim(waits);
    notice_clear();
    return at_.head != at_.length;
}

// The shortest way of a row: what append_locked() and write_group() come to where there is nothing else to look at.
void Writer::append_row(const RowBatch& batch) {
    const std::uint64_t slot = at_.block * at_.table.block_rows() + at_.head;
    const std::uint64_t serial = at_.ticket * at_.table.block_rows() + at_.head;
    const std::uint8_t given = batch.flags ? batch.flags[0] : 0;
    const bool is_void = (given & kRowVoid) != 0;
    std::uint64_t flags = 0;
    if (is_void) {
        at_.table.mark_uneven(at_.block);  // before the head says that the row is done
    } else {
        if (at_.open_rows[0] == 0) flags |= kEpisodeStart;
        flags |= word_flags(given);
        at_.open_rows[0] = flags & kEndMask ? 0 : serial + 1;
    }
    for (std::size_t f = 0; f < row_moves_.size(); ++f)
        row_moves_[f].flat = const_cast<std::byte*>(batch.fields[f].flat);

    Word word(at_.table.word(slot));
    const bool was_live = is_live(word.load(std::memory_order_relaxed), at_.table.least_word());
    word.store(make_word(serial, 0, kWriting), std::memory_order_relaxed);
    fence(std::memory_order_release);  // no payload byte before its word says WRITING
    SHARPWAVE_FAULT(row_writing);
    kernels().scatter(at_.table.view(), slot, 1, row_moves_.data(), row_moves_.size());
    SHARPWAVE_FAULT(row_copied);
    // Written last, with release: a reader that sees this word sees the whole row.
    word.store(make_word(serial, flags, is_void ? kVoid : kCommitted), std::memory_order_release);
    SHARPWAVE_FAULT(row_committed);

    if (is_void == was_live) count(is_void ? -1 : 1);
    SHARPWAVE_FAULT(row_counted);
    if (is_void) {
        at_.record.voided.fetch_add(1, std::memory_order_relaxed);
    } else {
        add_to(at_.record.added, 1u);
        if (flags & kEndMask) at_.record.episodes.fetch_add(1, std::memory_order_relaxed);
    }
    at_.table.set_position(at_.record, at_.ticket, ++at_.head);
    SHARPWAVE_FAULT(head_moved);
    if (at_.head == at_.length) claim_.let_go();
}

// Live rows more, in the block and in the record. What both will be is said first: a process may die between the two,
// and the process that settles its writer goes on from there.
void Writer::count(std::int64_t gained) {
    BlockRecord& block = at_.table.block_record(at_.block);
    // Every store releases those before it: a process that sees one of them sees the earlier ones. (Plain on x86.)
    constexpr std::memory_order in_order = std::memory_order_release;
    const std::int64_t gone = is_plain_ ? 0 : at_.record.gone.load(std::memory_order_relaxed);
    const std::int64_t in_block = static_cast<std::int64_t>(block.live.load(std::memory_order_relaxed)) + gained;
    const std::int64_t in_record = at_.record.live.load(std::memory_order_relaxed) + gained - gone;
    at_.record.settled_block.store(in_block, in_order);
    at_.record.settled_live.store(in_record, in_order);
    at_.record.settling.store(at_.block + 1, in_order);
    if (is_plain_) {
        block.live.store(static_cast<std::uint64_t>(in_block), in_order);
    } else {
        // Other writers may retire rows of this block.
        block.live.fetch_add(static_cast<std::uint64_t>(gained), in_order);
    }
    SHARPWAVE_FAULT(row_half_counted);
    at_.record.live.store(in_record, in_order);
    SHARPWAVE_FAULT(count_stored);
    if (!is_plain_) at_.record.gone.store(0, in_order);
    at_.record.settling.store(0, in_order);
}

// Live rows that a group adds and takes away, and what its words will be.
struct Writer::Group {
    std::size_t first, count;  // rows of the batch
    std::uint64_t slot, serial;
    std::int64_t gained = 0;
    std::uint64_t voided = 0, ended = 0;
    std::uint64_t commit[kGroupRows];  // the words that the rows get when they are done
    std::uint64_t before[kGroupRows];  // with stacks: the env's open row before; 0: none
};

// What may fail comes first: nothing has changed yet. Then the rows around the group get what they need before its
// slots are written over.
void Writer::make_room(const RowBatch& batch, Group& group, FieldMove* moves) {
    const bool uses_heap = at_.table.layout().uses_heap();
    const std::uint64_t width = at_.open_rows.size();
    if (uses_heap) values_.pack(batch, group.first, group.count);
    if (derives_) next_.ensure_space(group.count);
    for (std::size_t i = 0; stacks_ && i < group.count; ++i) {
        if (history_.is_reset(group.first + i)) next_.end_unflagged((at_.head + i) % width);
    }
    if (at_.table.header().spare_rows) history_.retire_ahead(group.count);
    for (std::size_t i = 0; derives_ && i < group.count; ++i) {
        next_.leave_to_previous(group.slot + i, at_.heap);
        if (!is_void(batch, group.first + i)) next_.meet_previous(batch, group.first + i, (at_.head + i) % width);
    }
    if (!uses_heap) return;
    // The rows written over go now: what is lost for their bytes is lost early only elsewhere.
    const std::uint64_t least = at_.table.least_word();
    for (std::size_t i = 0; i < group.count; ++i) {
        Word word(at_.table.word(group.slot + i));
        group.gained -= is_live(word.load(std::memory_order_relaxed), least);
        word.store(make_word(group.serial + i, 0, kWriting), std::memory_order_relaxed);
    }
    values_.place(group.count, moves);
}

// Says WRITING in every word of the group and works out the words that the rows will get.
inline void Writer::begin_rows(const RowBatch& batch, Group& group) {
    const std::uint64_t least = at_.table.least_word(), width = at_.open_rows.size();
    const RowView view = at_.table.view();
    const std::byte* ahead = view.rows + (group.slot + kFetchedAhead) * view.stride;
    for (std::size_t i = 0; i < group.count; ++i) {
        for (std::uint64_t line = 0; line < fetched_bytes_; line += 64) __builtin_prefetch(ahead + line, 1, 2);
        ahead += view.stride;
        const std::uint64_t env = width == 1 ? 0 : (at_.head + i) % width;
        const std::uint8_t given = batch.flags ? batch.flags[group.first + i] : 0;
        std::uint64_t& open_row = at_.open_rows[env];
        std::uint64_t flags = open_row ? std::uint64_t{0} : kEpisodeStart;
        State state = kCommitted;
        if (given & kRowVoid) {
            state = kVoid;  // keeps the stride of its step; the episode neither starts nor goes on here
            flags = 0;
            group.before[i] = 0;
            ++group.voided;
        } else {
            flags |= word_flags(given);
            const bool is_over = (flags & kEndMask) != 0;
            ++group.gained;
            if (stacks_) {
                group.before[i] = open_row;
                if (history_.starts_over(group.first + i)) flags |= kNextStartsOver;
            }
            open_row = is_over ? 0 : group.serial + i + 1;
            group.ended += is_over;
        }
        if (float* priorities = at_.table.given()) {
            // Stored as the index stores it: negated, so that 0 bytes mean that none was given.
            std::atomic_ref<float>(priorities[group.slot + i])
                .store(batch.priorities ? -std::fabs(batch.priorities[group.first + i]) : 0.0f,
                       std::memory_order_relaxed);
        }
        group.commit[i] = make_word(group.serial + i, flags, state);
        Word word(at_.table.word(group.slot + i));
        const std::uint64_t old = word.load(std::memory_order_relaxed);
        group.gained -= is_live(old, least);
        word.store(make_word(group.serial + i, 0, kWriting), std::memory_order_relaxed);
    }
}

// What scatter() does, where some fields do not stand in the row.
void Writer::copy_apart(const RowBatch& batch, const Group& group, FieldMove* moves) const {
    const std::vector<Field>& fields = at_.table.layout().fields();
    std::size_t kept = 0;
    for (std::size_t f = 0; f < fields.size(); ++f) {
        if (!fields[f].is_mutable) moves[kept++] = moves[f];
    }
    kernels().scatter(at_.table.view(), group.slot, group.count, moves, kept);
    MutableValues(at_.table).begin_rows(at_.table, batch, group.first, group.count, group.slot, group.serial);
}

// Rows whose stacks lack frames, because the ring went round since their env's last rows: kept for the rows to come,
// not drawn.
void Writer::retire_incomplete(Group& group) {
    for (std::size_t i = 0; i < group.count; ++i) {
        if (state_of(group.commit[i]) == kVoid) continue;
        const bool lacks = history_.lacks_frames(group.first + i, (at_.head + i) % at_.open_rows.size(),
                                                 (group.commit[i] & kEndMask) != 0);
        if (!lacks && (group.before[i] == 0 || history_.is_whole(group.before[i] - 1))) continue;
        group.commit[i] |= kRetired;
        --group.gained;
        at_.table.mark_uneven(at_.block);
        at_.table.counters().rows_retired.value.fetch_add(1, std::memory_order_relaxed);
    }
}

// What goes beside the bytes of the rows: next observations and checksums.
void Writer::finish_rows(const RowBatch& batch, Group& group) {
    for (std::size_t i = 0; derives_ && i < group.count; ++i) {
        if (is_void(batch, group.first + i)) continue;
        next_.keep(batch, group.first + i, (at_.head + i) % at_.open_rows.size(), group.slot + i, group.serial + i,
                   group.commit[i]);
    }
    std::uint32_t* checksums = at_.table.checksums();
    for (std::size_t i = 0; checksums && i < group.count; ++i) {
        std::atomic_ref<std::uint32_t>(checksums[group.slot + i])
            .store(at_.table.row_checksum(group.slot + i, group.commit[i]), std::memory_order_relaxed);
    }
}

void Writer::write_group(const RowBatch& batch, std::size_t first, std::size_t count) {
    Group group;
    group.first = first;
    group.count = count;
    group.slot = at_.block * at_.table.block_rows() + at_.head;
    group.serial = at_.ticket * at_.table.block_rows() + at_.head;
    const std::vector<Field>& fields = at_.table.layout().fields();
    FieldMove few[32];
    std::vector<FieldMove> many;
    FieldMove* moves = few;
    if (fields.size() > 32) moves = (many.resize(fields.size()), many.data());
    for (std::size_t f = 0; f < fields.size(); ++f) {
        const FieldInput& input = batch.fields[f];
        moves[f] = {fields[f].offset, fields[f].bytes,
                    const_cast<std::byte*>(input.flat) + (input.starts ? 0 : first * input.stride), input.stride};
    }
    if (!is_plain_) make_room(batch, group, moves);
    begin_rows(batch, group);
    if (stacks_) retire_incomplete(group);
    if (group.voided) at_.table.mark_uneven(at_.block);
    fence(std::memory_order_release);  // no payload byte before its word says WRITING
    SHARPWAVE_FAULT(row_writing);
    if (has_mutables_) [[unlikely]] {
        copy_apart(batch, group, moves);
    } else {
        kernels().scatter(at_.table.view(), group.slot, count, moves, fields.size());
    }
    finish_rows(batch, group);
    SHARPWAVE_FAULT(row_copied);
    for (std::size_t i = 0; i < count; ++i) {
        if (i == count / 2) SHARPWAVE_FAULT(row_half_committed);
        // Written last, with release: a reader that sees this word sees the whole row.
        Word(at_.table.word(group.slot + i)).store(group.commit[i], std::memory_order_release);
    }
    SHARPWAVE_FAULT(row_committed);

    if (group.gained || !is_plain_) this->count(group.gained);
    SHARPWAVE_FAULT(row_counted);
    add_to(at_.record.added, count - group.voided);
    if (group.voided) at_.record.voided.fetch_add(group.voided, std::memory_order_relaxed);
    if (group.ended) at_.record.episodes.fetch_add(group.ended, std::memory_order_relaxed);
}

void Writer::end_open_episodes() {
    if (derives_ && at_.length != 0) {
        settle_waiting(at_.table, at_.heap, at_.pair_of(0));
        return;
    }
    for (std::uint64_t open_row : at_.open_rows) {
        if (open_row) at_.table.end_episode(open_row - 1);
    }
}

void Writer::close() {
    // A forked child never writes through its parent's writer, and may have got its mutex locked.
    if (at_.table.is_from_another_process()) return;
    const auto guard = lock(Deadline::never());
    if (closed_) return;
    closed_ = true;
    // Whatever happens to the last rows, the place is given back.
    const auto give_back = [&](std::uint64_t owner) {
        claim_.let_go();
        if (has_client_) ClientRows(at_.record).touch(ClientRows::next_stamp(at_.table));
        at_.record.owner.store(owner, std::memory_order_release);
    };
    try {
        end_open_episodes();
        at_.table.counters().late_ends.value.fetch_add(1, std::memory_order_acq_rel);
        SHARPWAVE_FAULT(close_ended);
    } catch (...) {
        // No space for final observations: rows find theirs where they wait, so the record stays taken, without an
        // owner.
        give_back(kParked);
        throw;
    }
    give_back(0);
}

}  // namespace sharpwave
