// The kernels of returns for processors with AVX2; compiled with that instruction set, run only where it is there.
#define SHARPWAVE_KERNELS avx2_return_kernels_
#include "returns/returns_kernels.inc"

namespace sharpwave {

const AllReturnKernels& avx2_return_kernels() {
    namespace k = avx2_return_kernels_;
    static const AllReturnKernels all = {k::kKernels<float, std::uint8_t>, k::kKernels<float, float>,
                                         k::kKernels<double, std::uint8_t>, k::kKernels<double, double>};
    return all;
}

}  // namespace sharpwave
