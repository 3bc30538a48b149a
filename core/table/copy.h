// The only code that touches row bytes while others may be writing or reading them.
//
// A reader copies a row, then reads its word again and throws the copy away if the word has changed (a seqlock). The
// copies are plain vector moves between fences, which the C++ memory model does not bless and every compiler and
// processor we build for honours (docs/decisions/0002-racy-copies.md). Builds under ThreadSanitizer copy bytes as
// atomics instead, so that it can follow.
//
// The same source is compiled once for each instruction set; kernels() picks one when the library is loaded.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sharpwave {

// A field of the rows beside a flat array that holds that field alone.
struct FieldMove {
    std::uint64_t offset;  // in the row
    std::uint64_t bytes;
    std::byte* flat;       // `bytes` a row; the source of a scatter is only read
    std::uint64_t stride;  // scatter: between two rows of `flat`; gather writes them side by side
};

// Where rows and their words stand. Embedded words have the rows' own base and stride.
struct RowView {
    std::byte* rows;
    std::uint64_t stride;
    std::byte* words;
    std::uint64_t word_stride;
};

struct Gather {
    RowView view;
    std::uint64_t least_word;    // rows with a smaller serial were cleared
    const std::uint64_t* slots;  // one a position
    const FieldMove* fields;
    std::size_t field_count;
    std::uint64_t* words;  // one a position: the word each row was read under
    bool streaming;        // the outputs are larger than the caches: write past them
};

// An example's row that a field is taken from.
enum class StepRow : std::uint8_t { first, last, after };

struct StepMove {
    std::uint64_t offset;  // in the row
    std::uint64_t bytes;
    std::byte* flat;
    StepRow row;
};

// Examples of several steps, `width` rows apart: rewards summed, some fields of the first row, some of the last, some
// of the row after it.
struct StepGather {
    RowView view;
    std::uint64_t least_word;
    const std::uint64_t* slots;  // of the first rows, one a position
    std::uint64_t* words;        // one a position: that of the first row
    const StepMove* fields;
    std::size_t field_count;
    std::uint32_t n_step;
    bool takes_after;
    std::uint64_t width;
    std::uint64_t all_slots, block_rows;
    std::uint64_t block_magic;  // 2^64 / block_rows, rounded up
    std::uint64_t reward_offset;
    const double* powers;         // n_step of them
    std::byte* sums;              // float32 a position; null: rewards are not summed
    const float* discounts_of;    // by number of steps
    float* discounts;             // or null
    const std::uint64_t* wanted;  // what an example reads, as offsets from its first row, one a line: fetched ahead
    std::size_t wanted_count;
};

inline constexpr std::size_t kFetchedRows = 32;

struct CopyKernels {
    const char* name;

    // Copies the rows at slots[begin..end) to positions begin..end of the flat arrays. Positions whose row was not
    // committed, or changed meanwhile, go to `missed`; returns their number. At most kFetchedRows are not fetched
    // ahead: the caller has asked for them (Table::prefetch) as soon as it knew them.
    std::size_t (*gather)(const Gather& gather, std::size_t begin, std::size_t end, std::uint32_t* missed);

    // The same for rows that were just read, without a look at their words: those are the caller's to check.
    void (*gather_warm)(const Gather& gather, std::size_t begin, std::size_t end);

    // Copies `count` rows of one env that stand side by side, each `step` slots after the one before, from `slot` on,
    // to positions place.. of the flat arrays. Their words are the caller's to check.
    void (*gather_run)(const Gather& gather, std::uint64_t slot, std::uint64_t step, std::size_t count,
                       std::size_t place);

    // Makes those examples whose rows stand side by side in one block; the other positions, and those whose rows
    // changed meanwhile, go to `missed`. Returns their number.
    std::size_t (*gather_steps)(const StepGather& gather, std::size_t begin, std::size_t end, std::uint32_t* missed);

    // Copies `count` consecutive rows from the flat arrays into the rows from `slot` on. Words are the caller's.
    void (*scatter)(const RowView& view, std::uint64_t slot, std::size_t count, const FieldMove* fields,
                    std::size_t field_count);
};

const CopyKernels& kernels();

}  // namespace sharpwave
