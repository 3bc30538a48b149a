// The copy kernels for x86 processors with AVX2; compiled with -mavx2, called only where the processor has it.
#define SHARPWAVE_KERNELS avx2_kernels
#define SHARPWAVE_VECTOR_BYTES 32
#include <immintrin.h>
#define SHARPWAVE_STREAM(to, from) \
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))
#define SHARPWAVE_STREAM_END() _mm_sfence()
#include "table/copy_kernels.inc"

namespace sharpwave {

const CopyKernels& avx2_copy_kernels() {
    static constexpr CopyKernels avx2 = {"avx2",
                                         avx2_kernels::gather_rows,
                                         avx2_kernels::gather_warm,
                                         avx2_kernels::gather_run,
                                         avx2_kernels::gather_steps,
                                         avx2_kernels::scatter_rows};
    return avx2;
}

}  // namespace sharpwave
