// Brings the index up to date with what writers have committed since the last call: rows that were written over leave,
// new rows get their priorities and masses. Writers never touch the index. The caller holds the index lock.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "sampling/row_masses.h"
#include "sampling/waiting_rows.h"

namespace sharpwave {

class CatchUp {
public:
    CatchUp(RowMasses& masses, WaitingRows& waiting) : masses_(masses), waiting_(waiting) {}

    void run();

private:
    // A writer may claim blocks while a pass looks at them, so that rows it has just taken in are gone again: then
    // there is another pass. This many at most: only a process that is stopped again and again needs the third.
    static constexpr int kPasses = 100;

    struct Range {
        std::uint64_t slot, count, end;  // `end`: the serial after the last row
        bool is_even;                    // every one of them counts: see BlockRecord::uneven
    };

    void look();
    bool has_moved() const;
    void rebuild();
    bool follow_chain(std::uint64_t writer, const format::Position& position);
    void collect_all(std::uint64_t used);
    void collect(std::uint64_t ticket, std::uint64_t head);
    void take_in();
    float let_leave();
    void leave_ahead(std::uint64_t end, std::uint64_t window);
    void leave(std::uint64_t slot);
    void enter(float given_max);
    void enter_group(std::uint64_t slot, float stored, float mass);
    bool is_plain(const Range& range) const;
    void enter_waiting();
    void refresh();
    bool is_known(std::uint64_t slot, std::uint64_t least) const;
    float given_at(std::uint64_t slot) const;

    RowMasses& masses_;
    WaitingRows& waiting_;
    std::vector<Range> ranges_;                                  // rows that are not in the index yet
    std::vector<std::pair<std::uint64_t, std::uint64_t>> seen_;  // writers and the newest of their blocks
    std::vector<format::Position> positions_;                    // of all writers, as the last pass saw them
    std::vector<std::uint64_t> tickets_;                         // of the blocks
    // Of the call that runs.
    bool is_many_ = false;                // then sums are refreshed by range, else leaf by leaf
    float leaving_max_ = -1;              // the largest priority among rows that left
    std::vector<std::uint64_t> leaves_;   // slots of rows that left, unless they are many
    std::vector<std::uint64_t> retired_;  // those outside the ranges
    std::vector<std::uint64_t> words_;
};

}  // namespace sharpwave
