#include "base/futex.h"

#include <time.h>

#include <algorithm>
#include <climits>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace sharpwave {

namespace {

timespec duration(double seconds) {
    timespec time{};
    time.tv_sec = static_cast<time_t>(seconds);
    time.tv_nsec = static_cast<long>((seconds - static_cast<double>(time.tv_sec)) * 1e9);
    return time;
}

}  // namespace

#if defined(__linux__)

static_assert(sizeof(std::atomic<std::uint32_t>) == 4);

// Not the private kind: processes wait for each other.
void wait_for_change(std::atomic<std::uint32_t>& word, std::uint32_t seen, double seconds) {
    const timespec time = duration(std::clamp(seconds, 0.0, 3600.0));
    syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAIT, seen, &time, nullptr, 0);
}

void wake_all(std::atomic<std::uint32_t>& word) {
    syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

#else

// No such call that works between processes: short sleeps instead (untested).
void wait_for_change(std::atomic<std::uint32_t>& word, std::uint32_t seen, double seconds) {
    const timespec pause = duration(0.0005);
    for (double slept = 0; slept < seconds && word.load(std::memory_order_acquire) == seen; slept += 0.0005) {
        nanosleep(&pause, nullptr);
    }
}

void wake_all(std::atomic<std::uint32_t>&) {}

#endif

}  // namespace sharpwave
