#include "base/crc32c.h"

#include <array>
#include <cstring>

#if defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

namespace sharpwave {
namespace {

using Update = std::uint32_t (*)(std::uint32_t, const unsigned char*, std::size_t);

constexpr std::array<std::uint32_t, 256> make_table() {
    std::array<std::uint32_t, 256> table{};
    for (std::uint32_t i = 0; i < 256; ++i) {
        std::uint32_t value = i;
        for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) ? 0x82f63b78u : 0);
        table[i] = value;
    }
    return table;
}

[[maybe_unused]] std::uint32_t update_portable(std::uint32_t crc, const unsigned char* data, std::size_t size) {
    static constexpr auto table = make_table();
    for (std::size_t i = 0; i < size; ++i) crc = table[(crc ^ data[i]) & 0xff] ^ (crc >> 8);
    return crc;
}

#if defined(__x86_64__)
// What kLane further bytes of zero make of a checksum: a linear map, kept as four tables of 256, one a byte of it.
constexpr std::size_t kLane = 1024;

struct Shift {
    std::array<std::array<std::uint32_t, 256>, 4> tables{};

    Shift() {
        const std::array<unsigned char, kLane> zeros{};
        std::array<std::uint32_t, 32> bits{};
        for (std::size_t i = 0; i < 32; ++i) bits[i] = update_portable(1u << i, zeros.data(), kLane);
        for (std::size_t table = 0; table < 4; ++table) {
            for (std::size_t byte = 0; byte < 256; ++byte) {
                for (std::size_t i = 0; i < 8; ++i)
                    if (byte >> i & 1) tables[table][byte] ^= bits[8 * table + i];
            }
        }
    }

    std::uint64_t operator()(std::uint64_t crc) const {
        return tables[0][crc & 0xff] ^ tables[1][crc >> 8 & 0xff] ^ tables[2][crc >> 16 & 0xff] ^
               tables[3][crc >> 24 & 0xff];
    }
};

__attribute__((target("sse4.2"))) std::uint32_t update_sse42(std::uint32_t crc, const unsigned char* data,
                                                             std::size_t size) {
    const auto load = [](const unsigned char* from) {
        std::uint64_t word;
        std::memcpy(&word, from, 8);
        return word;
    };
    std::uint64_t wide = crc;
    if (size >= 3 * kLane) {
        // Three lanes at a time: the instruction takes three times as long as it takes to begin the next.
        static const Shift shift;
        for (; size >= 3 * kLane; size -= 3 * kLane, data += 3 * kLane) {
            std::uint64_t second = 0, third = 0;
            for (std::size_t at = 0; at < kLane; at += 8) {
                wide = __builtin_ia32_crc32di(wide, load(data + at));
                second = __builtin_ia32_crc32di(second, load(data + kLane + at));
                third = __builtin_ia32_crc32di(third, load(data + 2 * kLane + at));
            }
            wide = shift(shift(wide) ^ second) ^ third;
        }
    }
    for (; size >= 8; size -= 8, data += 8) wide = __builtin_ia32_crc32di(wide, load(data));
    crc = static_cast<std::uint32_t>(wide);
    for (; size; --size, ++data) crc = __builtin_ia32_crc32qi(crc, *data);
    return crc;
}

__attribute__((target("sse4.2"))) void update_four(std::uint32_t* crcs, const unsigned char* data, std::size_t stride,
                                                   std::size_t size) {
    std::uint64_t a = crcs[0], b = crcs[1], c = crcs[2], d = crcs[3];
    const auto load = [](const unsigned char* from) {
        std::uint64_t word;
        std::memcpy(&word, from, 8);
        return word;
    };
    for (; size >= 8; size -= 8, data += 8) {
        a = __builtin_ia32_crc32di(a, load(data));
        b = __builtin_ia32_crc32di(b, load(data + stride));
        c = __builtin_ia32_crc32di(c, load(data + 2 * stride));
        d = __builtin_ia32_crc32di(d, load(data + 3 * stride));
    }
    crcs[0] = static_cast<std::uint32_t>(a);
    crcs[1] = static_cast<std::uint32_t>(b);
    crcs[2] = static_cast<std::uint32_t>(c);
    crcs[3] = static_cast<std::uint32_t>(d);
    for (; size; --size, ++data) {
        for (int i = 0; i < 4; ++i)
            crcs[i] = __builtin_ia32_crc32qi(crcs[i], data[static_cast<std::size_t>(i) * stride]);
    }
}
#elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
std::uint32_t update_arm(std::uint32_t crc, const unsigned char* data, std::size_t size) {
    for (; size >= 8; size -= 8, data += 8) {
        std::uint64_t word;
        std::memcpy(&word, data, 8);
        crc = __crc32cd(crc, word);
    }
    for (; size; --size, ++data) crc = __crc32cb(crc, *data);
    return crc;
}
#endif

// Checksums are polynomials modulo the one above, the highest power in the lowest bit. Bytes behind them multiply by a
// power of x.
constexpr std::uint32_t multiply(std::uint32_t one, std::uint32_t other) {
    std::uint32_t product = 0;
    for (std::uint32_t bit = 1u << 31; bit; bit >>= 1) {
        if (one & bit) product ^= other;
        other = (other >> 1) ^ ((other & 1) ? 0x82f63b78u : 0);
    }
    return product;
}

// x to the power of 1, 2, 4, ...
constexpr std::array<std::uint32_t, 67> make_powers() {
    std::array<std::uint32_t, 67> powers{};
    powers[0] = 1u << 30;
    for (std::size_t i = 1; i < powers.size(); ++i) powers[i] = multiply(powers[i - 1], powers[i - 1]);
    return powers;
}

Update choose() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("sse4.2")) return update_sse42;
#elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
    return update_arm;
#endif
    return update_portable;
}

}  // namespace

std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t size) {
    static const Update update = choose();
    return ~update(~crc, static_cast<const unsigned char*>(data), size);
}

std::uint32_t crc32c_combine(std::uint32_t first, std::uint32_t second, std::uint64_t size) {
    static constexpr auto powers = make_powers();
    for (std::size_t i = 3; size; size >>= 1, ++i) {  // from 3 on: bytes, not bits
        if (size & 1) first = multiply(powers[i], first);
    }
    return first ^ second;
}

void crc32c_each(std::uint32_t* crcs, const void* data, std::size_t stride, std::size_t size, std::size_t count) {
    const auto* first = static_cast<const unsigned char*>(data);
    std::size_t i = 0;
#if defined(__x86_64__)
    static const bool is_fast = __builtin_cpu_supports("sse4.2");
    for (; is_fast && i + 4 <= count; i += 4) {
        std::uint32_t four[4];
        for (std::size_t k = 0; k < 4; ++k) four[k] = ~crcs[i + k];
        update_four(four, first + i * stride, stride, size);
        for (std::size_t k = 0; k < 4; ++k) crcs[i + k] = ~four[k];
    }
#endif
    for (; i < count; ++i) crcs[i] = crc32c(crcs[i], first + i * stride, size);
}

}  // namespace sharpwave
