// Uniform draws over the live rows, with replacement. Needs no index and takes no lock.
//
// Draws slots blindly and lets the copy find out which held no row: those positions are drawn again inside the call's
// own random substream. After 16 misses a position is drawn from the blocks' counts instead, which is exact and slow.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/random.h"
#include "table/table.h"

namespace sharpwave {

// A slot drawn blindly may hold no row that can be drawn. After so many of them a position is drawn by counting.
inline constexpr std::uint64_t kBlindAttempts = 16;

class UniformDraw {
public:
    // Draws `count` slots. An empty table is ErrorKind::not_ready and takes nothing from the random stream.
    UniformDraw(Table& table, std::uint64_t* slots, std::size_t count);

    // One position once more; attempt >= 1. May give the same slot where rows move under it.
    void again(std::uint64_t* slots, std::size_t position, std::uint64_t attempt);

private:
    // The blocks' counts of live rows, summed.
    class Census {
    public:
        explicit Census(const Table& table);
        std::uint64_t total() const { return ends_.back(); }
        std::optional<std::uint64_t> slot(std::uint64_t k) const;

    private:
        const Table& table_;
        std::vector<std::uint64_t> ends_;
    };

    Table& table_;
    std::uint64_t reach_;
    Substream stream_;
    std::optional<Census> census_;
};

// The newest rows, newest first; where there are fewer, they come again. With several writers exact to a block. An
// empty table is ErrorKind::not_ready.
void newest_rows(const Table& table, std::uint64_t* slots, std::size_t count);

// What an empty table answers.
[[noreturn]] void refuse_empty();

}  // namespace sharpwave
