// Which stream and which episode a row is of. A stream is what one writer record got from one env: its rows follow each
// other through the blocks of the record. Rows say only where episodes start and end; the rest is read from the links
// between blocks.
//
// Threads: a Streams is used by one thread. Writers may go on meanwhile.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "base/divide.h"
#include "table/table.h"

namespace sharpwave {

class Streams {
public:
    static constexpr std::int64_t kUnknown = -1;

    // Reads the links of all blocks once: O(blocks). Rows of blocks that are claimed later are of no known stream.
    explicit Streams(const Table& table);

    struct Place {
        std::int64_t stream = kUnknown;  // record * width + env
        std::uint64_t episode = 0;       // serial of the oldest row of the episode that was followed
        std::uint64_t number = 0;        // of the episode: how many were begun before it
        std::uint64_t serial = 0;        // of the newest row that was followed
        bool is_open = false;            // that row did not end the episode
    };

    // Follows one more row. Rows come in the order of their serials. An episode that has lost rows in its middle counts
    // as several. The place holds until the next call.
    const Place& follow(std::uint64_t serial, std::uint64_t word);

    // The same for rows side by side. About a nanosecond a row.
    void follow(const std::uint64_t* serials, const std::uint64_t* words, std::size_t count, std::int64_t* streams,
                std::int64_t* episodes);

private:
    struct Block {
        std::uint64_t writer;    // record index
        std::uint64_t previous;  // ticket of the record's block before; kNone: not known
    };
    const Block* find(std::uint64_t ticket);
    void enter(std::uint64_t serial);
    bool goes_on(const Place& place, std::uint64_t serial) const;

    const Table& table_;
    const std::uint64_t width_, block_rows_;
    const Divider by_width_;
    std::unordered_map<std::uint64_t, Block> blocks_;  // by ticket
    std::vector<Place> places_;                        // width for each record, then width for unknown ones
    std::uint64_t episodes_ = 0;                       // begun so far
    // The block of the last row.
    std::uint64_t begin_ = 1, end_ = 0;  // serials
    std::uint64_t previous_ = format::kNone;
    std::size_t first_place_ = 0;
};

struct Episode {
    std::uint64_t first, last;  // serials of its oldest and its newest row
    std::uint64_t rows;         // live ones
    std::int64_t stream;
    bool is_whole;     // the first one started it
    bool is_finished;  // the last one ended it
};

// The episodes of the live rows, in the order of their first rows. Looks at the word of every row.
std::vector<Episode> list_episodes(const Table& table);

// The serials of an episode's rows, in order; empty where one of them is gone meanwhile.
std::vector<std::uint64_t> rows_of(const Table& table, const Episode& episode);

}  // namespace sharpwave
