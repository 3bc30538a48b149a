// A 16-ary tree over leaf masses: sums for drawing, and beside each sum the largest priority and the smallest mass.
//
// A node's children fill two cache lines (leaves: one). Parents are computed anew from their children and never added
// to, so no error builds up; every sum is taken in one fixed order, so that all machines agree to the last bit. Zeroed
// memory is an empty tree. The caller holds the index lock.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sharpwave {

// A row's priority as it is stored: the negative of it, so that zeroed memory means "no row here" and a live row of
// priority 0 is -0.0.
inline float stored_priority(float priority) { return -__builtin_fabsf(priority); }
inline bool is_row(float stored) { return __builtin_signbit(stored) != 0; }

// A row that may not be drawn yet keeps its priority with the other sign: no mass, and not "no row" either.
inline bool is_waiting(float stored) { return stored > 0; }
inline float waiting_priority(float priority) {
    const float magnitude = __builtin_fabsf(priority);
    return magnitude > 0 ? magnitude : __FLT_DENORM_MIN__;
}
inline float priority_of_waiting(float stored) { return stored == __FLT_DENORM_MIN__ ? 0 : stored; }

// Sixteen leaves, side by side: what a change touches is two neighbouring cache lines.
struct alignas(64) MassGroup {
    float stored[16];
    float masses[16];
};

// What stands over sixteen groups of children.
struct alignas(64) SumGroup {
    double sums[16];   // 0: no mass below
    float least[16];   // the least stored priority below, which is the largest priority; 0: no row below
    float minima[16];  // the smallest mass above 0 below; 0: none
};

struct SumTree {
    static constexpr int kMaxLevels = 16;
    static constexpr std::uint64_t kFan = 16;

    // The memory has the sizes that storage/format.h tells.
    SumTree(std::byte* leaf_memory, std::byte* node_memory, std::uint64_t leaf_count);

    static constexpr std::uint64_t groups_of(std::uint64_t children) { return (children + kFan - 1) / kFan; }

    double total() const { return levels[depth - 1]->sums[0]; }
    float largest_priority() const { return __builtin_fabsf(levels[depth - 1]->least[0]); }
    float smallest_mass() const { return levels[depth - 1]->minima[0]; }
    float& stored(std::uint64_t leaf) const { return leaves[leaf / kFan].stored[leaf % kFan]; }
    float& mass(std::uint64_t leaf) const { return leaves[leaf / kFan].masses[leaf % kFan]; }

    std::uint64_t leaf_count = 0;
    MassGroup* leaves = nullptr;
    SumGroup* levels[kMaxLevels] =
        {};  // levels[0] stands directly over the leaves; the last one's first node is the root
    std::uint64_t sizes[kMaxLevels] = {};  // nodes of a level
    int depth = 0;
    bool keeps_largest = true;   // whether largest_priority() is asked for
    bool keeps_smallest = true;  // whether smallest_mass() is
};

struct SumTreeKernels {
    // out[i] = x[i] ^ exponent in double precision (within a few units in the last place), x >= 0; 0 gives 0.
    void (*powers)(const double* x, double* out, std::size_t count, double exponent);

    // The mass of a stored priority: (priority + eps) ^ alpha rounded to float; no row and priority + eps = 0 give 0.
    void (*masses)(const float* stored, float* out, std::size_t count, double eps, double alpha);

    // Brings the nodes above these leaves up to date. Duplicates are fine.
    void (*refresh)(const SumTree& tree, const std::uint64_t* leaves, std::size_t count);
    void (*refresh_range)(const SumTree& tree, std::uint64_t begin, std::uint64_t end);

    // For each target in [0, total) the leaf at which the running sum passes it. Never a leaf without mass. The whole
    // batch goes down a level at a time, so that all its cache misses are in flight together. Targets are spent; tell
    // when they are in ascending order.
    void (*descend)(const SumTree& tree, double* targets, std::uint64_t* leaves, std::size_t count, bool ascending);
};

const SumTreeKernels& sum_tree_kernels();

}  // namespace sharpwave
