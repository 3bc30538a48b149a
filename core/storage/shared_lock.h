// A lock in shared memory that survives its owner's death.
//
// On Linux a robust mutex: who takes it after a kill is told that it was abandoned, and rebuilds what it guarded. Other
// systems have none; there a killed owner shows as a deadline that passes (untested).
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>

namespace sharpwave {

// Lives in the runtime page. Plain bytes: initialise() makes it, once, before anybody else looks.
struct SharedLock {
    pthread_mutex_t mutex;
    std::atomic<std::uint64_t> owner_pid;  // for the message only

    void initialise();

    // Returns true when the last owner died inside. Waits at most `timeout_s` seconds, then throws
    // ErrorKind::not_ready naming the owner.
    bool lock(double timeout_s);
    void unlock();
};

}  // namespace sharpwave
