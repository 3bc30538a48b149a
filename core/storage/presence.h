// Which processes have a table's file open, as the kernel knows it: a process holds a byte lock on a lock file
// beside the table, and the lock ends with the process, however it ends.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace sharpwave {

class Presence {
public:
    // Joins those who have `table_path` open. Until settle() is called everybody else's enter() waits, so the first
    // one in may repair the table undisturbed.
    explicit Presence(const std::string& table_path);
    ~Presence();
    Presence(const Presence&) = delete;
    Presence& operator=(const Presence&) = delete;

    // True when no other process, and nobody else in this one, has the table open.
    bool is_first() const { return first_; }

    // The byte that stands for this process, and whether the one that `pid` was given still stands for it.
    std::uint32_t seat() const;
    bool is_alive(std::uint32_t seat, std::uint64_t pid) const;
    void settle();

    // No other process has the table open now.
    bool is_alone() const;

    // Locks of the file, for one at a time of all threads and processes; they end with their process. False: whoever
    // has it did not let go within so many seconds.
    enum class Turn { cleaning, index };
    bool take(Turn turn, double timeout_s) const;
    void give(Turn turn) const;

    // Takes the door again for the way out; true when nobody else is inside.
    bool begin_leave();

private:
    struct LockFile;
    std::shared_ptr<LockFile> file_;
    bool first_ = false;
    bool at_door_ = false;
};

// Beside the table, however the path to it was spelled.
std::string lock_path(const std::string& table_path);

}  // namespace sharpwave
