// Which bytes an example will read, from its first row's start on, where its steps stand side by side: fetched while
// the examples before it are made.
//
// They are named by their offsets, the same for every example: to work out the cache lines that a row's place gives
// them costs a mispredicted branch an example, to fetch a line twice next to nothing. Of large rows only the first
// lines: the rest is left to the hardware.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "table/table.h"
#include "views/view_config.h"

namespace sharpwave {

class PrefetchPlan {
public:
    PrefetchPlan() = default;
    // `is_small`: rows are small and hold their words. `derives`: the row after the last step is read too.
    PrefetchPlan(const Table& table, const ViewConfig& config, bool is_small, bool derives);

    // Always inlined: the compiler takes a function that only fetches for one that does nothing, and drops the call.
    __attribute__((always_inline)) void fetch(const std::byte* row) const {
        for (const std::uint64_t offset : offsets_) __builtin_prefetch(row + offset, 0, 2);
    }

    const std::vector<std::uint64_t>& offsets() const { return offsets_; }

private:
    void want(std::uint64_t from, std::uint64_t to);

    std::vector<std::uint64_t> offsets_;  // from a row's start on, one a line
};

}  // namespace sharpwave
