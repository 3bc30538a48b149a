// The 64-bit word of a row: version, episode boundary and handle at once. A part of storage/format.h, apart from it
// because the copy kernels may include no standard header with inline functions.
#pragma once

#include <cstdint>

namespace sharpwave::format {

// ---- the word of a row ------------------------------------------------------------------------------------------
// bits 0-1 state, bits 2-9 flags, bits 10-59 serial (1.1e15 rows), bits 60-63 zero.
enum State : std::uint64_t { kEmpty = 0, kWriting = 1, kCommitted = 2, kVoid = 3 };
inline constexpr std::uint64_t kStateMask = 3;
inline constexpr unsigned kSerialShift = 10;
enum Flag : std::uint64_t {
    kEpisodeStart = 1 << 2,
    kTerminated = 1 << 3,
    kTruncated = 1 << 4,
    kClosedByEngine = 1 << 5,       // the episode's end was not told: a reset, a closed or a dead writer
    kHasFinalObservation = 1 << 6,  // its next observation is in a heap, not in the row after it
    kNextStartsOver = 1 << 7,       // the stack of its next observation is that of an episode's start
    kRetired = 1 << 8,              // kept for the stacks of its neighbours, not drawn, not counted
    kCut = 1 << 9,                  // an agent was truncated and others go on: n-step examples end here
};
inline constexpr std::uint64_t kFlagMask = 0x3fc;
inline constexpr std::uint64_t kEndMask = kTerminated | kTruncated;
// A handle is a serial in 64 bits, so 13 bits of it (50 to 62; the sign bit stays 0) are left for the number of a shard
// and for an incarnation, where handles leave the machine.
inline constexpr unsigned kSerialBits = 50;
inline constexpr std::uint64_t kMaxSerial = (std::uint64_t{1} << kSerialBits) - 1;

constexpr std::uint64_t serial_of(std::uint64_t word) { return word >> kSerialShift; }
constexpr std::uint64_t state_of(std::uint64_t word) { return word & kStateMask; }
// What never changes once a row is committed, and is covered by its checksum: serial, whether it is VOID, and the flags
// that its add gave. (An end that the engine told later is not one of those.)
constexpr std::uint64_t lasting_part(std::uint64_t word) {
    const std::uint64_t told = (word & kTruncated) && !(word & kClosedByEngine) ? 1 : 0;
    const std::uint64_t is_void = state_of(word) == kVoid ? 1 : 0;
    return serial_of(word) << 4 | is_void << 3 | told << 2 | ((word & kTerminated) ? 2u : 0u) |
           ((word & kEpisodeStart) ? 1u : 0u) | (word & kNextStartsOver) << (63 - 7) | (word & kCut) << (62 - 9);
}
// Whether a row may be drawn; words below `least` belong to cleared rows.
constexpr bool is_live(std::uint64_t word, std::uint64_t least) {
    return (word & (kStateMask | kRetired)) == kCommitted && word >= least;
}
constexpr std::uint64_t make_word(std::uint64_t serial, std::uint64_t flags, State state) {
    return serial << kSerialShift | flags | state;
}

}  // namespace sharpwave::format
