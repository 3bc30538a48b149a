#include "storage/shared_lock.h"

#include <time.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>

#include "base/error.h"
#include "base/process.h"
#include "base/wait.h"

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

// glibc from 2.30 on waits by the steady clock. Elsewhere there is only the wall clock, which may be set back by an
// hour in the middle of a wait: there we look again and again instead. (GCC's ThreadSanitizer does not know the call.)
#if defined(__GLIBC__) && !defined(SHARPWAVE_TSAN)
#define SHARPWAVE_HAS_CLOCKLOCK __GLIBC_PREREQ(2, 30)
#else
#define SHARPWAVE_HAS_CLOCKLOCK 0
#endif

// ETIMEDOUT: not within so many seconds.
int lock_within(pthread_mutex_t& mutex, double seconds) {
    int code = pthread_mutex_trylock(&mutex);
    if (code != EBUSY) return code;
    if (seconds <= 0) return ETIMEDOUT;
#if SHARPWAVE_HAS_CLOCKLOCK
    const std::uint64_t until = steady_ns() + static_cast<std::uint64_t>(seconds * 1e9);
    timespec deadline{};
    deadline.tv_sec = static_cast<time_t>(until / 1'000'000'000);
    deadline.tv_nsec = static_cast<long>(until % 1'000'000'000);
    return pthread_mutex_clocklock(&mutex, CLOCK_MONOTONIC, &deadline);
#else
    for (Pauses pauses(Deadline::in(seconds)); code == EBUSY; code = pthread_mutex_trylock(&mutex)) {
        if (!pauses.next()) return ETIMEDOUT;
    }
    return code;
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

SharedLock::Taken SharedLock::take(double seconds, const Presence* presence, Presence::Turn turn) {
    int code = 0;
    bool abandoned = false;
    if (presence && by_file()) {
        code = presence->take(turn, seconds) ? 0 : ETIMEDOUT;
        abandoned = code == 0 && owner_pid.load(std::memory_order_relaxed) != 0;
    } else {
        code = lock_within(mutex, seconds);
    }
#if defined(__linux__)
    if (code == EOWNERDEAD) {
        pthread_mutex_consistent(&mutex);
        abandoned = true;
        code = 0;
    }
#endif
    if (code == ETIMEDOUT) return Taken::no;
    if (code != 0)
        throw Error(ErrorKind::storage, std::string("cannot take a lock of the buffer: ") + std::strerror(code));
    owner_pid.store(process_id(), std::memory_order_relaxed);
    return abandoned ? Taken::after_death : Taken::yes;
}

void SharedLock::unlock(const Presence* presence, Presence::Turn turn) {
    if (presence && by_file()) {
        owner_pid.store(0, std::memory_order_relaxed);
        return presence->give(turn);
    }
    pthread_mutex_unlock(&mutex);
}

}  // namespace sharpwave
