// The head of every message, as docs/protocol.md has it: 64 bytes, all numbers little-endian.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace sharpwave::wire {

static_assert(std::endian::native == std::endian::little, "heads and arrays are sent as they stand in memory");

inline constexpr std::uint32_t kMagic = 0x57504853;  // "SHPW"
inline constexpr std::uint16_t kVersion = 1;
inline constexpr std::uint64_t kForever = ~std::uint64_t{0};

enum class Verb : std::uint16_t {
    hello = 1,
    open = 2,
    beat = 3,
    probe = 4,
    bye = 5,
    call = 6,
    add = 7,
    sample = 8,
    update = 9,
    settle = 10,
    tables = 11,
};
inline constexpr int kVerbs = 12;

// Flags of SAMPLE and of ADD.
inline constexpr std::uint16_t kAddTellsIndices = 1;
inline constexpr std::uint16_t kSampleHolds = 1;
inline constexpr std::uint16_t kSampleTellsOdds = 2;

enum class Status : std::uint16_t {
    ok = 0,
    schema_error = 1,
    not_ready = 2,
    storage_error = 3,
    stale_handle = 4,
    closed_error = 5,
    buffer_full = 6,
    type_error = 7,
    failure = 8,
    unknown_session = 16,
    unknown_call = 17,
    working = 18,
    bad_message = 19,
    version = 20,
    forbidden = 21,
    busy = 22,
};

struct Head {
    std::uint32_t magic = kMagic;
    std::uint16_t version = kVersion;
    Verb verb = Verb::hello;
    Status status = Status::ok;
    std::uint16_t flags = 0;
    std::uint32_t table = 0;
    std::uint64_t session = 0;
    std::uint32_t channel = 0;
    std::uint32_t stream = 0;
    std::uint64_t call = 0;
    std::uint64_t oldest = 0;
    std::uint64_t timeout = 0;
    std::uint64_t argument = 0;
};
static_assert(sizeof(Head) == 64 && offsetof(Head, session) == 16 && offsetof(Head, argument) == 56);

// False: no message of this protocol.
inline bool read_head(std::span<const std::byte> frame, Head& head) {
    if (frame.size() < sizeof head) return false;
    std::memcpy(&head, frame.data(), sizeof head);
    return head.magic == kMagic;
}

}  // namespace sharpwave::wire
