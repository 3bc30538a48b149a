// Division by a number that stays the same, as one multiplication.
#pragma once

#include <cstdint>

#include "base/wide.h"

namespace sharpwave {

class Divider {
public:
    Divider() = default;

    // Exact for numerators up to `largest`; falls back to a division where a multiplication would not be.
    Divider(std::uint64_t divisor, std::uint64_t largest)
        : divisor_(divisor),
          magic_(divisor > 1 && largest <= ~std::uint64_t{0} / divisor ? ~std::uint64_t{0} / divisor + 1 : 0) {}

    // magic = (2^64 + e) / divisor with e <= divisor, so the quotient is exact while n * e < 2^64.
    std::uint64_t quotient(std::uint64_t n) const {
        return magic_ ? static_cast<std::uint64_t>(static_cast<Wide>(n) * magic_ >> 64) : n / divisor_;
    }
    std::uint64_t remainder(std::uint64_t n) const { return n - quotient(n) * divisor_; }

private:
    std::uint64_t divisor_ = 1;
    std::uint64_t magic_ = 0;
};

}  // namespace sharpwave
