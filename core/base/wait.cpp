#include "base/wait.h"

#include <algorithm>
#include <atomic>
#include <thread>

namespace sharpwave {

namespace {

constexpr double kLongestPause = 5e-3;
std::atomic<void (*)()> interrupt_check{nullptr};
std::atomic<void* (*)()> yield_begin{nullptr};
std::atomic<void (*)(void*)> yield_end{nullptr};

}  // namespace

void set_interrupt_check(void (*check)()) { interrupt_check.store(check, std::memory_order_release); }

void check_interrupt() {
    if (auto* check = interrupt_check.load(std::memory_order_acquire)) check();
}

std::uint64_t steady_ns() {
    using namespace std::chrono;
    return static_cast<std::uint64_t>(duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count());
}

void set_yield(void* (*begin)(), void (*end)(void*)) {
    yield_end.store(end, std::memory_order_release);
    yield_begin.store(begin, std::memory_order_release);
}

void Yield::begin() {
    auto* call = yield_begin.load(std::memory_order_acquire);
    if (call && !state_) state_ = call();
}

void Yield::end() { yield_end.load(std::memory_order_acquire)(state_); }

bool Pauses::next() {
    if (deadline_.is_over()) return false;
    const double pause = std::min(pause_s_, deadline_.left_s());
    std::this_thread::sleep_for(std::chrono::duration<double>(pause));
    pause_s_ = std::min(pause_s_ * 1.5, kLongestPause);
    since_check_s_ += pause;
    if (is_interruptible_ && since_check_s_ >= kWaitSlice) {
        since_check_s_ = 0;
        check_interrupt();
    }
    return true;
}

}  // namespace sharpwave
