#include "base/fault.h"

#if defined(SHARPWAVE_FAULTS)

#include <signal.h>
#include <unistd.h>

#include <atomic>

namespace sharpwave {
namespace {

std::atomic<int> armed{-1}, turns{0};
std::atomic<void (*)()> before_death{nullptr};

}  // namespace

void fault_point(Fault place) {
    if (armed.load(std::memory_order_relaxed) != static_cast<int>(place)) return;
    if (turns.fetch_sub(1, std::memory_order_relaxed) != 1) return;
    armed.store(-1, std::memory_order_relaxed);
    if (auto* before = before_death.load()) before();
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

void arm(Fault place, int turn, void (*before)()) {
    before_death.store(before);
    turns.store(turn, std::memory_order_relaxed);
    armed.store(turn > 0 ? static_cast<int>(place) : -1, std::memory_order_relaxed);
}

const char* fault_name(Fault place) {
    static const char* const names[] = {
#define SHARPWAVE_FAULT_NAME(name) #name,
        SHARPWAVE_FAULTS_OF(SHARPWAVE_FAULT_NAME)
#undef SHARPWAVE_FAULT_NAME
    };
    return names[static_cast<int>(place)];
}

}  // namespace sharpwave

#endif
