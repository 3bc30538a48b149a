#include "storage/presence.h"

#include <pthread.h>

#include <algorithm>
#include <random>

#include "base/error.h"
#include "base/process.h"
#include "storage/storage.h"

namespace sharpwave {

using format::kSeats;
using format::Runtime;
using format::Seat;

namespace {

// Places of FileLock: the door, one a seat, one a turn. FileLock::own() uses place 0 for files that have one owner.
constexpr std::uint64_t kDoor = 0, kFirstSeat = 1, kTurns = kFirstSeat + kSeats;
constexpr std::uint64_t kTagMask = (std::uint64_t{1} << 48) - 1;

std::uint64_t random_word() {
    std::random_device device;
    return std::uint64_t{device()} << 32 | device();
}

// Held across a fork: a child never finds it locked by a thread that it does not have.
std::mutex token_mutex;
[[maybe_unused]] const int token_is_held_across_forks =
    pthread_atfork([] { token_mutex.lock(); }, [] { token_mutex.unlock(); }, [] { token_mutex.unlock(); });

// Random, of this process: a forked child gets another one.
std::pair<std::uint64_t, std::uint64_t> process_token() {
    static std::uint64_t generation = ~std::uint64_t{0}, first, second;
    std::lock_guard<std::mutex> guard(token_mutex);
    if (generation != process_generation()) {
        generation = process_generation();
        first = random_word();
        second = random_word();
    }
    return {first, second};
}

// Seats that other descriptions than `file` hold. The kernel is asked only about those that were ever taken.
template <class Each>
void each_held_seat(const FileLock& file, const Runtime& runtime, Each each) {
    if (!file.is_held_elsewhere(kFirstSeat, kSeats)) return;
    for (std::uint32_t seat = 0; seat < kSeats; ++seat) {
        if (runtime.seats[seat].token[0].load(std::memory_order_acquire) == 0) continue;
        if (file.is_held_elsewhere(kFirstSeat + seat, 1)) each(runtime.seats[seat]);
    }
}

}  // namespace

Presence::Presence(const Storage& storage, const Runtime& runtime, Deadline deadline)
    : path_(storage.path()), file_(FileLock::reopen(storage.fd(), storage.name_now())) {
    if (!file_.lock(kDoor, deadline)) {
        throw Error(ErrorKind::not_ready,
                    "'" + path_ + "' is being opened or closed by process " + std::to_string(runtime.door_pid.load()) +
                        "; it checks a large file, or is stopped: give a longer timeout=, or end it");
    }
    at_door_ = true;
    first_ = !file_.is_held_elsewhere(kFirstSeat, kSeats);
    while (!file_.try_lock(kFirstSeat + seat_)) {
        if (++seat_ == kSeats)
            throw Error(ErrorKind::storage,
                        "'" + path_ + "' is open " + std::to_string(kSeats) + " times already; close some of them");
    }
}

void Presence::sit(Runtime& runtime) {
    runtime_ = &runtime;
    runtime.door_pid.store(process_id(), std::memory_order_relaxed);
    Seat& own = runtime.seats[seat_];
    do tag_ = random_word() & kTagMask;
    while (tag_ == 0);
    const auto [first, second] = process_token();
    own.process[0].store(first, std::memory_order_relaxed);
    own.process[1].store(second, std::memory_order_relaxed);
    own.pid.store(process_id(), std::memory_order_relaxed);
    own.reserved[0].store(0, std::memory_order_relaxed);
    own.reserved[1].store(0, std::memory_order_relaxed);
    own.token[1].store(random_word(), std::memory_order_relaxed);
    own.token[0].store(tag_, std::memory_order_release);
}

void Presence::settle() {
    if (at_door_) file_.unlock(kDoor);
    at_door_ = false;
}

bool Presence::is_alive(std::uint32_t seat, std::uint64_t tag) const {
    if (seat >= kSeats) return false;
    if (seat == seat_) return tag == tag_;
    // The lock first: its holder wrote its token before any record named the seat.
    return file_.is_held_elsewhere(kFirstSeat + seat, 1) &&
           (runtime_->seats[seat].token[0].load(std::memory_order_acquire) & kTagMask) == tag;
}

bool Presence::is_only() const { return !file_.is_held_elsewhere(kFirstSeat, kSeats); }

bool Presence::is_alone() const {
    const Seat& own = runtime_->seats[seat_];
    bool alone = true;
    each_held_seat(file_, *runtime_, [&](const Seat& other) {
        alone = alone && other.process[0].load() == own.process[0].load() &&
                other.process[1].load() == own.process[1].load();
    });
    return alone;
}

std::vector<std::uint64_t> Presence::holders(const Storage& storage, const Runtime& runtime) {
    const FileLock file = FileLock::reopen(storage.fd(), storage.path());
    std::vector<std::uint64_t> pids;
    each_held_seat(file, runtime, [&](const Seat& seat) { pids.push_back(seat.pid.load()); });
    return pids;
}

bool Presence::take(Turn turn, double timeout_s) const {
    const int number = static_cast<int>(turn);
    const Deadline deadline = Deadline::in(timeout_s);
    if (!turns_[number].try_lock_for(std::chrono::duration<double>(timeout_s))) return false;
    if (file_.lock(kTurns + static_cast<std::uint64_t>(number), deadline)) return true;
    turns_[number].unlock();
    return false;
}

void Presence::give(Turn turn) const {
    const int number = static_cast<int>(turn);
    file_.unlock(kTurns + static_cast<std::uint64_t>(number));
    turns_[number].unlock();
}

bool Presence::begin_leave(Deadline deadline) {
    // Not interruptible: a destructor has no caller to tell.
    if (!at_door_) at_door_ = file_.lock(kDoor, deadline, false);
    if (!at_door_) return false;
    runtime_->door_pid.store(process_id(), std::memory_order_relaxed);
    return !file_.is_held_elsewhere(kFirstSeat, kSeats);
}

// Closing the file ends every lock at once; in a forked child there is nothing to end.
Presence::~Presence() = default;

}  // namespace sharpwave
