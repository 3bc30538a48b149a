// CRC32C (Castagnoli), by the processor's instruction where there is one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sharpwave {

// Continues `crc` over `size` bytes; start with 0.
std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t size);

// The checksum of two runs of bytes one behind the other, from that of each; the second has `size` bytes. About 1 us.
std::uint32_t crc32c_combine(std::uint32_t first, std::uint32_t second, std::uint64_t size);

// `crc32c` for `count` runs of `size` bytes, `stride` apart, each from its own number in `crcs` on. Several at a time:
// the instruction takes three times as long as it takes to begin the next.
void crc32c_each(std::uint32_t* crcs, const void* data, std::size_t stride, std::size_t size, std::size_t count);

}  // namespace sharpwave
