// The bytes of a table, in memory and in a file alike: format version 2. docs/format.md says the same in prose;
// a test compares the two. Structures are plain, little-endian, and only ever grow into their reserved bytes.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "storage/format_words.h"

namespace sharpwave::format {

inline constexpr char kMagic[8] = {'S', 'H', 'R', 'P', 'W', 'A', 'V', 'E'};
inline constexpr std::uint32_t kVersion = 2;
inline constexpr std::uint32_t kEndianMark = 0x01020304;
inline constexpr std::uint64_t kPageBytes = 4096;
inline constexpr std::uint64_t kHugePageBytes = 2 << 20;

// ---- page 0: written once at creation, covered by `header_crc` ------------------------------------------------
struct Region {
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;  // 0: absent
};

enum RegionId : std::uint32_t {
    kRuntime,      // locks, wake-up words, participants; made anew by the first opener, never saved
    kCounters,     // the table's own counters
    kWriters,      // one WriterRecord a writer
    kBlocks,       // one BlockRecord a block
    kFields,       // one FieldRecord a field
    kDescription,  // JSON: how the face was built
    kRows,         // the records
    kWords,        // 8 bytes a row, where words are not embedded
    kChecksums,    // 4 bytes a row: CRC32C of serial and payload
    kPriorities,   // the index's head, its cursors, and priority and mass of each row
    kGiven,        // priorities given at add, float32 a row
    kTree,         // sums, largest priorities and smallest masses over them; made anew, never saved
    kEpisodes,     // 8 bytes a row: EpisodePlace; where the view asks for it
    kHeap,         // bytes of no fixed size, one heap a block; allocated as it fills
    kFinals,       // 8 bytes a row: where the final observation of an episode's last row stands in the heap
    kWaiting,      // the next observations of each writer's newest rows; allocated as it fills
    kReads,        // 4 bytes a row: how often it was given out; where rows leave after so many reads
    kDirty,        // incremental snapshots: 8 bytes a block that is in it, its number
    kTimes,        // reserved: 8 bytes a block, when it was claimed; zeros in this version
    kMutables,     // two places a row for the values of mutable fields: all first places, then all second ones
    kSelectors,    // 8 bytes a row: which of the two places holds
    kRegionCount = 24,
};

// An incremental snapshot holds what has changed since a whole one, which it stands beside.
enum Kind : std::uint32_t { kLive = 1, kSnapshot = 2, kIncrement = 3 };

struct Header {
    char magic[8];
    std::uint32_t version;
    std::uint32_t endian_mark;
    std::uint32_t kind;
    std::uint32_t header_crc;  // CRC32C of this page with this field 0
    std::uint64_t total_bytes;
    std::uint64_t capacity;    // rows that may be drawn
    std::uint64_t slots;       // rows that exist: capacity plus spare ones
    std::uint64_t spare_rows;  // slots less capacity: rows kept for the stacks of the oldest
    std::uint64_t block_rows;
    std::uint64_t blocks;
    std::uint64_t width;  // rows of one step (num_envs)
    std::uint64_t max_writers;
    std::uint64_t field_count;
    std::uint64_t row_bytes;  // stride
    std::uint64_t payload_offset;
    std::uint64_t seed;
    std::uint64_t created_ns;
    std::uint64_t saved_slots;  // snapshot: rows in kRows; live: equal to slots
    std::uint32_t word_is_embedded;
    std::uint32_t has_checksums;
    std::uint32_t sampler;   // 0 no index, 1 by priority, 2 an index without priorities of the user's
    std::uint32_t meta_crc;  // snapshot: CRC32C over counters, writers, blocks, fields, description, checksums
    std::uint32_t base_crc;  // incremental: header_crc of the snapshot that it goes with
    std::uint32_t columns;   // bits: 1 episodes, 2 reads
    std::uint8_t uuid[16];
    std::uint64_t block_heap_bytes;    // of each block's heap
    std::uint64_t block_finals_bytes;  // of those, the first ones: places for final observations
    std::uint64_t waiting_bytes;       // of one place in the waiting region
    std::uint32_t schema_crc;          // CRC32C over fields and description, which never change
    std::uint8_t reserved[228];
    Region regions[kRegionCount];
};
static_assert(sizeof(Header) <= kPageBytes);
static_assert(offsetof(Header, uuid) == 160 && offsetof(Header, regions) == 432);

// ---- the counters page: changes all the time, survives ------------------------------------------------------
struct alignas(64) Counter {
    std::atomic<std::uint64_t> value;
};

// What the last process that had a file open left. Clean: everything was on the disk before, and `seal` holds.
enum LeftAs : std::uint64_t { kOpen = 0, kClean = 1, kInRecovery = 2 };

// To at least `value`.
inline void raise(Counter& counter, std::uint64_t value) {
    std::uint64_t now = counter.value.load(std::memory_order_acquire);
    while (now < value && !counter.value.compare_exchange_weak(now, value, std::memory_order_acq_rel)) {
    }
}

struct Counters {
    Counter next_ticket;    // the block sequence number that the next claim gets; not below origin_ticket
    Counter call_number;    // the random stream's position: one a draw
    Counter rows_sampled;   // rows handed out
    Counter redraws;        // draws that met an empty, void or changing row
    Counter writers_used;   // records 0 .. value-1 have been used at least once
    Counter origin_ticket;  // rows of earlier blocks were cleared; a multiple of `blocks`
    Counter pace_origin;    // the origin_ticket that the pace counts from: see Pace
    Counter incarnation;    // raised when serials could otherwise be met twice: load and recover
    Counter clean;          // see LeftAs
    std::uint64_t reserved;
    char boot_id[40];
    char libc[16];
    Counter recoveries;
    Counter rows_lost;  // rows that a recovery dropped: half written, or with a wrong checksum
    Counter pace[4];    // rows delivered; rows added before the last clear; nanoseconds of the last add and sample
    // Bits of doubles.
    Counter alpha;
    Counter beta_start;
    Counter beta_end;
    Counter beta_steps;  // sample calls from start to end; 0: always the end
    Counter running_max;
    Counter updates_applied;
    Counter updates_stale;
    Counter index_origin;       // the origin_ticket that the index was made for; all ones: make it anew
    Counter resets_unflagged;   // episodes that ended because the next observation was another one
    Counter rows_retired;       // rows that left early: their bytes in a heap were needed
    Counter late_ends;          // raised when rows already added are told to be the last of their episodes
    Counter seen_ends;          // late_ends when the index last looked
    Counter shuffle_epoch;      // epochs begun
    Counter rows_consumed;      // rows that left the index because they were read as often as they may be
    Counter writers_reclaimed;  // writers whose process died
    Counter index_takeovers;    // index locks whose owner died inside
    Counter seal;               // of a clean file: CRC32C over words, counters, records and index (Table::seal)
};
static_assert(sizeof(Counters) <= kPageBytes && offsetof(Counters, recoveries) == 640 &&
              offsetof(Counters, alpha) == 1024);

// ---- writers and blocks ---------------------------------------------------------------------------------------
inline constexpr std::uint64_t kNone = ~std::uint64_t{0};

// A writer's owner: the low 16 bits of the word are its seat plus 1, the others 48 bits of the seat's token. A seat
// that was given to another process since has another token.
constexpr std::uint64_t owner_word(std::uint64_t seat, std::uint64_t tag) { return tag << 16 | (seat + 1); }
constexpr std::uint32_t owner_seat(std::uint64_t owner) { return static_cast<std::uint32_t>(owner & 0xffff) - 1; }
constexpr std::uint64_t owner_tag(std::uint64_t owner) { return owner >> 16; }
// No process, but not free either: rows still find their next observations in the record's waiting places, because
// there was no space to move them to the heap.
inline constexpr std::uint64_t kParked = 0xffff;

struct alignas(128) WriterRecord {
    std::atomic<std::uint64_t> owner;     // see owner_word(); 0: nobody
    std::atomic<std::uint64_t> position;  // of the block it fills or filled last: see pack(); kNone: none yet
    std::uint64_t reserved0;
    std::atomic<std::uint64_t> origin;    // the origin_ticket that `live` counts for
    std::atomic<std::int64_t> live;       // rows it committed less live rows it overwrote
    std::atomic<std::uint64_t> added;     // rows it committed, ever
    std::atomic<std::uint64_t> voided;    // rows it wrote as VOID, ever
    std::atomic<std::uint64_t> episodes;  // episode ends it was told of, ever
    // Counts of a block and a record change together, though a process may die between the two: first it is said what
    // they will be. 0, or the block's number plus 1.
    std::atomic<std::uint64_t> settling;
    std::uint64_t indexed_ticket;  // of the newest of its blocks that the index has seen
    std::atomic<std::int64_t> settled_live, settled_block;
    std::atomic<std::int64_t> gone;  // live rows it has taken out of other blocks, not yet off `live`
    // A row of any block that is being taken out of the live ones, plus 1, and what `gone` will be then.
    std::atomic<std::uint64_t> retiring;
    std::atomic<std::int64_t> gone_then;
    std::uint64_t reserved;
    // Whose rows these are, where a client numbers them so that each is taken once (table/client_rows.h); they hold
    // if `client_used` is not 0. Kept when the writer ends, until another one takes the record.
    std::atomic<std::uint64_t> client_token[2];
    std::atomic<std::uint64_t> client_sequence;   // rows of that client accepted for certain
    std::atomic<std::uint64_t> pending_sequence;  // accepted once the running piece is written; equal: none runs
    std::atomic<std::uint64_t> pending_position;  // where the running piece begins, as `position`
    std::atomic<std::uint64_t> client_used;       // larger in records that were used later; 0: no client
    std::uint64_t reserved2[10];
};
static_assert(sizeof(WriterRecord) == 256 && offsetof(WriterRecord, indexed_ticket) == 72 &&
              offsetof(WriterRecord, client_token) == 128);

// Ticket and head, the rows finished in that block, in one number: both are of one instant, for whoever looks. The head
// moves once a step and may be as large as the block, so it has the bits of block_rows.
struct Position {
    std::uint64_t ticket, head;
};
constexpr std::uint64_t pack(std::uint64_t ticket, std::uint64_t head, unsigned head_bits) {
    return ticket << head_bits | head;
}
constexpr Position unpack(std::uint64_t position, unsigned head_bits) {
    if (position == kNone) return {kNone, 0};
    return {position >> head_bits, position & ((std::uint64_t{1} << head_bits) - 1)};
}

struct alignas(64) BlockRecord {
    std::atomic<std::uint32_t> owner;  // index of the writer that fills it, plus 1; 0: nobody
    // Low bits, plus 1, of the ticket under which one of its rows was masked out, retired or lost. Where it is not the
    // block's, all rows below the head count: nobody need look at their words.
    std::atomic<std::uint32_t> uneven;
    std::atomic<std::uint64_t> ticket;           // its sequence number; kNone: never claimed
    std::atomic<std::uint64_t> previous_ticket;  // the same writer record's block before
    std::atomic<std::uint64_t> next_ticket;      // where the rows at its end go on: the block after that of ...
    std::atomic<std::uint64_t> live;             // committed rows in it, of this lap and the last
    std::atomic<std::uint64_t> heap_used;        // bytes of its heap that this lap has used
    std::atomic<std::uint64_t> changed;          // raised when rows that are done change: an end is told, a row goes
    std::atomic<std::uint64_t> linked_ticket;    // ... this lap, the last one that filled it to its end; kNone: none
};
static_assert(sizeof(BlockRecord) == 64);

struct FieldRecord {
    char name[96];
    char dtype[16];
    std::int64_t shape[8];
    std::uint32_t dimensions;
    std::uint32_t item_bytes;
    std::uint64_t offset;
    std::uint64_t bytes;
    std::uint32_t stack;        // frames that batches give
    std::uint32_t compression;  // 0 none, 1 LZ4, 2 Zstd (Blosc2 frames)
    std::uint32_t ragged;       // 1: shape[0] is the most, a value may have fewer items
    std::uint32_t gives_next;   // 1: the next row's value is this row's next observation
    std::uint64_t full_bytes;   // of a whole value; `bytes` is 16 where the value is in the heap
    std::uint32_t follows;      // index plus 1 of the field whose stack this one's goes on from; 0 none
    std::uint32_t is_mutable;   // 1: its values stand in kMutables, and `offset` is theirs among them
    std::uint32_t pads_zero;    // 1: frames before an episode's first are zeros; 0: the first one repeated
    std::uint32_t reserved[5];
};
static_assert(sizeof(FieldRecord) == 256);

// ---- the runtime region: nothing here outlives the processes that have the table open ------------------------
// One for each time that a table is open, in any process. Taken by a byte lock of the file (storage/presence.h).
struct alignas(64) Seat {
    std::atomic<std::uint64_t> token[2];     // random: of this opening
    std::atomic<std::uint64_t> process[2];   // random: of the process
    std::atomic<std::uint64_t> pid;          // for people only: other PID namespaces have equal ones
    std::atomic<std::uint64_t> reserved[2];  // rows that may be added, and sampled: see Pace
};
static_assert(sizeof(Seat) == 64);
inline constexpr std::uint64_t kSeats = 1024;

// A save that holds adds back for a moment.
struct Hold {
    std::atomic<std::uint64_t> until;  // steady_ns(); 0: none
    std::atomic<std::uint64_t> tag;    // whose it is: it ends with that opening
    std::atomic<std::uint32_t> seat;
    std::atomic<std::uint32_t> changes;  // waiters sleep on it
};
static_assert(sizeof(Hold) == 24);

struct Runtime {
    alignas(64) std::byte index_lock[448];  // a SharedLock
    Hold hold;
    std::atomic<std::uint64_t> door_pid;  // the process that opens or closes the table now, for people only
    std::uint64_t reserved[4];
    std::atomic<std::uint32_t> rings;       // raised when rows were added, delivered or given back; waiters sleep on it
    std::atomic<std::uint32_t> waiting;     // how many sleep
    std::atomic<std::uint32_t> seats_used;  // seats below this may have reservations
    std::byte reserved2[576 - 524];
    alignas(64) std::byte write_lock[448];  // a SharedLock: one write of mutable fields at a time
    std::byte reserved3[kPageBytes - 1024];
    Seat seats[kSeats];
};
static_assert(offsetof(Runtime, hold) == 448 && offsetof(Runtime, door_pid) == 472 && offsetof(Runtime, rings) == 512 &&
              offsetof(Runtime, write_lock) == 576 && offsetof(Runtime, seats) == kPageBytes);
inline constexpr std::uint64_t kRuntimeBytes = sizeof(Runtime);
static_assert(kRuntimeBytes == 17 * kPageBytes);

// ---- the index --------------------------------------------------------------------------------------------------
// priorities: head, one cursor a block, then for every sixteen rows their priorities and their masses. A priority is
// stored negated, so that zeroed bytes mean "no row".
inline constexpr std::uint64_t kIndexHeadBytes = 64;
inline constexpr std::uint64_t kLeafGroupBytes = 128;
inline constexpr std::uint64_t kNodeGroupBytes = 256;
constexpr std::uint64_t groups_of_16(std::uint64_t children) { return (children + 15) / 16; }
constexpr std::uint64_t leaves_offset(std::uint64_t blocks) { return kIndexHeadBytes + (blocks * 8 + 63) / 64 * 64; }
constexpr std::uint64_t priorities_bytes(std::uint64_t blocks, std::uint64_t slots) {
    return leaves_offset(blocks) + groups_of_16(slots) * kLeafGroupBytes;
}
// In a snapshot: head, cursors, then priority and mass, float32 each, of every row.
constexpr std::uint64_t saved_priorities_bytes(std::uint64_t blocks, std::uint64_t slots) {
    return leaves_offset(blocks) + slots * 8;
}
constexpr std::uint64_t tree_bytes(std::uint64_t slots) {
    std::uint64_t nodes = groups_of_16(slots), total = 0;
    for (;; nodes = groups_of_16(nodes)) {
        total += groups_of_16(nodes) * kNodeGroupBytes;
        if (nodes <= 1) return total;
    }
}

// Where a row stands in its episode; belongs to the index lock.
struct EpisodePlace {
    std::uint32_t step;  // rows before it: in its episode, or in its stream where the view crosses episodes
    std::uint32_t left;  // rows after it, once the episode has ended
};
static_assert(sizeof(EpisodePlace) == 8);
inline constexpr std::uint32_t kEpisodesColumn = 1, kReadsColumn = 2;

// ---- mutable fields -----------------------------------------------------------------------------------------------
// A selector: bit 0 is the place that holds, the other bits a number that every change raises. A place is the values of
// the row's mutable fields, behind this head where the table has checksums.
struct MutableHead {
    std::uint64_t selector;  // the one that this place was made for
    std::uint32_t crc;       // CRC32C of the row's serial, the selector and the values
    std::uint32_t reserved;
};
static_assert(sizeof(MutableHead) == 16);
constexpr std::uint64_t mutable_place_bytes(std::uint64_t value_bytes, bool has_checksums) {
    return value_bytes ? value_bytes + (has_checksums ? sizeof(MutableHead) : 0) : 0;
}

// ---- heaps --------------------------------------------------------------------------------------------------------
// A block's heap begins with places of equal size for final observations. Behind them stands a chain of pieces, each a
// header and bytes rounded up to 16. A new lap writes over the last one's pieces from the start on; a gap before the
// next old piece is a piece without an owner.
struct PieceHeader {
    std::uint64_t owner;  // serial of the row plus 1; 0: nobody
    std::uint64_t span;   // to the next piece; 0: the chain's end
};
static_assert(sizeof(PieceHeader) == 16);
constexpr std::uint64_t piece_bytes(std::uint64_t bytes) { return sizeof(PieceHeader) + (bytes + 15) / 16 * 16; }

// A final observation, and a waiting next one behind 16 bytes with its row's serial: for each field this, then its
// bytes rounded up to 16 (waiting: the whole field's room).
struct FinalValue {
    std::uint32_t kept_bytes;
    std::uint32_t value_bytes;  // equal: kept as given
    std::uint32_t crc;          // of the kept bytes, CRC32C
    std::uint32_t reserved;
};
static_assert(sizeof(FinalValue) == 16);
inline constexpr std::uint64_t kWaitingHead = 16;

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

}  // namespace sharpwave::format
