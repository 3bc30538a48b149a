// CRC32C (Castagnoli), by the processor's instruction where there is one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sharpwave {

// Continues `crc` over `size` bytes; start with 0.
std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t size);

}  // namespace sharpwave
