// Copies of bytes outside the rows that others may be changing or reading (inside the rows: table/copy.h).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace sharpwave {

// What a seqlock needs between its word and its bytes. ThreadSanitizer knows no fences; there the bytes are atomics.
inline void fence(std::memory_order order) {
#if defined(SHARPWAVE_TSAN)
    (void)order;
#else
    std::atomic_thread_fence(order);
#endif
}

// A plain copy of bytes that others may be changing or reading, for what stands outside the rows.
inline void racy_copy(std::byte* to, const std::byte* from, std::uint64_t bytes) {
#if defined(SHARPWAVE_TSAN)
    for (std::uint64_t i = 0; i < bytes; ++i) {
        __atomic_store_n(reinterpret_cast<unsigned char*>(to) + i,
                         __atomic_load_n(reinterpret_cast<const unsigned char*>(from) + i, __ATOMIC_ACQUIRE),
                         __ATOMIC_RELEASE);
    }
#else
    if (bytes) __builtin_memcpy(to, from, bytes);  // empty values have no address
#endif
}

}  // namespace sharpwave
