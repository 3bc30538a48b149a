#include "table/writer.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "base/error.h"

namespace sharpwave {

using namespace format;

namespace {

using Word = std::atomic_ref<std::uint64_t>;

// Rows between two commits. Small, so that readers miss few rows and a kill loses few.
constexpr std::size_t kGroupRows = 16;

}  // namespace

Writer::Writer(std::shared_ptr<Table> table, std::uint64_t record_index)
    : table_(std::move(table)),
      record_(table_->writer_record(record_index)),
      owner_(static_cast<std::uint32_t>(record_index + 1)),
      open_rows_(table_->width(), 0) {
    record_.participant = table_->seat();
    record_.owner_pid = static_cast<std::uint64_t>(getpid());
    epoch_ = table_->counters().epoch.value.load(std::memory_order_acquire);
    if (record_.epoch.load(std::memory_order_relaxed) != epoch_) {
        record_.live.store(0, std::memory_order_relaxed);
        record_.epoch.store(epoch_, std::memory_order_release);
    }
    // Go on in the block that the record's last writer left half full, while it is still among the newest: writers
    // that live for one episode must not leave the ring full of old tails. An older block is left to its turn.
    const std::uint64_t ticket = record_.ticket.load(std::memory_order_relaxed);
    if (ticket == kNone) return;
    const std::uint64_t head = record_.head.load(std::memory_order_relaxed);
    const std::uint64_t block = ticket % table_->blocks();
    const std::uint64_t next = table_->counters().next_ticket.value.load(std::memory_order_acquire);
    const std::uint64_t origin = table_->counters().origin_ticket.value.load(std::memory_order_acquire);
    if (ticket < origin || next - ticket > 2 * table_->max_writers() || head >= table_->block_length(block)) return;
    std::uint32_t nobody = 0;
    BlockRecord& record = table_->block_record(block);
    if (!record.owner.compare_exchange_strong(nobody, owner_, std::memory_order_acq_rel)) return;
    if (record.ticket.load(std::memory_order_relaxed) == ticket) {
        take_block(ticket, head);
    } else {
        record.owner.store(0, std::memory_order_release);
    }
}

Writer::~Writer() { close(); }

void Writer::take_block(std::uint64_t ticket, std::uint64_t head) {
    ticket_ = ticket;
    block_ = ticket % table_->blocks();
    head_ = head;
    length_ = table_->block_length(block_);
}

void Writer::claim_block() {
    Counters& counters = table_->counters();
    // A block that another writer still fills is passed over: its ticket stays without rows.
    for (std::uint64_t tries = 0; tries < 2 * table_->blocks(); ++tries) {
        const std::uint64_t ticket = counters.next_ticket.value.fetch_add(1, std::memory_order_acq_rel);
        BlockRecord& block = table_->block_record(ticket % table_->blocks());
        std::uint32_t nobody = 0;
        if (!block.owner.compare_exchange_strong(nobody, owner_, std::memory_order_acq_rel)) continue;
        const std::uint64_t origin = counters.origin_ticket.value.load(std::memory_order_acquire);
        const std::uint64_t last = block.ticket.load(std::memory_order_relaxed);
        if (last == kNone || last < origin) block.live.store(0, std::memory_order_relaxed);
        block.previous_ticket.store(ticket_, std::memory_order_relaxed);
        block.next_ticket.store(kNone, std::memory_order_relaxed);
        block.ticket.store(ticket, std::memory_order_release);
        if (ticket_ != kNone) {
            BlockRecord& previous = table_->block_record(ticket_ % table_->blocks());
            if (previous.ticket.load(std::memory_order_relaxed) == ticket_) {
                previous.next_ticket.store(ticket, std::memory_order_release);
            }
        }
        take_block(ticket, 0);
        record_.head.store(0, std::memory_order_relaxed);
        record_.ticket.store(ticket, std::memory_order_release);
        return;
    }
    throw Error(ErrorKind::buffer_full,
                "add(): other writers hold every block of the ring; give a larger capacity or close a writer");
}

void Writer::notice_clear() {
    const std::uint64_t epoch = table_->counters().epoch.value.load(std::memory_order_acquire);
    if (epoch == epoch_) [[likely]]
        return;
    epoch_ = epoch;
    record_.live.store(0, std::memory_order_relaxed);
    record_.epoch.store(epoch, std::memory_order_release);
    std::fill(open_rows_.begin(), open_rows_.end(), 0);
    const std::uint64_t origin = table_->counters().origin_ticket.value.load(std::memory_order_acquire);
    if (length_ != 0 && ticket_ < origin) {
        if (head_ != length_) table_->block_record(block_).owner.store(0, std::memory_order_release);
        ticket_ = kNone;
        length_ = head_ = 0;
    }
}

void Writer::append(const RowBatch& batch) {
    std::lock_guard<std::mutex> guard(mutex_);
    append_locked(batch);
}

bool Writer::try_append(const RowBatch& batch) {
    std::unique_lock<std::mutex> guard(mutex_, std::try_to_lock);
    if (!guard.owns_lock()) return false;
    append_locked(batch);
    return true;
}

void Writer::append_locked(const RowBatch& batch) {
    table_->check_open();
    if (closed_) throw Error(ErrorKind::closed, "add(): this writer is closed; take a new one with buf.writer()");
    notice_clear();
    for (std::size_t done = 0; done < batch.rows;) {
        if (head_ == length_) {
            claim_block();
            notice_clear();
            if (head_ == length_) continue;  // cleared between the two: the block just claimed is history
        }
        const std::size_t count = std::min<std::size_t>({kGroupRows, batch.rows - done, length_ - head_});
        write_group(batch, done, count);
        done += count;
        head_ += count;
        if (head_ % table_->width() == 0) record_.head.store(head_, std::memory_order_release);
        // A full block is let go at once, not at the next add: small rings never wait for an idle writer.
        if (head_ == length_) table_->block_record(block_).owner.store(0, std::memory_order_release);
    }
}

void Writer::write_group(const RowBatch& batch, std::size_t first, std::size_t count) {
    const RowView view = table_->view();
    const std::uint64_t least = table_->least_word();
    const std::uint64_t slot = block_ * table_->block_rows() + head_;
    const std::uint64_t serial = ticket_ * table_->block_rows() + head_;
    const std::uint64_t width = open_rows_.size();
    std::uint64_t commit[kGroupRows];
    std::int64_t gained = 0;
    std::uint64_t voided = 0, ended = 0;

    for (std::size_t i = 0; i < count; ++i) {
        const std::uint8_t given = batch.flags ? batch.flags[first + i] : 0;
        std::uint64_t& open_row = open_rows_[width == 1 ? 0 : (first + i) % width];
        std::uint64_t flags = open_row ? std::uint64_t{0} : kEpisodeStart;
        State state = kCommitted;
        if (given & kRowVoid) {
            state = kVoid;  // keeps the stride of its step; the episode neither starts nor goes on here
            flags = 0;
            ++voided;
        } else {
            if (given & kRowTerminated) flags |= kTerminated;
            if (given & kRowTruncated) flags |= kTruncated;
            const bool is_over = (flags & kEndMask) != 0;
            open_row = is_over ? 0 : serial + i + 1;
            ended += is_over;
            ++gained;
        }
        commit[i] = make_word(serial + i, flags, state);
        Word word(table_->word(slot + i));
        const std::uint64_t old = word.load(std::memory_order_relaxed);
        gained -= state_of(old) == kCommitted && old >= least;
        word.store(make_word(serial + i, 0, kWriting), std::memory_order_relaxed);
    }
#if !defined(SHARPWAVE_TSAN)
    std::atomic_thread_fence(std::memory_order_release);  // no payload byte before its word says WRITING
#endif
    const std::size_t field_count = table_->layout().fields().size();
    if (first == 0) {
        kernels().scatter(view, slot, count, batch.fields, field_count);
    } else {
        FieldMove shifted[32];
        std::vector<FieldMove> many;
        FieldMove* fields = shifted;
        if (field_count > 32) fields = (many.resize(field_count), many.data());
        for (std::size_t f = 0; f < field_count; ++f) {
            fields[f] = batch.fields[f];
            fields[f].flat += first * fields[f].bytes;
        }
        kernels().scatter(view, slot, count, fields, field_count);
    }
    if (std::uint32_t* checksums = table_->checksums()) {
        for (std::size_t i = 0; i < count; ++i) {
            std::atomic_ref<std::uint32_t>(checksums[slot + i])
                .store(table_->row_checksum(slot + i, serial + i), std::memory_order_relaxed);
        }
    }
    for (std::size_t i = 0; i < count; ++i) {
        // Written last, with release: a reader that sees this word sees the whole row.
        Word(table_->word(slot + i)).store(commit[i], std::memory_order_release);
    }

    BlockRecord& block = table_->block_record(block_);
    if (gained) {
        block.live.store(block.live.load(std::memory_order_relaxed) + static_cast<std::uint64_t>(gained),
                         std::memory_order_relaxed);
        record_.live.store(record_.live.load(std::memory_order_relaxed) + gained, std::memory_order_relaxed);
    }
    record_.added.store(record_.added.load(std::memory_order_relaxed) + count - voided, std::memory_order_relaxed);
    if (voided) record_.voided.fetch_add(voided, std::memory_order_relaxed);
    if (ended) record_.episodes.fetch_add(ended, std::memory_order_relaxed);
}

void Writer::end_open_episodes() {
    for (std::uint64_t open_row : open_rows_) {
        if (open_row) table_->end_episode(open_row - 1);
    }
}

void Writer::close() {
    // A forked child never writes through its parent's writer, and may have got its mutex locked.
    if (table_->is_from_another_process()) return;
    std::lock_guard<std::mutex> guard(mutex_);
    if (closed_) return;
    closed_ = true;
    end_open_episodes();
    if (length_ != 0 && head_ != length_) table_->block_record(block_).owner.store(0, std::memory_order_release);
    record_.taken.store(0, std::memory_order_release);
}

}  // namespace sharpwave
