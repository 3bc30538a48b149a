#include "base/process.h"

#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <fstream>

namespace sharpwave {
namespace {

std::atomic<std::uint64_t> generation{0};
std::atomic<std::uint64_t> own_id{static_cast<std::uint64_t>(getpid())};

[[maybe_unused]] const int forks_are_counted = pthread_atfork(nullptr, nullptr, [] {
    generation.fetch_add(1, std::memory_order_relaxed);
    own_id.store(static_cast<std::uint64_t>(getpid()), std::memory_order_relaxed);
});

}  // namespace

std::uint64_t process_generation() noexcept { return generation.load(std::memory_order_relaxed); }

std::uint64_t process_id() noexcept { return own_id.load(std::memory_order_relaxed); }

std::string boot_id() {
    std::ifstream file("/proc/sys/kernel/random/boot_id");
    std::string id;
    std::getline(file, id);
    return id;  // empty where the system has none: then every unclean open verifies checksums
}

std::uint64_t rough_wall_ns() {
#if defined(CLOCK_REALTIME_COARSE)
    timespec time{};
    clock_gettime(CLOCK_REALTIME_COARSE, &time);
    return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(time.tv_nsec);
#else
    return wall_ns();
#endif
}

std::uint64_t wall_ns() {
    using namespace std::chrono;
    return static_cast<std::uint64_t>(duration_cast<nanoseconds>(system_clock::now().time_since_epoch()).count());
}

}  // namespace sharpwave
