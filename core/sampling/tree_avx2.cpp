// The tree kernels for processors with AVX2; compiled with that instruction set, run only where it is there.
#define SHARPWAVE_KERNELS avx2_tree_kernels_
#include "sampling/tree_kernels.inc"

namespace sharpwave {

const TreeKernels& avx2_tree_kernels() {
    namespace k = avx2_tree_kernels_;
    static const TreeKernels kernels = {k::powers, k::masses, k::refresh, k::refresh_range, k::descend};
    return kernels;
}

}  // namespace sharpwave
