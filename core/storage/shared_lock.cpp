#include "storage/shared_lock.h"

#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>

#include "base/error.h"
#include "base/process.h"
#include "storage/presence.h"

namespace sharpwave {

namespace {

// Whether processes keep each other out by the lock file: where there are no robust mutexes, and where a test says so.
bool by_file() {
#if !defined(__linux__)
    return true;
#elif defined(SHARPWAVE_FAULTS)
    static const bool said = std::getenv("SHARPWAVE_FILE_LOCKS") != nullptr;
    return said;
#else
    return false;
#endif
}

int lock_within(pthread_mutex_t& mutex, double timeout_s) {
    int code = pthread_mutex_trylock(&mutex);
    if (code != EBUSY) return code;
#if defined(__linux__)
    timespec deadline{};
    clock_gettime(CLOCK_REALTIME, &deadline);
    const std::uint64_t nanoseconds =
        static_cast<std::uint64_t>(deadline.tv_nsec) + static_cast<std::uint64_t>(timeout_s * 1e9);
    deadline.tv_sec += static_cast<time_t>(nanoseconds / 1'000'000'000);
    deadline.tv_nsec = static_cast<long>(nanoseconds % 1'000'000'000);
    return pthread_mutex_timedlock(&mutex, &deadline);
#else
    const std::uint64_t deadline = now_ns() + static_cast<std::uint64_t>(timeout_s * 1e9);
    while ((code = pthread_mutex_trylock(&mutex)) == EBUSY && now_ns() < deadline) usleep(50);
    return code == EBUSY ? ETIMEDOUT : code;
#endif
}

}  // namespace

void SharedLock::initialise() {
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
#if defined(__linux__)
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
#endif
    pthread_mutex_init(&mutex, &attributes);
    pthread_mutexattr_destroy(&attributes);
    owner_pid.store(0, std::memory_order_relaxed);
}

bool SharedLock::lock(double timeout_s, const Presence* presence) {
    int code = 0;
    bool abandoned = false;
    if (presence && by_file()) {
        code = presence->take(Presence::Turn::index, timeout_s) ? 0 : ETIMEDOUT;
        abandoned = code == 0 && owner_pid.load(std::memory_order_relaxed) != 0;
    } else {
        code = lock_within(mutex, timeout_s);
    }
#if defined(__linux__)
    if (code == EOWNERDEAD) {
        pthread_mutex_consistent(&mutex);
        abandoned = true;
        code = 0;
    }
#endif
    if (code == ETIMEDOUT) {
        throw Error(ErrorKind::not_ready, "the buffer's index is held by process " + std::to_string(owner_pid.load()) +
                                              ", which does not go on; is it stopped?");
    }
    if (code != 0) throw Error(ErrorKind::storage, std::string("cannot lock the index: ") + std::strerror(code));
    owner_pid.store(process_id(), std::memory_order_relaxed);
    return abandoned;
}

void SharedLock::unlock(const Presence* presence) {
    if (presence && by_file()) {
        owner_pid.store(0, std::memory_order_relaxed);
        return presence->give(Presence::Turn::index);
    }
    pthread_mutex_unlock(&mutex);
}

}  // namespace sharpwave
