// write(): new values for the mutable fields of rows, by serial.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/wait.h"
#include "table/table.h"

namespace sharpwave {

// The new values of one mutable field, one a serial, side by side.
struct FieldWrite {
    std::size_t field;  // of the layout
    const std::byte* flat;
};

struct Written {
    std::uint64_t applied, stale;
};

// No row: passed over and not counted.
inline constexpr std::uint64_t kNoSerial = ~std::uint64_t{0};

// A row has its old values or all of these, for every reader and after a kill at any instruction. Fields that are not
// named keep their values. Where a serial comes twice the last one holds.
//
// With `skips_stale` rows that are not there are left out and counted; otherwise the first of them is
// ErrorKind::stale_handle and nothing is written. Other writes are waited for until the deadline, then
// ErrorKind::not_ready; adds and readers are not.
Written write_back(Table& table, const std::uint64_t* serials, std::size_t count, const std::vector<FieldWrite>& fields,
                   bool skips_stale, Deadline deadline = Deadline::never());

}  // namespace sharpwave
