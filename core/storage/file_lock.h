// Who holds a file, as the kernel knows it: byte locks on the file's own inode.
//
// The locks belong to one open file description (F_OFD_SETLK), not to a process:
// - they end when the last descriptor of that description is closed, so also when the process is killed;
// - opening, reading, copying and closing the same file elsewhere in the process does not touch them (POSIX locks would
//   be dropped);
// - two FileLocks of one process exclude each other as two processes do;
// - a forked child would inherit the description and keep the locks of a dead parent alive, so the descriptor is closed
//   in every forked child, and on exec.
// A memory mapping keeps its description alive too: never map the descriptor of a FileLock.
//
// Threads: one FileLock is used by one thread at a time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/wait.h"

namespace sharpwave {

class FileLock {
public:
    FileLock() = default;
    ~FileLock() { close(); }
    FileLock(FileLock&& other) noexcept;
    FileLock& operator=(FileLock&& other) noexcept;

    // Opens a file for locking; `create` makes an empty one, readable by its owner only. A symlink, something that is
    // no file, and a file of another user are ErrorKind::storage.
    static FileLock open(const std::string& path, bool create = false);

    // A description of its own for a file that is open already. Where the system can, the file needs no name yet; else
    // `path` must name it.
    static FileLock reopen(int fd, const std::string& path);

    // The file of that name, held by the caller alone; none where another holder keeps it until the deadline. A file
    // that lost its name while we waited is not taken: the one that has the name now is.
    static std::optional<FileLock> own(const std::string& path, bool create, Deadline deadline);

    // Byte `place` for us alone. False: another description holds it.
    bool try_lock(std::uint64_t place);
    bool lock(std::uint64_t place, Deadline deadline, bool is_interruptible = true);
    void unlock(std::uint64_t place);

    // Whether another description holds one of these bytes.
    bool is_held_elsewhere(std::uint64_t first, std::uint64_t count) const;

    // Whether `path` still names this very file.
    bool is_named(const std::string& path) const;

    // Below 0 after close() and in a forked child.
    int fd() const;
    void close() noexcept;

private:
    int fd_ = -1;
    std::uint64_t generation_ = 0;
    std::string path_;
};

}  // namespace sharpwave
