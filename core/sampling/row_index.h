// Which rows may be drawn, and how likely each is: one mass a slot, in a tree (sampling/sum_tree.h).
//
// Writers never touch the index. A call that draws or updates takes the index lock and catches up first
// (sampling/catch_up.h): it reads the words that the writers have committed since and gives each new row its priority.
// So the index is derived: it can be rebuilt from rows and stored priorities, and it is, when a process died inside the
// lock.
//
// Masses: sampling/row_masses.h. Orders other than weighted ones give every row that may be drawn mass 1, so that a
// running sum of masses counts rows: the k-th oldest is found by the same descent as a draw. Draws:
// sampling/index_draw.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "sampling/catch_up.h"
#include "sampling/exponents.h"
#include "sampling/row_index_config.h"
#include "sampling/row_masses.h"
#include "sampling/waiting_rows.h"
#include "table/table.h"

namespace sharpwave {

class RowIndex {
public:
    // The table was made with priorities.
    RowIndex(Table& table, const RowIndexConfig& config);

    const RowIndexConfig& config() const { return masses_.config; }

    struct Updated {
        std::uint64_t applied = 0, stale = 0;
    };

    // Gives rows new priorities: magnitudes, last write wins. The caller has refused NaN and infinities.
    Updated update(const std::uint64_t* serials, const float* priorities, std::size_t count,
                   Deadline deadline = Deadline::never());

    // Rows that were drawn and not delivered: as if they had not been drawn.
    void give_back(const std::uint64_t* serials, std::size_t count);

    // Every mass follows at once, exactly, from 0 too.
    void set_alpha(double alpha);
    double alpha() const;
    void set_beta(double start, double end, double steps);
    double beta() const;  // of the next call
    Exponents exponents() const;

    // What rows have now; those that are gone have -1.
    void priorities(const std::uint64_t* serials, float* priorities, std::size_t count);

    std::uint64_t updates_applied() const;
    std::uint64_t updates_stale() const;
    double total();        // sum of all masses, after catching up
    std::uint64_t rows();  // that may be drawn, after catching up
    const Starts& starts() const { return waiting_.starts(); }

    // For a caller that holds the table's lock already: brings the index up to date.
    std::uint64_t rows_locked();

    // Rows that may be drawn, as of the last call that brought the index up to date. Needs no lock.
    std::uint64_t rows_known() const;

    // How many rows a draw of `count` needs at least: see Order.
    std::uint64_t rows_needed(std::uint64_t count) const {
        const Order order = masses_.config.order;
        return order == Order::weighted || order == Order::recent ? 1 : count;
    }

    // The sum of the leaves taken anew, for tests of the tree.
    double recomputed_total();

private:
    friend class IndexDraw;

    void catch_up() { catch_up_.run(); }
    [[noreturn]] void refuse(std::uint64_t asked) const;

    // Everything from here on belongs to the lock.
    Table& table_;
    RowMasses masses_;
    WaitingRows waiting_;
    CatchUp catch_up_;
    std::vector<std::uint64_t> leaves_;  // update(): the slots of the rows
    std::vector<float> stored_, new_masses_;
};

}  // namespace sharpwave
