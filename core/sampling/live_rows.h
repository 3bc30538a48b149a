// Which slots hold a row that can be drawn, as one bit each: what uniform draws go by where many slots hold none,
// because environments were masked out of steps or blocks are partly filled.
//
// The bits are this process's own and are made when they are first needed. Each call looks at what the writers have
// done since: new rows of a block that is being filled, all of a block that was claimed anew or whose rows changed. So
// they say the same in every process, and a seed gives the same draws from a copy of the table. Counts over groups of
// bits and a guide into them find the k-th row in a few steps, however the rows are spread.
//
// Threads: may be called from any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "base/random.h"
#include "table/table.h"

namespace sharpwave {

class LiveRows {
public:
    explicit LiveRows(const Table& table) : table_(table) {}

    // Draws positions begin..end, each of the live rows equally likely. An empty table is ErrorKind::not_ready.
    void draw(const Substream& stream, std::uint64_t* slots, std::size_t begin, std::size_t end, std::uint64_t attempt);

private:
    struct Seen {
        std::uint64_t ticket, head, changed;
    };
    void catch_up();
    void look_at(std::uint64_t begin, std::uint64_t end);
    void sum_up();
    std::uint64_t kth(std::uint64_t k) const;

    const Table& table_;
    std::mutex mutex_;  // guards what follows
    std::vector<std::uint64_t> bits_;
    std::vector<Seen> seen_;            // one a block: how far it was looked at
    std::vector<std::uint64_t> heads_;  // one a block, of the writer that fills it
    std::uint64_t origin_ = 0;
    std::uint64_t group_words_ = 0;      // words of bits a group
    std::vector<std::uint64_t> counts_;  // rows of each group
    std::vector<std::uint64_t> ends_;    // rows up to and with each group
    std::vector<std::uint32_t> guide_;   // the group of the first of each equal share of the rows
    double shares_a_row_ = 0;
    std::uint64_t rows_ = 0;
};

}  // namespace sharpwave
