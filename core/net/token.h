// Random names: 16 bytes of the system's, as 32 hexadecimal digits.
#pragma once

#include <random>
#include <string>

namespace sharpwave::net {

inline std::string random_token() {
    std::random_device system;
    std::string token;
    for (int i = 0; i < 16; ++i) {
        constexpr char kDigits[] = "0123456789abcdef";
        const unsigned byte = system() & 255;
        token.push_back(kDigits[byte >> 4]);
        token.push_back(kDigits[byte & 15]);
    }
    return token;
}

}  // namespace sharpwave::net
