#include "storage/shared_lock.h"

#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "base/error.h"
#include "base/process.h"
#include "storage/presence.h"

#if !defined(__linux__)
#define SHARPWAVE_FILE_LOCKS
#endif

namespace sharpwave {

namespace {

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
#if !defined(SHARPWAVE_FILE_LOCKS)
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
#if defined(SHARPWAVE_FILE_LOCKS)
    if (presence) {
        code = presence->take(Presence::Turn::index, timeout_s) ? 0 : ETIMEDOUT;
        abandoned = code == 0 && owner_pid.load(std::memory_order_relaxed) != 0;
    } else {
        code = lock_within(mutex, timeout_s);
    }
#else
    (void)presence;
    code = lock_within(mutex, timeout_s);
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
#if defined(SHARPWAVE_FILE_LOCKS)
    owner_pid.store(0, std::memory_order_relaxed);
    if (presence) return presence->give(Presence::Turn::index);
#else
    (void)presence;
#endif
    pthread_mutex_unlock(&mutex);
}

}  // namespace sharpwave
