// Which rows may start an example, as far as that depends on the rows around them.
//
// A window needs a number of rows after its first one, hindsight needs the episode's end. A row that lacks them stands
// in the index without mass, so it is not drawn. When the missing row arrives, the waiting row gets its mass. The
// caller holds the index lock.
#pragma once

#include <cstdint>
#include <vector>

#include "table/episode_places.h"
#include "table/table.h"

namespace sharpwave {

struct StartRule {
    enum class Needs : std::uint8_t { nothing, rows, end };
    Needs needs = Needs::nothing;
    std::uint64_t length = 1;  // Needs::rows: so many, with itself
    std::uint64_t stride = 1;  // examples start only at steps that are multiples of it
    bool across = false;       // a run of rows may cross episodes; steps are then counted along the stream
    bool first_rows = false;   // examples start only at the first row of an episode
    bool per_episode = false;  // an episode is as likely as any other, however many starts it has

    bool is_any() const { return needs == Needs::nothing && stride == 1 && !first_rows && !per_episode; }
};

class Starts {
public:
    Starts(const Table& table, const StartRule& rule) : table_(table), rule_(rule), places_(table, rule.across) {}

    const StartRule& rule() const { return rule_; }

    // A row has come, after those before it in its stream: where it stands. Also called for steps that an env was
    // masked out of. `cursors`, one a block: rows with smaller serials were numbered before.
    void number(std::uint64_t slot, std::uint64_t word, const std::uint64_t* cursors);

    // Adds to `legal` the rows that may start an example now that this numbered one is here; a row may be told twice.
    // `again`: everything is looked at anew, what was told before is told again.
    void arrive(std::uint64_t slot, std::uint64_t word, std::vector<std::uint64_t>& legal, bool again);

    const EpisodePlaces& places() const { return places_; }

private:
    bool is_on_grid(std::uint64_t slot, std::uint64_t word) const;
    void end(std::uint64_t slot, std::uint64_t word, std::vector<std::uint64_t>& legal);

    const Table& table_;
    StartRule rule_;
    EpisodePlaces places_;
};

}  // namespace sharpwave
