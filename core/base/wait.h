// How a call waits: until a deadline of the steady clock, ended early by a signal.
#pragma once

#include <chrono>
#include <cstdint>

namespace sharpwave {

// Nanoseconds of the steady clock. On Linux all processes of one boot see the same, which makes it fit for shared
// memory that does not outlive the boot. (Processes in different time namespaces do not.)
std::uint64_t steady_ns();

// A point of the steady clock: setting the wall clock moves no deadline.
class Deadline {
public:
    static Deadline never() { return Deadline(Clock::time_point::max()); }
    static Deadline in(double seconds) {
        // Beyond a century, adding to the clock could overflow.
        constexpr double kLongest = 3e9;
        if (!(seconds < kLongest)) return never();
        return Deadline(Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                           std::chrono::duration<double>(seconds > 0 ? seconds : 0)));
    }

    bool is_never() const { return at_ == Clock::time_point::max(); }
    bool is_over() const { return !is_never() && Clock::now() >= at_; }
    double left_s() const {  // at least 0
        if (is_never()) return 1e18;
        const double left = std::chrono::duration<double>(at_ - Clock::now()).count();
        return left > 0 ? left : 0;
    }
    // This one, or `seconds` from now where that is later.
    Deadline at_least(double seconds) const { return left_s() >= seconds ? *this : in(seconds); }

private:
    using Clock = std::chrono::steady_clock;
    explicit Deadline(Clock::time_point at) : at_(at) {}
    Clock::time_point at_;
};

// The longest sleep between two looks at signals.
inline constexpr double kWaitSlice = 0.1;

// Called once every slice of a wait, in the waiting thread. The language above the engine sets it: it throws to end the
// wait, for example after Ctrl-C.
void set_interrupt_check(void (*check)());
void check_interrupt();

// While it lives, after begin(), other threads of the language above may run: an interpreter has one lock for all its
// threads, which a thread that waits inside the engine must not keep. begin() does nothing where no functions are set
// and where the caller has let go of that lock already.
class Yield {
public:
    Yield() = default;
    ~Yield() {
        if (state_) end();
    }
    Yield(const Yield&) = delete;
    Yield& operator=(const Yield&) = delete;
    void begin();

private:
    void end();
    void* state_ = nullptr;
};

// `begin` returns null where there is nothing to let go of; what it returns otherwise is given to `end`.
void set_yield(void* (*begin)(), void (*end)(void*));

// For things whose change no event announces, such as a file lock: sleeps from 50 us, growing to 5 ms, between looks.
class Pauses {
public:
    explicit Pauses(Deadline deadline, bool is_interruptible = true)
        : deadline_(deadline), is_interruptible_(is_interruptible) {}
    // Sleeps once; false when the deadline is over.
    bool next();

private:
    Deadline deadline_;
    bool is_interruptible_;
    double pause_s_ = 50e-6, since_check_s_ = 0;
};

}  // namespace sharpwave
