// A lock in shared memory that survives its owner's death.
//
// On Linux a robust mutex: who takes it after a kill is told that it was abandoned, and rebuilds what it guarded. Other
// systems have none; there it is a lock of the table's lock file, which the kernel takes back, and an owner that died
// inside is known by the name it left. (The tests of crashes run both ways on Linux; other systems are untested.)
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>

#include "storage/presence.h"

namespace sharpwave {

// Lives in the runtime page. Plain bytes: initialise() makes it, once, before any other process looks.
struct SharedLock {
    pthread_mutex_t mutex;
    std::atomic<std::uint64_t> owner_pid;  // with a robust mutex for the message only

    void initialise();

    enum class Taken { no, yes, after_death };  // the last: its owner died inside

    // Waits at most `seconds`, by the steady clock; 0 does not wait. `presence` is null for memory of one process.
    // `turn`: of the file's locks, where there are no robust mutexes.
    Taken take(double seconds, const Presence* presence, Presence::Turn turn = Presence::Turn::index);
    void unlock(const Presence* presence, Presence::Turn turn = Presence::Turn::index);
};

}  // namespace sharpwave
