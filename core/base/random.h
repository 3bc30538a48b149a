// Counter-based random numbers: draw (seed, call, i, attempt) is a pure function of four integers, so the state
// of the stream is one call number, two callers never share a substream, and nothing can be left half done.
#pragma once

#include <cstdint>

#include "base/wide.h"

namespace sharpwave {

// Finaliser of SplitMix64: a bijection of 64 bits in which every input bit reaches every output bit.
inline std::uint64_t mix64(std::uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
}

class Substream {
public:
    Substream(std::uint64_t seed, std::uint64_t call) : key_(mix64(mix64(seed + kStep) ^ (call * kCallStep))) {}

    // attempt < 2^24 and i < 2^40 keep the counters of one call apart.
    std::uint64_t bits(std::uint64_t i, std::uint64_t attempt = 0) const {
        return mix64(key_ + ((attempt << 40) + i + 1) * kStep);
    }

    // Uniform over [0, range), exactly: the high half of a product, with the few low halves that would favour
    // some results sent through the bijection again (fewer than range in 2^64 of them).
    std::uint64_t below(std::uint64_t range, std::uint64_t i, std::uint64_t attempt = 0) const {
        std::uint64_t word = bits(i, attempt);
        auto product = static_cast<Wide>(word) * range;
        while (static_cast<std::uint64_t>(product) < range) {
            if (static_cast<std::uint64_t>(product) >= (0 - range) % range) break;
            word = mix64(word + kStep);
            product = static_cast<Wide>(word) * range;
        }
        return static_cast<std::uint64_t>(product >> 64);
    }

private:
    static constexpr std::uint64_t kStep = 0x9e3779b97f4a7c15ULL;
    static constexpr std::uint64_t kCallStep = 0xd1342543de82ef95ULL;
    std::uint64_t key_;
};

}  // namespace sharpwave
