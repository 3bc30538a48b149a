// Rows over a storage: the block ring with its words, serials and episode boundaries. Knows nothing of sampling.
//
// The ring is cut into blocks. A writer claims one at a time by taking a ticket (one atomic increment), so writers
// never share a row and capacity is never divided between them. serial = ticket * block_rows + offset, and
// slot = serial mod (blocks * block_rows): a handle becomes a place by arithmetic, and one writer alone sees an exact
// ring of `capacity` rows. Reading takes no lock: see table/copy.h.
//
// Threads: everything here may be called from any thread at any time. A Table is used by the process that opened it;
// in a forked child every call fails with ErrorKind::closed.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/divide.h"
#include "base/process.h"
#include "base/wait.h"
#include "schema/schema.h"
#include "storage/format.h"
#include "storage/presence.h"
#include "storage/shared_lock.h"
#include "storage/storage.h"
#include "table/copy.h"
#include "table/racy.h"

namespace sharpwave {

class Writer;

// Names a client that numbers its rows: see table/client_rows.h.
using ClientToken = std::array<std::uint64_t, 2>;

// The columns that a table has for an index over its rows. The index itself is the sampling room's.
struct IndexColumns {
    bool is_by_priority = false;  // adds may bring priorities
    bool has_index = false;       // though no priorities: the view or the order of drawing needs one
    bool numbers_steps = false;   // rows are numbered within their episodes
    bool counts_reads = false;    // rows leave the index after a number of reads
};

struct TableConfig {
    std::vector<Field> fields;
    std::uint64_t capacity = 0;
    std::uint64_t width = 1;  // rows of one step (num_envs)
    std::uint64_t max_writers = 64;
    std::uint64_t seed = 0;
    std::uint64_t block_rows = 0;  // 0: chosen from the others
    bool checksums = false;
    IndexColumns index;
    // Sets the counters that rooms above this one own, before the table can be seen; null: they start as
    // storage/real_counters.h says.
    std::function<void(format::Counters&)> set_counters;
    std::string description;  // JSON that the engine keeps and does not read
};

struct TableStats {
    std::uint64_t size, capacity, rows_added, rows_voided, episodes, rows_sampled, sample_calls, redraws;
    std::uint64_t writers_taken, max_writers, blocks, block_rows, row_bytes, payload_bytes, storage_bytes;
    std::uint64_t incarnation, recoveries, writers_reclaimed, index_takeovers, rows_lost, seed;
    std::uint64_t resets_unflagged, rows_retired, updates_applied, updates_stale, heap_bytes;
    std::uint64_t shuffle_epoch, rows_consumed;
    const char* copy_kernel;
};

class Table : public std::enable_shared_from_this<Table> {
public:
    // An empty path is anonymous memory.
    static std::shared_ptr<Table> create(const TableConfig& config, const std::string& path = "", bool replace = false);

    // Opens a live file in place. The first opener checks it before any other process reads: after a crash it repairs
    // what was half done, and with `verify` it checks every row. A wrong one is ErrorKind::storage; with `recover`, and
    // after a power loss, it is dropped and counted. `recover` also takes a file that lost its end or whose records
    // make no sense. Waits for other openers until the deadline, then ErrorKind::not_ready.
    struct Opening {
        bool recover = false;
        bool verify = true;
        Deadline deadline = Deadline::never();
    };
    static std::shared_ptr<Table> attach(const std::string& path, const Opening& opening);
    static std::shared_ptr<Table> attach(const std::string& path) { return attach(path, Opening{}); }

    // Process ids of all openings of a live file, for messages.
    static std::vector<std::uint64_t> holders(const std::string& path);

    // Reads a snapshot into anonymous memory. Every byte is checked; serials go on where they stopped. With `recover`
    // damage costs the rows it hit, and the index if it hit that.
    static std::shared_ptr<Table> load(const std::string& path, bool recover = false);

