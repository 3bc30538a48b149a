// The interpreter's lock: how the engine lets go of it, and how it gets it back. Every place that releases it uses
// PatientRelease, no other guard.
//
// While the interpreter is taken down, a thread that asks for its lock is ended on the spot (Python before 3.14): the
// stack is unwound through our frames and nanobind's, some of which may not throw, and the whole process aborts. So
// such a thread sleeps instead, for ever, with the lock released; the process ends without it.
#pragma once

#include <unistd.h>

#include <cstddef>  // defines __GLIBCXX__

#if defined(__GLIBCXX__)
#include <cxxabi.h>
#endif

#include "numpy_api.h"

[[noreturn]] inline void sleep_for_ever() {
    for (;;) pause();
}

// Calls what may run Python code, or take the interpreter's lock, in the middle of our frames. Where the thread is
// ended inside, it sleeps for ever.
template <class Call>
auto outlast(const Call& call) {
#if defined(__GLIBCXX__)
    try {
        return call();
    } catch (abi::__forced_unwind&) {
        sleep_for_ever();
    }
#else
    return call();
#endif
}

// Lets go of the lock; null where that would be wrong: the thread that takes the interpreter down keeps it.
PyThreadState* let_go_of_interpreter();
void take_interpreter_back(PyThreadState* state);

// Leaves the interpreter to other threads while it lives; without `release` it does nothing.
class PatientRelease {
public:
    explicit PatientRelease(bool release = true) : state_(release ? let_go_of_interpreter() : nullptr) {}
    ~PatientRelease() {
        if (state_) take_interpreter_back(state_);
    }
    PatientRelease(const PatientRelease&) = delete;
    PatientRelease& operator=(const PatientRelease&) = delete;

private:
    PyThreadState* state_;
};

// Tells the engine how its waits let go of the interpreter and notice signals.
void set_up_waits();
