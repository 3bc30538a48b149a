// The rows that one add brings, as the caller's memory holds them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "schema/schema.h"
#include "storage/format_words.h"

namespace sharpwave {

// kRowCut: an agent is truncated and others go on, so that the episode goes on and n-step examples end.
enum RowFlag : std::uint8_t { kRowTerminated = 1, kRowTruncated = 2, kRowVoid = 4, kRowCut = 64 };

// The flags of a row's word that its add gives.
inline std::uint64_t word_flags(std::uint8_t given) {
    static_assert(kRowTerminated << 3 == format::kTerminated && kRowTruncated << 3 == format::kTruncated &&
                  kRowCut << 3 == format::kCut);
    return std::uint64_t{given} << 3 & (format::kTerminated | format::kTruncated | format::kCut);
}

// The values of one field, row by row.
struct FieldInput {
    const std::byte* flat = nullptr;        // the first row's; with `frames` its newest frame, the others before it
    std::uint64_t stride = 0;               // to the next row's
    std::uint32_t frames = 1;               // of a given stack, or 1
    const std::uint64_t* starts = nullptr;  // ragged: rows + 1 byte offsets into `flat` instead of a stride
};

// Rows to append, time-major over the table's width.
struct RowBatch {
    const FieldInput* fields;             // one a field of the layout, in its order
    std::size_t rows;                     // a multiple of the table's width
    const std::uint8_t* flags = nullptr;  // RowFlag bits, one byte a row; null: none set
    const FieldInput* next = nullptr;     // where next observations are derived: one a field that gives_next
    const float* priorities = nullptr;    // one a row, at least 0; null: none given
};

inline bool is_void(const RowBatch& batch, std::size_t row) { return batch.flags && (batch.flags[row] & kRowVoid); }

// One field's value of one row.
struct GivenValue {
    const std::byte* data;
    std::uint64_t bytes;
};

inline GivenValue value_of(const FieldInput& input, const Field& field, std::size_t row) {
    if (input.starts) return {input.flat + input.starts[row], input.starts[row + 1] - input.starts[row]};
    return {input.flat + row * input.stride, field.full_bytes};
}

// Rows between two commits. Small, so that readers miss few rows and a kill loses few.
inline constexpr std::size_t kGroupRows = 16;

}  // namespace sharpwave
