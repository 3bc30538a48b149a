#include "sampling/row_masses.h"

#include <algorithm>

#include "sampling/exponents.h"
#include "sampling/ranks.h"

namespace sharpwave {

using namespace format;

RowMasses::RowMasses(Table& of, const RowIndexConfig& settings)
    : table(of),
      config(settings),
      head(reinterpret_cast<Head*>(of.region(kPriorities))),
      cursors(reinterpret_cast<std::uint64_t*>(of.region(kPriorities) + sizeof(Head))),
      given(of.given()),
      reads(of.reads()),
      tree(of.region(kPriorities) + leaves_offset(of.blocks()), of.region(kTree), of.header().slots),
      kernels(sum_tree_kernels()) {
    static_assert(sizeof(Head) == kIndexHeadBytes);
    tree.keeps_largest = config.new_rows == NewRows::live_max;
    tree.keeps_smallest = config.normalize == Normalize::buffer;
}

double RowMasses::alpha() const { return load_real(table.counters().alpha); }
double RowMasses::running_max() const { return load_real(table.counters().running_max); }

void RowMasses::raise_running_max(float priority) {
    if (priority > running_max()) store_real(table.counters().running_max, priority);
}

float RowMasses::fallback_priority(float given_max) const {
    switch (config.new_rows) {
        case NewRows::constant:
            return config.new_priority;
        case NewRows::running_max:
            return static_cast<float>(running_max());
        case NewRows::live_max:
            break;
    }
    if (head->rows == 0) return given_max >= 0 ? given_max : 1.0f;
    return std::max(tree.largest_priority(), given_max);
}

float RowMasses::mass_of(float priority) const {
    if (config.rank_based) return 1.0f;  // of rank 1
    const float stored = stored_priority(priority);
    float mass;
    kernels.masses(&stored, &mass, 1, config.eps, alpha());
    return mass;
}

void RowMasses::remake() {
    if (config.rank_based) {
        Ranks ranks(*this);
        return ranks.are_kept() ? refresh_all() : ranks.make();
    }
    head->changes = 0;
    const double exponent = alpha();
    head->massless = 0;
    for (std::uint64_t group = 0; group < SumTree::groups_of(tree.leaf_count); ++group) {
        MassGroup& leaves = tree.leaves[group];
        kernels.masses(leaves.stored, leaves.masses, 16, config.eps, exponent);
        for (int i = 0; i < 16; ++i) head->massless += is_row(leaves.stored[i]) && leaves.masses[i] == 0;
    }
    refresh_all();
}

}  // namespace sharpwave
