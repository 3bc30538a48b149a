// Rows that stand in the index without mass because they may not start an example yet (sampling/starts.h), and the
// share of an episode that each of its rows has where episodes are equally likely. The caller holds the index lock.
#pragma once

#include <cstdint>
#include <vector>

#include "sampling/row_masses.h"
#include "sampling/starts.h"

namespace sharpwave {

class WaitingRows {
public:
    explicit WaitingRows(RowMasses& masses) : masses_(masses), starts_(masses.table, masses.config.starts) {}

    const Starts& starts() const { return starts_; }

    // Numbers rows that came, in the order of their serials, and gives mass to the rows that waited for them. Slots
    // that changed go to the masses' `changed`.
    void number(std::vector<std::uint64_t>& words);

    // Episodes that ended after their last row was taken in, because a writer was closed or died. False: some last row
    // was not found, and the index is to be made anew.
    bool take_late_ends();

    // From the rows alone: which of them may start an example.
    void rebuild();

    // Shares an episode's one unit among the rows of it that may start an example.
    void share_episode(std::uint64_t slot);

    // The same for the episodes of all rows in `changed`. Nothing where rows are not drawn per episode.
    void share_changed();

private:
    bool newest_known(std::uint64_t block, std::uint64_t first, std::uint64_t known, std::uint64_t env,
                      std::uint64_t& slot, std::uint64_t& word, bool& is_gone) const;
    void let_in(bool again);

    RowMasses& masses_;
    Starts starts_;
    std::vector<std::uint64_t> legal_;  // rows that may start an example now
};

}  // namespace sharpwave
