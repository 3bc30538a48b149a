// Copies one value of a row, which may be compressed or ragged in the heap of its block. Torn bytes are never decoded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "table/table.h"

namespace sharpwave {

class ValueCopy {
public:
    explicit ValueCopy(const Table& table) : table_(table) {}

    // `scratch` holds the bytes before they are decoded. `length` gets the items of a ragged value; may be null. False:
    // the bytes are not, or no longer, what the row says.
    bool copy(const Field& field, std::uint64_t slot, std::vector<std::byte>& scratch, std::byte* to,
              std::int64_t* length) const;

    // Whether the bytes at a place of the heap are those of a row.
    bool is_owner(std::uint64_t place, std::uint64_t serial) const;

    // Zeroes what a decoded ragged value leaves of its room. False: the value has the wrong size.
    static bool finish(const Field& field, std::byte* to, std::uint64_t value_bytes, std::int64_t* length);

private:
    const Table& table_;
};

}  // namespace sharpwave
