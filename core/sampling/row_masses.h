// The priority and the mass of every row, in the table's bytes: the leaves of the sum tree, and what is counted over
// them.
//
// The mass of a row is (priority + eps) ^ alpha, or with rank_based (1 / rank) ^ alpha (sampling/ranks.h). Orders other
// than weighted ones give every row that may be drawn mass 1. The caller holds the index lock.
#pragma once

#include <cstdint>
#include <vector>

#include "sampling/row_index_config.h"
#include "sampling/sum_tree.h"
#include "table/table.h"

namespace sharpwave {

struct RowMasses {
    // The table was made with an index.
    RowMasses(Table& of, const RowIndexConfig& settings);

    // The region's first bytes.
    struct Head {
        std::uint64_t rows;      // live rows in the index
        std::uint64_t massless;  // of those, rows of mass 0
        std::uint64_t changes;   // adds and updates since the last ranking
        std::uint64_t ranked;    // 1: masses are those of a ranking that came to its end
        std::uint64_t reserved[4];
    };

    double alpha() const;
    double running_max() const;
    void raise_running_max(float priority);

    void set_leaf(std::uint64_t slot, float priority, float mass);
    void set_waiting(std::uint64_t slot, float priority);  // a row that may not be drawn yet
    void remove(std::uint64_t slot);
    float mass_of(float priority) const;

    // Of a new row that was added without one. `given_max`: the largest that its neighbours brought; -1: none.
    float fallback_priority(float given_max) const;

    // Brings the sums over the leaves in `changed` up to date.
    void refresh_changed() { kernels.refresh(tree, changed.data(), changed.size()); }
    void refresh_all() { kernels.refresh_range(tree, 0, tree.leaf_count); }

    // Every mass anew, from the stored priorities.
    void remake();

    Table& table;
    const RowIndexConfig config;
    Head* const head;
    std::uint64_t* const cursors;  // one a block: the first serial that is not in the index yet
    float* const given;            // by writers: the priority that an add brought, as stored; 0: none
    std::uint32_t* const reads;    // one a row; null: not counted
    SumTree tree;
    const SumTreeKernels& kernels;
    std::vector<std::uint64_t> changed;  // slots whose leaves changed since the sums were brought up to date
};

inline void RowMasses::set_leaf(std::uint64_t slot, float priority, float mass) {
    float& stored = tree.stored(slot);
    float& leaf = tree.mass(slot);
    if (is_row(stored)) {
        head->massless -= leaf == 0;
    } else {
        ++head->rows;
    }
    head->massless += mass == 0;
    stored = stored_priority(priority);
    leaf = mass;
}

inline void RowMasses::remove(std::uint64_t slot) {
    if (is_waiting(tree.stored(slot))) tree.stored(slot) = 0;
    if (!is_row(tree.stored(slot))) return;
    --head->rows;
    head->massless -= tree.mass(slot) == 0;
    tree.stored(slot) = 0;
    tree.mass(slot) = 0;
}

inline void RowMasses::set_waiting(std::uint64_t slot, float priority) {
    remove(slot);
    tree.stored(slot) = waiting_priority(priority);
}

}  // namespace sharpwave