    ~Table();
    Table(const Table&) = delete;
    Table& operator=(const Table&) = delete;

    const RowLayout& layout() const { return *layout_; }
    const std::string& path() const { return storage_.path(); }
    std::string description() const;
    std::uint64_t capacity() const { return header_->capacity; }
    std::uint64_t width() const { return header_->width; }
    std::uint64_t seed() const { return header_->seed; }
    std::uint64_t size() const;                                   // O(writers)
    std::uint64_t lost_at_open() const { return lost_at_open_; }  // rows that opening it dropped
    std::uint64_t huge_page_bytes() const { return storage_.huge_page_bytes(); }
    TableStats stats();  // gives back the records of dead writers first

    // Claims a writer record, first giving back those of processes that died. All taken: ErrorKind::buffer_full. Those
    // without a client's token come first, then the one whose client was here longest ago: that token is forgotten.
    std::unique_ptr<Writer> writer();
    // The same for a client's rows, after those accepted before. A token of a live writer is ErrorKind::not_ready.
    std::unique_ptr<Writer> writer(const ClientToken& token);
    std::optional<std::uint64_t> accepted(const ClientToken& token);  // rows; none: the token is not known
    std::vector<std::pair<ClientToken, std::uint64_t>> clients();

    // ---- reading ------------------------------------------------------------------------------------------------

    // Slots below this may hold rows. Exact for one writer before the ring wraps.
    std::uint64_t visible_slots() const;

    // Asks for the first lines of a row; costs next to nothing and promises nothing.
    void prefetch(std::uint64_t slot) const {
        const std::byte* row = rows_ + slot * header_->row_bytes;
        const std::uint64_t reach = std::min<std::uint64_t>(header_->row_bytes, 256);
        for (std::uint64_t line = 0; line < reach; line += 64) __builtin_prefetch(row + line, 0, 2);
        __builtin_prefetch(row + reach - 1, 0, 2);
    }

    // Serials of the live rows, oldest first.
    std::vector<std::uint64_t> live_serials() const;

    // The env's next row in the same episode, skipping steps that it was masked out of; none where the episode ends or
    // nothing has been added yet. Slot and word are in and out; unchanged when there is none.
    bool successor(std::uint64_t& slot, std::uint64_t& word) const {
        // Mostly the next step stands beside it.
        const std::uint64_t next = slot + header_->width;
        if (!(word & format::kEndMask) && block_of(slot) == block_of(next) && next < header_->slots) {
            const std::uint64_t seen = std::atomic_ref<std::uint64_t>(this->word(next)).load(std::memory_order_acquire);
            constexpr std::uint64_t kStops = format::kStateMask | format::kEpisodeStart;
            if (format::serial_of(seen) != format::serial_of(word) + header_->width) return false;
            if ((seen & kStops) == format::kCommitted) {
                slot = next;
                word = seen;
                return true;
            }
        }
        return far_successor(slot, word, false);
    }

    // The same backwards; none at the episode's start, and where the row before is `gone`. With `across`, the row
    // before in the env's stream, whatever episode it is of.
    bool predecessor(std::uint64_t& slot, std::uint64_t& word, bool& gone, bool across = false) const {
        gone = false;
        if (!across && (word & format::kEpisodeStart)) return false;
        const std::uint64_t before = slot - header_->width;
        if (slot >= header_->width && block_of(slot) == block_of(before)) {
            const std::uint64_t seen = load_word(before);
            if (format::serial_of(seen) == format::serial_of(word) - header_->width &&
                (seen & format::kStateMask) == format::kCommitted && seen >= least_word()) {
                slot = before;
                word = seen;
                return true;
            }
        }
        return far_predecessor(slot, word, gone);
    }

    // The env's next row, whatever episode it is of.
    bool stream_successor(std::uint64_t& slot, std::uint64_t& word) const { return far_successor(slot, word, true); }

    // ---- life ---------------------------------------------------------------------------------------------------

