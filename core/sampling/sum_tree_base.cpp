// The tree kernels for any processor of the architecture, the choice among all of them, and the tree's layout.
#define SHARPWAVE_KERNELS base_tree_kernels
#include "sampling/sum_tree_kernels.inc"

namespace sharpwave {

#if defined(SHARPWAVE_HAS_AVX2)
const SumTreeKernels& avx2_tree_kernels();
#endif

const SumTreeKernels& sum_tree_kernels() {
    static const SumTreeKernels& chosen = []() -> const SumTreeKernels& {
#if defined(SHARPWAVE_HAS_AVX2)
        if (__builtin_cpu_supports("avx2")) return avx2_tree_kernels();
#endif
        namespace k = base_tree_kernels;
        static const SumTreeKernels base = {k::powers, k::masses, k::refresh, k::refresh_range, k::descend};
        return base;
    }();
    return chosen;
}

SumTree::SumTree(std::byte* leaf_memory, std::byte* node_memory, std::uint64_t count)
    : leaf_count(count), leaves(reinterpret_cast<MassGroup*>(leaf_memory)) {
    auto* memory = reinterpret_cast<SumGroup*>(node_memory);
    std::uint64_t nodes = groups_of(count);
    for (;; nodes = groups_of(nodes)) {
        levels[depth] = memory;
        sizes[depth++] = nodes;
        memory += groups_of(nodes);
        if (nodes == 1) return;
    }
}

}  // namespace sharpwave
