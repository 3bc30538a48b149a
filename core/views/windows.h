// Runs of rows: a row drawn, the rows before it that warm up a recurrent state, and the rows after it.
//
// A window has burn_in + length + bootstrap places. It begins with as many rows before the drawn one as there are, up
// to burn_in, so whatever is missing is missing at the right end: there the last row is repeated and the masks are
// false. Every place holds what Transitions gives for that row alone; with several steps an example may read rows
// behind the window's end.
#pragma once

#include <cstddef>
#include <cstdint>

#include "table/table.h"
#include "views/transitions.h"

namespace sharpwave {

struct WindowConfig {
    std::uint64_t length = 1, burn_in = 0, bootstrap = 0;
    bool across = false;  // goes on into the next episode; never past the newest row
};

// One entry a place; the masks are 0 or 1.
struct WindowMasks {
    std::uint8_t* valid = nullptr;    // a row of the window, not a repetition
    std::uint8_t* learn = nullptr;    // of the learning part
    std::uint8_t* first = nullptr;    // the first row of an episode
    std::int64_t* serials = nullptr;  // of the place's row; -1 where there is none. Null: not asked for
};

class Windows {
public:
    Windows(const Table& table, const WindowConfig& config) : table_(table), config_(config) {}

    std::uint64_t places() const { return config_.burn_in + config_.length + config_.bootstrap; }

    // As Transitions::gather, which gives the rows; `words` gets those of the rows drawn. The rows of most windows
    // stand side by side: those are copied as one run.
    std::size_t gather(const Transitions& rows, const std::uint64_t* slots, std::size_t begin, std::size_t end,
                       const Outputs& out, const WindowMasks& masks, std::uint64_t* words, std::uint32_t* missed) const;

private:
    struct Run;
    struct NearRun;
    bool walk(std::uint64_t slot, std::uint64_t least, Run& run) const;
    bool find_near(std::uint64_t slot, std::uint64_t next_slot, std::uint64_t least, NearRun& run) const;
    bool gather_near(const Transitions& rows, const std::uint64_t* slots, std::size_t i, std::uint64_t next_slot,
                     const Outputs& out, const WindowMasks& masks, std::uint64_t* words) const;
    void tell_places(const NearRun& run, std::uint64_t place, const Outputs& out, const WindowMasks& masks) const;
    std::size_t gather_far(const Transitions& rows, const std::uint64_t* slots, std::size_t begin, std::size_t end,
                           const Outputs& out, const WindowMasks& masks, std::uint64_t* words,
                           std::uint32_t* missed) const;

    const Table& table_;
    WindowConfig config_;
};

}  // namespace sharpwave