    // Forgets every row in O(1); serials go on. Rows of an add that runs meanwhile may be forgotten too.
    void clear();

    // Writes a snapshot to `path`, whole or not at all, while writers go on. `incremental`: where there is one already,
    // of this table, only what has changed since, into a file beside it.
    void save(const std::string& path, bool incremental = false);
    void flush() const { storage_.flush(); }

    // From now on every call but the closing of writers fails; the bytes are let go with the last user.
    void close() { closed_.store(true, std::memory_order_relaxed); }
    bool is_closed() const { return closed_.load(std::memory_order_relaxed); }
    bool is_from_another_process() const { return generation_ != process_generation(); }

    // Throws ErrorKind::closed after close() and in a forked child.
    void check_open() const {
        if (is_closed() || is_from_another_process()) [[unlikely]]
            refuse();
    }

    // ---- for the rooms beside this one ----------------------------------------------------------------------------
    format::Counters& counters() const { return *counters_; }
    RowView view() const;
    format::Runtime& runtime() const { return *reinterpret_cast<format::Runtime*>(region(format::kRuntime)); }
    std::uint32_t seat() const { return presence_ ? presence_->seat() : 0; }
    std::uint64_t tag() const { return presence_ ? presence_->tag() : 1; }
    const Presence* presence() const { return presence_.get(); }           // null: in memory
    bool is_alone() const { return !presence_ || presence_->is_alone(); }  // no other process has it open
    // Whether the opening that was given a seat still has it; in memory there is but one.
    bool is_alive(std::uint32_t seat, std::uint64_t tag) const { return !presence_ || presence_->is_alive(seat, tag); }
    // Adds flags to the word of a row that is still there and has none of `unless`; whether it did.
    bool add_flags(std::uint64_t slot, std::uint64_t serial, std::uint64_t flags, std::uint64_t unless = 0);
    void end_episode(std::uint64_t serial);  // flags the row as truncated by the engine, if it is still there
    std::uint64_t blocks() const { return header_->blocks; }
    std::uint64_t block_rows() const { return header_->block_rows; }
    std::uint64_t block_length(std::uint64_t block) const;  // the last block may be short
    std::uint64_t least_word() const;                       // smaller words belong to cleared rows
    std::uint64_t& word(std::uint64_t slot) const;
    std::uint64_t load_word(std::uint64_t slot, std::memory_order order = std::memory_order_acquire) const {
        return std::atomic_ref<std::uint64_t>(word(slot)).load(order);
    }
    std::uint32_t row_checksum(std::uint64_t slot, std::uint64_t word) const;
    std::byte* region(format::RegionId id) const { return storage_.data() + header_->regions[id].offset; }
    float* given() const { return given_; }  // null: no priorities
    bool has_index() const { return header_->sampler != 0; }
    format::EpisodePlace* episodes() const {  // null: rows are not numbered
        return header_->columns & format::kEpisodesColumn
                   ? reinterpret_cast<format::EpisodePlace*>(region(format::kEpisodes))
                   : nullptr;
    }
    std::uint32_t* reads() const {  // null: reads are not counted
        return header_->columns & format::kReadsColumn ? reinterpret_cast<std::uint32_t*>(region(format::kReads))
                                                       : nullptr;
    }
    // The index lock, while it lives. Where its last owner died inside, the index is marked to be made anew.
    //
    // A lock that is free is taken at once. Otherwise the caller yields, until the lock is given back, and waits until
    // the deadline: ErrorKind::not_ready names the process that holds it. Calls hold it for some microseconds, for 100
    // ms at 1M rows while the index is made anew: even a deadline that is over waits kLockGrace.
    class IndexLock {
    public:
        explicit IndexLock(Table& table, Deadline deadline = Deadline::never());
        ~IndexLock();
        IndexLock(const IndexLock&) = delete;
        IndexLock& operator=(const IndexLock&) = delete;

