// The locks that a table's users hold for a while: Table::IndexLock, Table::WriteLock and Table::AddHold.
#include <algorithm>

#include "base/error.h"
#include "base/fault.h"
#include "base/futex.h"
#include "base/process.h"
#include "table/table.h"

namespace sharpwave {

using namespace format;

namespace {

// Until the deadline, while other threads of the interpreter run; no: it is over.
SharedLock::Taken wait_for(SharedLock& lock, const Presence* presence, Presence::Turn turn, Deadline deadline,
                           Yield& yield) {
    yield.begin();
    const Deadline until = deadline.at_least(Table::kLockGrace);
    for (;;) {
        const SharedLock::Taken taken = lock.take(std::min(until.left_s(), kWaitSlice), presence, turn);
        if (taken != SharedLock::Taken::no || until.is_over()) return taken;
        check_interrupt();
    }
}

}  // namespace

Table::IndexLock::IndexLock(Table& table, Deadline deadline) : table_(table) {
    SharedLock::Taken taken = table.shared_lock().take(0, table.presence_.get());
    if (taken == SharedLock::Taken::no) [[unlikely]]
        taken = wait(deadline);
    if (taken == SharedLock::Taken::after_death) {
        table.counters_->index_takeovers.value.fetch_add(1, std::memory_order_relaxed);
        table.counters_->index_origin.value.store(kNone, std::memory_order_relaxed);
    }
    SHARPWAVE_FAULT(index_locked);
}

SharedLock::Taken Table::IndexLock::wait(Deadline deadline) {
    SharedLock& lock = table_.shared_lock();
    const SharedLock::Taken taken = wait_for(lock, table_.presence_.get(), Presence::Turn::index, deadline, yield_);
    if (taken != SharedLock::Taken::no) return taken;
    throw Error(ErrorKind::not_ready, "the buffer's index is held by process " + std::to_string(lock.owner_pid.load()) +
                                          ", which did not let go of it before the timeout; is that process stopped?");
}

Table::IndexLock::~IndexLock() { table_.shared_lock().unlock(table_.presence_.get()); }

Table::WriteLock::WriteLock(Table& table, Deadline deadline) : table_(table) {
    SharedLock& lock = table.write_lock();
    SharedLock::Taken taken = lock.take(0, table.presence_.get(), Presence::Turn::writing);
    if (taken == SharedLock::Taken::no) [[unlikely]]
        taken = wait_for(lock, table.presence_.get(), Presence::Turn::writing, deadline, yield_);
    if (taken == SharedLock::Taken::no) {
        throw Error(ErrorKind::not_ready, "write(): process " + std::to_string(lock.owner_pid.load()) +
                                              " writes to this buffer and did not finish before the timeout; is that "
                                              "process stopped?");
    }
    // It may have stored a selector and not marked the block: an increment would leave the new value out.
    for (std::uint64_t b = 0; taken == SharedLock::Taken::after_death && b < table.blocks(); ++b) table.mark_changed(b);
}

Table::WriteLock::~WriteLock() { table_.write_lock().unlock(table_.presence_.get(), Presence::Turn::writing); }

Table::AddHold::AddHold(Table& table, double seconds)
    : table_(table), until_(steady_ns() + static_cast<std::uint64_t>(seconds * 1e9)) {
    Hold& hold = table.hold();
    hold.seat.store(table.seat(), std::memory_order_relaxed);
    hold.tag.store(table.tag(), std::memory_order_relaxed);
    hold.until.store(until_, std::memory_order_release);
}

Table::AddHold::~AddHold() {
    Hold& hold = table_.hold();
    // Another saver may have begun a hold since: that one is not ours to end.
    if (!hold.until.compare_exchange_strong(until_, 0, std::memory_order_acq_rel)) return;
    hold.changes.fetch_add(1, std::memory_order_release);
    wake_all(hold.changes);
}

bool Table::wait_while_held(Deadline deadline, bool is_interruptible) {
    constexpr double kLook = 5e-3;  // seconds between looks whether the holder still lives
    Hold& hold = this->hold();
    for (double since_check = 0;;) {
        const std::uint32_t seen = hold.changes.load(std::memory_order_acquire);
        std::uint64_t until = hold.until.load(std::memory_order_acquire);
        const std::uint64_t now = steady_ns();
        if (until == 0) return true;
        const bool is_over = until <= now || !is_alive(hold.seat.load(std::memory_order_relaxed),
                                                       hold.tag.load(std::memory_order_relaxed));
        if (is_over) {
            hold.until.compare_exchange_strong(until, 0, std::memory_order_acq_rel);
            continue;
        }
        if (deadline.is_over()) return false;
        const double left = std::min({kLook, static_cast<double>(until - now) * 1e-9, deadline.left_s()});
        wait_for_change(hold.changes, seen, left);
        since_check += left;
        if (is_interruptible && since_check >= kWaitSlice) {
            since_check = 0;
            check_interrupt();
        }
    }
}

}  // namespace sharpwave
