// The bytes of a table, in memory and in a file alike: format version 1. docs/format.md says the same in prose;
// a test compares the two. Structures are plain, little-endian, and only ever grow into their reserved bytes.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "storage/format_words.h"

namespace sharpwave::format {

inline constexpr char kMagic[8] = {'S', 'H', 'R', 'P', 'W', 'A', 'V', 'E'};
inline constexpr std::uint32_t kVersion = 1;
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
    kPriorities,   // reserved: raw priorities, float32 a row
    kGiven,        // reserved: priorities given at add, float32 a row
    kTree,         // reserved: sums, maxima and minima over the leaf masses
    kOrder,        // reserved: rank order
    kHeap,         // reserved: variable-size bytes, one heap a block
    kFinals,       // reserved: final observations
    kRegionCount = 24,
};

enum Kind : std::uint32_t { kLive = 1, kSnapshot = 2 };

struct Header {
    char magic[8];
    std::uint32_t version;
    std::uint32_t endian_mark;
    std::uint32_t kind;
    std::uint32_t header_crc;  // CRC32C of this page with this field 0
    std::uint64_t total_bytes;
    std::uint64_t capacity;    // rows that may be drawn
    std::uint64_t slots;       // rows that exist: capacity plus spare ones
    std::uint64_t spare_rows;  // reserved: derived observations
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
    std::uint32_t sampler;    // reserved: 0 uniform
    std::uint32_t meta_crc;   // snapshot: CRC32C over counters, writers, blocks, fields, description, checksums
    std::uint32_t words_crc;  // snapshot: CRC32C over the words in slot order
    std::uint32_t reserved0;
    std::uint8_t uuid[16];
    std::uint8_t reserved[256];
    Region regions[kRegionCount];
};
static_assert(sizeof(Header) <= kPageBytes);
static_assert(offsetof(Header, uuid) == 160 && offsetof(Header, regions) == 432);

// ---- the counters page: changes all the time, survives ------------------------------------------------------
struct alignas(64) Counter {
    std::atomic<std::uint64_t> value;
};

struct Counters {
    Counter next_ticket;    // the block sequence number that the next claim gets
    Counter call_number;    // the random stream's position: one a draw
    Counter rows_sampled;   // rows handed out
    Counter redraws;        // draws that met an empty, void or changing row
    Counter writers_used;   // records 0 .. value-1 have been used at least once
    Counter origin_ticket;  // rows of earlier blocks were cleared; a multiple of `blocks`
    Counter epoch;          // raised by clear()
    Counter incarnation;    // raised when serials could otherwise be met twice: load and recover
    Counter clean;          // 1: the last closer left nothing open
    std::uint64_t pid_namespace;
    char boot_id[40];
    char libc[16];
    Counter recoveries;
    Counter rows_lost;    // rows that a recovery dropped: half written, or with a wrong checksum
    Counter pace[4];      // reserved: rate limiting
    Counter priority[8];  // reserved: beta's counter, running maximum, update counts
};
static_assert(sizeof(Counters) <= kPageBytes && offsetof(Counters, recoveries) == 640);

// ---- writers and blocks ---------------------------------------------------------------------------------------
inline constexpr std::uint64_t kNone = ~std::uint64_t{0};

struct alignas(128) WriterRecord {
    std::atomic<std::uint32_t> taken;
    std::uint32_t participant;            // reserved: index into the runtime page
    std::atomic<std::uint64_t> ticket;    // of the block it fills or filled last; kNone: none yet
    std::atomic<std::uint64_t> head;      // rows it has finished in that block; moves once a step
    std::atomic<std::uint64_t> epoch;     // the epoch that `live` counts for
    std::atomic<std::int64_t> live;       // rows it committed less live rows it overwrote
    std::atomic<std::uint64_t> added;     // rows it committed, ever
    std::atomic<std::uint64_t> voided;    // rows it wrote as VOID, ever
    std::atomic<std::uint64_t> episodes;  // episode ends it was told of, ever
    std::uint64_t owner_pid;
    std::uint64_t reserved[6];
};
static_assert(sizeof(WriterRecord) == 128);

struct alignas(64) BlockRecord {
    std::atomic<std::uint32_t> owner;  // index of the writer that fills it, plus 1; 0: nobody
    std::uint32_t reserved0;
    std::atomic<std::uint64_t> ticket;           // its sequence number; kNone: never claimed
    std::atomic<std::uint64_t> previous_ticket;  // the same writer's block before
    std::atomic<std::uint64_t> next_ticket;      // and after; kNone while there is none
    std::atomic<std::uint64_t> live;             // committed rows in it, of this lap and the last
    std::atomic<std::uint64_t> heap_used;        // reserved
    std::atomic<std::uint64_t> changed;          // reserved: stamp for incremental snapshots
    std::uint64_t reserved1;
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
    std::uint32_t stack;        // reserved, 1
    std::uint32_t compression;  // reserved, 0 none
    std::uint32_t ragged;       // reserved, 0
    std::uint32_t reserved[11];
};
static_assert(sizeof(FieldRecord) == 256);

// Room for a mutex, wake-up words and 128 participants of 64 bytes.
inline constexpr std::uint64_t kRuntimeBytes = 3 * kPageBytes;

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

}  // namespace sharpwave::format
