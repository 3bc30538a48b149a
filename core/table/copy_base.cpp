// The copy kernels for any processor of the architecture, and the choice among all of them.
#define SHARPWAVE_KERNELS base_kernels
#define SHARPWAVE_VECTOR_BYTES 16
#if defined(__SSE2__)
#include <emmintrin.h>
#define SHARPWAVE_STREAM(to, from) \
    _mm_stream_si128(reinterpret_cast<__m128i*>(to), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))
#define SHARPWAVE_STREAM_END() _mm_sfence()
#else
#define SHARPWAVE_STREAM(to, from) move<kVector>(to, from)
#define SHARPWAVE_STREAM_END() static_cast<void>(0)
#endif
#include "table/copy_kernels.inc"

namespace sharpwave {

#if defined(SHARPWAVE_HAS_AVX2)
const CopyKernels& avx2_copy_kernels();
#endif

const CopyKernels& kernels() {
    static const CopyKernels& chosen = []() -> const CopyKernels& {
#if defined(SHARPWAVE_HAS_AVX2)
        if (__builtin_cpu_supports("avx2")) return avx2_copy_kernels();
#endif
        static const CopyKernels base = {"base",
                                         base_kernels::gather_rows,
                                         base_kernels::gather_warm,
                                         base_kernels::gather_run,
                                         base_kernels::gather_steps,
                                         base_kernels::scatter_rows};
        return base;
    }();
    return chosen;
}

}  // namespace sharpwave
