// Which rows may start an example, as far as that depends on the rows around them.
//
// A window wants so many rows after its first one, hindsight wants the episode's end. A row that has not got them yet
// waits in the index without mass; the row that completes what it waits for lets it in. Everything here belongs to the
// index lock, but for reading where rows stand.
#pragma once

#include <cstdint>
#include <vector>

#include "table/table.h"

namespace sharpwave {

struct StartRule {
    enum class Needs : std::uint8_t { nothing, rows, end };
    Needs needs = Needs::nothing;
    std::uint64_t length = 1;  // Needs::rows: so many, with itself
    std::uint64_t stride = 1;  // every so-manieth step of an episode
    bool across = false;       // a run of rows may cross episodes; steps are then counted along the stream
    bool per_episode = false;  // an episode is as likely as any other, however many starts it has

    bool is_any() const { return needs == Needs::nothing && stride == 1 && !per_episode; }
};

class Starts {
public:
    Starts(const Table& table, const StartRule& rule) : table_(table), rule_(rule), places_(table.episodes()) {}

    const StartRule& rule() const { return rule_; }

    // A row has come, after those before it in its stream: where it stands. Also called for steps that an env was
    // masked out of. `cursors`, one a block: rows with smaller serials were numbered before.
    void number(std::uint64_t slot, std::uint64_t word, const std::uint64_t* cursors);

    // Adds to `legal` the rows that may start an example now that this numbered one is here; a row may be told twice.
    // `again`: everything is looked at anew, what was told before is told again.
    void arrive(std::uint64_t slot, std::uint64_t word, std::vector<std::uint64_t>& legal, bool again);

    // The rows of the episode that this row is in, those that are still there, oldest first.
    std::vector<std::uint64_t> episode(std::uint64_t slot, std::uint64_t word) const;

    // Moves to another row of a finished episode: `offset` steps on, or back where it is negative. False: it is gone.
    bool move(std::uint64_t& slot, std::uint64_t& word, std::int64_t offset) const;
    format::EpisodePlace place(std::uint64_t slot) const;
    static constexpr std::uint32_t kOpen = ~std::uint32_t{0};  // EpisodePlace::left before the episode has ended

private:
    void set_place(std::uint64_t slot, format::EpisodePlace place);
    bool is_on_grid(std::uint64_t slot, std::uint64_t word) const;
    bool back(std::uint64_t& slot, std::uint64_t& word, std::uint64_t count) const;
    void end(std::uint64_t slot, std::uint64_t word, std::vector<std::uint64_t>& legal);
    bool is_row(std::uint64_t slot, std::uint64_t serial, std::uint64_t& word) const;

    const Table& table_;
    StartRule rule_;
    format::EpisodePlace* places_;
};

}  // namespace sharpwave
