// The values of an add, checked and sorted into the fields of the table. The same rules and words as
// src/sharpwave/arrays.py, for C++ types.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "buffer/row_spec.h"
#include "sharpwave/value.h"
#include "table/row_batch.h"

namespace sharpwave {

// Kept by a thread from one add to the next, so that an add allocates nothing.
class GivenRows {
public:
    // Refers to the values' memory. What does not fit is ErrorKind::schema.
    const RowBatch& read(const RowSpec& spec, std::span<const Given> values);

private:
    void match(const RowSpec& spec, std::span<const Given> values);
    void count(const RowSpec& spec);
    void accept(const RowSpec& spec, std::size_t leaf);
    void accept_ragged(const RowLeaf& leaf, std::size_t place, const Value& value, FieldInput& input);
    void flag(const RowSpec& spec);
    void flag_agents(const RowSpec& spec, const Value* truncated);
    void flag_truths(const char* name, const Value& value, std::uint8_t flag, bool when);
    void accept_priorities(const RowSpec& spec);

    std::vector<const Value*> by_leaf_;
    const Value* truncated_ = nullptr;
    const Value* mask_ = nullptr;
    const Value* priority_ = nullptr;
    std::size_t rows_ = 0;
    std::vector<FieldInput> fields_, next_;
    std::vector<std::array<std::byte, 8>> numbers_;   // converted, one a leaf
    std::vector<std::vector<std::uint64_t>> starts_;  // ragged, one a leaf
    std::vector<std::uint8_t> flags_;
    std::vector<float> priorities_;
    RowBatch batch_{nullptr, 0};
};

}  // namespace sharpwave
