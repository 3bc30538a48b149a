// Which processes have a table's file open. Each opening holds a seat: a byte lock on the file itself
// (storage/file_lock.h), which the kernel ends with the process. Process ids are never compared.
//
// One more byte lock, the door, is held by the process that opens or closes the table: one at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/wait.h"
#include "storage/file_lock.h"
#include "storage/format.h"

namespace sharpwave {

class Storage;

class Presence {
public:
    // Takes the door and a seat, through a file description of its own. The door is held until settle(), so the first
    // opener can repair the table undisturbed. Where another opener keeps the door until the deadline:
    // ErrorKind::not_ready, naming its process id as `runtime` tells it.
    Presence(const Storage& storage, const format::Runtime& runtime, Deadline deadline);
    ~Presence();
    Presence(const Presence&) = delete;
    Presence& operator=(const Presence&) = delete;

    // True when the table was open nowhere else.
    bool is_first() const { return first_; }

    // Whether `path` still names the file.
    bool is_named() const { return file_.is_named(path_); }

    // Writes this opening's token into the seat. Before it, no record may name the seat as its owner.
    void sit(format::Runtime& runtime);
    void settle();

    // This opening, as owner_word() names it.
    std::uint32_t seat() const { return seat_; }
    std::uint64_t tag() const { return tag_; }

    // Whether the opening that had this seat and tag is still there.
    bool is_alive(std::uint32_t seat, std::uint64_t tag) const;

    // No other process has the table open now. Other openings of this process do not count.
    bool is_alone() const;

    // The table is open nowhere else. Without the door this may change at once.
    bool is_only() const;

    // Process ids of all openings of a file, for messages.
    static std::vector<std::uint64_t> holders(const Storage& storage, const format::Runtime& runtime);

    // Locks that one thread of all processes has at a time; they end with their process. take() is false where the
    // lock was not free within so many seconds.
    enum class Turn { cleaning, index, writing };
    bool take(Turn turn, double timeout_s) const;
    void give(Turn turn) const;

    // Takes the door for closing. True when the table is open nowhere else; false also where the door was not free in
    // time.
    bool begin_leave(Deadline deadline);

private:
    std::string path_;
    mutable FileLock file_;
    format::Runtime* runtime_ = nullptr;
    std::uint32_t seat_ = 0;
    std::uint64_t tag_ = 0;
    bool first_ = false, at_door_ = false;
    // File locks do not keep threads of one opening apart.
    mutable std::timed_mutex turns_[3];
};

}  // namespace sharpwave