    private:
        SharedLock::Taken wait(Deadline deadline);
        Table& table_;
        Yield yield_;  // ends after the lock: nothing is waited for under it
    };
    static constexpr double kLockGrace = 0.05;

    // The same for writes of mutable fields, one at a time. Readers and adds do not take it, save() does for its cut.
    class WriteLock {
    public:
        explicit WriteLock(Table& table, Deadline deadline = Deadline::never());
        ~WriteLock();
        WriteLock(const WriteLock&) = delete;
        WriteLock& operator=(const WriteLock&) = delete;

    private:
        Table& table_;
        Yield yield_;  // ends after the lock: nothing is waited for under it
    };
    std::uint64_t block_of(std::uint64_t slot) const { return by_block_.quotient(slot); }
    std::uint64_t rows_left(std::uint64_t slot) const {  // in its block, with itself
        const std::uint64_t block = block_of(slot);
        return block_length(block) - (slot - block * header_->block_rows);
    }
    std::uint64_t slot_of(std::uint64_t serial) const { return serial % (header_->blocks * header_->block_rows); }

    // Where the next observation of a row is, for rows that gives_next(): a place in the heap when the row's word says
    // so, else the number of its writer's and env's pair of waiting places.
    std::uint64_t& final_place(std::uint64_t slot) const { return finals_[slot]; }
    std::byte* waiting(std::uint64_t pair, std::uint64_t half) const {
        return region(format::kWaiting) + (pair * 2 + half) * header_->waiting_bytes;
    }

    // Writers wait before they claim a block, while it lives: at most so many seconds, and not longer than this process
    // lives.
    class AddHold {
    public:
        AddHold(Table& table, double seconds);
        ~AddHold();
        AddHold(const AddHold&) = delete;
        AddHold& operator=(const AddHold&) = delete;

    private:
        Table& table_;
        std::uint64_t until_;
    };
    bool are_adds_held() const { return hold().until.load(std::memory_order_acquire) != 0; }
    // False: the deadline is over first. Ended by signals, unless it waits in the middle of an add.
    bool wait_while_held(Deadline deadline, bool is_interruptible);

    // Gives the bytes of a file's sparse part their space; lack of it is ErrorKind::storage.
    void ensure(const std::byte* place, std::uint64_t bytes) {
        if (storage_.is_file()) storage_.ensure(static_cast<std::uint64_t>(place - storage_.data()), bytes);
    }

    // Whether these bytes of a file were never written. Reading them could need space that is not there.
    bool is_hole(const std::byte* place, std::uint64_t bytes) const {
        return storage_.is_in_memory() && storage_.is_hole(static_cast<std::uint64_t>(place - storage_.data()), bytes);
    }

    // Takes the row that `word` names out of the drawable ones; true if it was. Retired rows still serve their
    // neighbours' stacks. Its slot may belong to another writer by now: then nothing happens.
    bool retire(std::uint64_t slot, std::uint64_t word, std::uint64_t least, format::WriterRecord& by);

    // Not all rows of this block count: see BlockRecord::uneven.
    void mark_uneven(std::uint64_t block) {
        const std::uint64_t ticket = blocks_[block].ticket.load(std::memory_order_relaxed);
        blocks_[block].uneven.store(static_cast<std::uint32_t>(ticket) + 1, std::memory_order_release);
    }
    // A row that was done has changed: an incremental snapshot takes the block again.
    void mark_changed(std::uint64_t block) { blocks_[block].changed.fetch_add(1, std::memory_order_release); }
    bool is_whole(std::uint64_t block, std::uint64_t ticket, std::uint64_t begin, std::uint64_t end) const;
    bool is_uneven(std::uint64_t block, std::uint64_t ticket) const {
        return blocks_[block].uneven.load(std::memory_order_acquire) == static_cast<std::uint32_t>(ticket) + 1;
    }

