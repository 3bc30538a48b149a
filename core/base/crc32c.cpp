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
__attribute__((target("sse4.2"))) std::uint32_t update_sse42(std::uint32_t crc, const unsigned char* data,
                                                             std::size_t size) {
    std::uint64_t wide = crc;
    for (; size >= 8; size -= 8, data += 8) {
        std::uint64_t word;
        std::memcpy(&word, data, 8);
        wide = __builtin_ia32_crc32di(wide, word);
    }
    crc = static_cast<std::uint32_t>(wide);
    for (; size; --size, ++data) crc = __builtin_ia32_crc32qi(crc, *data);
    return crc;
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

}  // namespace sharpwave
