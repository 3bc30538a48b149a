// Sleeping until a number in shared memory changes.
#pragma once

#include <atomic>
#include <cstdint>

namespace sharpwave {

// Returns when the word is no longer `seen`, when it is woken, or after so many seconds; it may return early.
void wait_for_change(std::atomic<std::uint32_t>& word, std::uint32_t seen, double seconds);
void wake_all(std::atomic<std::uint32_t>& word);

}  // namespace sharpwave