    // The bytes of a row are about to be written over: it may not be used any more. Returns how many live rows went,
    // with those whose stacks need it.
    std::int64_t lose(std::uint64_t serial, format::WriterRecord& by);
    std::uint32_t* checksums() const { return checksums_; }
    format::Position position(std::uint64_t writer) const {
        return unpacked(writers_[writer].position.load(std::memory_order_acquire));
    }
    format::Position unpacked(std::uint64_t position) const { return format::unpack(position, head_bits_); }
    std::uint64_t packed(std::uint64_t ticket, std::uint64_t head) const {
        return format::pack(ticket, head, head_bits_);
    }
    void set_position(format::WriterRecord& record, std::uint64_t ticket, std::uint64_t head) {
        record.position.store(format::pack(ticket, head, head_bits_), std::memory_order_release);
    }
    // Whether a writer goes on in the block that its record's last one left half full: one among the newest, as many as
    // there have been writers. Rows written into an older one would leave with its turn, before their time.
    bool is_worth_filling(const format::Position& position) const;
    format::WriterRecord& writer_record(std::uint64_t index) const { return writers_[index]; }
    format::BlockRecord& block_record(std::uint64_t index) const { return blocks_[index]; }
    std::uint64_t max_writers() const { return header_->max_writers; }
    const format::Header& header() const { return *header_; }
    const Storage& storage() const { return storage_; }

private:
    class Retiring;
    Table(Storage storage, RowLayout layout);
    // Takes a free record for `owner` and returns its number; its client is forgotten.
    std::uint64_t take_record(std::uint64_t owner);
    std::unique_ptr<Writer> make_writer(std::uint64_t record, const ClientToken* client);
    bool far_predecessor(std::uint64_t& slot, std::uint64_t& seen, bool& gone) const;
    bool far_successor(std::uint64_t& slot, std::uint64_t& word, bool across) const;
    [[noreturn]] void refuse() const;
    format::Hold& hold() const { return runtime().hold; }
    void take_off(std::uint64_t block, format::WriterRecord& by);
    SharedLock& shared_lock() const { return *reinterpret_cast<SharedLock*>(runtime().index_lock); }
    SharedLock& write_lock() const { return *reinterpret_cast<SharedLock*>(runtime().write_lock); }

    // What the first opener does: see attach().
    void look_over(const Opening& opening, bool remakes);
    void check_rows(std::uint64_t left_as) const;
    void mend(const Opening& opening, bool remakes, bool was_cut_off, bool is_seal_broken);

    Storage storage_;
    std::unique_ptr<RowLayout> layout_;
    std::unique_ptr<Presence> presence_;
    std::atomic<bool> closed_{false};
    std::uint64_t generation_;

    format::Header* header_ = nullptr;
    format::Counters* counters_ = nullptr;
    format::WriterRecord* writers_ = nullptr;
    format::BlockRecord* blocks_ = nullptr;
    std::byte* rows_ = nullptr;
    std::byte* words_ = nullptr;
    std::uint64_t word_stride_ = 0;
    std::uint32_t* checksums_ = nullptr;
    float* given_ = nullptr;
    Divider by_block_;
    unsigned head_bits_ = 0;
    std::uint64_t lost_at_open_ = 0;
    bool is_settled_ = false;  // a file: it may be called clean when this is the last one out
    std::uint64_t* finals_ = nullptr;
};

inline std::uint64_t& Table::word(std::uint64_t slot) const {
    return *reinterpret_cast<std::uint64_t*>(words_ + slot * word_stride_);
}

inline std::uint64_t Table::block_length(std::uint64_t block) const {
    const std::uint64_t begin = block * header_->block_rows;
    return std::min(header_->block_rows, header_->slots - begin);
}

inline std::uint64_t Table::least_word() const {
    const std::uint64_t ticket = counters_->origin_ticket.value.load(std::memory_order_acquire);
    return ticket * header_->block_rows << format::kSerialShift;
}

inline RowView Table::view() const { return {rows_, header_->row_bytes, words_, word_stride_}; }

}  // namespace sharpwave
