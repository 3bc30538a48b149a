// Values kept in fewer bytes than they have: LZ4 or Zstd through Blosc2, with its byte shuffle for items of several
// bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "schema/schema.h"

namespace sharpwave {

// False where the library was built without Blosc2; then fields with a codec are refused at creation.
bool has_codecs();

// Writes at most `bytes` bytes to `out`; returns how many. As many as it was given: they are kept as given.
std::uint32_t encode(const Field& field, const std::byte* value, std::uint32_t bytes, std::byte* out);

// Restores exactly `value_bytes` bytes. False: `kept` is not what encode() made; `out` may hold anything.
bool decode(const std::byte* kept, std::uint32_t kept_bytes, std::byte* out, std::uint32_t value_bytes);

}  // namespace sharpwave
