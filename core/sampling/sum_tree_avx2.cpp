// The tree kernels for processors with AVX2; compiled with that instruction set, run only where it is there.
#define SHARPWAVE_KERNELS avx2_tree_kernels_
#include "sampling/sum_tree_kernels.inc"

namespace sharpwave {

const SumTreeKernels& avx2_tree_kernels() {
    namespace k = avx2_tree_kernels_;
    static const SumTreeKernels kernels = {k::powers, k::masses, k::refresh, k::refresh_range, k::descend};
    return kernels;
}

}  // namespace sharpwave
