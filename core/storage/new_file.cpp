#include "storage/new_file.h"

#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/fault.h"
#include "base/wait.h"

namespace sharpwave {
namespace {

// A file of a killed process is taken away after 2 ms: another one would have had its turn within some microseconds.
constexpr int kTriesOfOthers = 20, kMostTries = 100 * kTriesOfOthers, kPauseMicroseconds = 100;

// Gives a file its first name. An existing one is an error.
int give_name(int fd, const std::string& temporary, const std::string& path) {
    if (!temporary.empty()) return link(temporary.c_str(), path.c_str());
    const std::string self = "/proc/self/fd/" + std::to_string(fd);
    return linkat(AT_FDCWD, self.c_str(), AT_FDCWD, path.c_str(), AT_SYMLINK_FOLLOW);
}

[[maybe_unused]] bool has_room_for(int fd, std::uint64_t bytes) {
    struct statvfs info{};
    return fstatvfs(fd, &info) != 0 || bytes / info.f_frsize <= info.f_bavail;
}

}  // namespace

void exchange_paths(const std::string& one, const std::string& other) {
#if defined(__APPLE__)
    if (::renamex_np(one.c_str(), other.c_str(), RENAME_SWAP) == 0) return;
#else
    if (::renameat2(AT_FDCWD, one.c_str(), AT_FDCWD, other.c_str(), RENAME_EXCHANGE) == 0) return;
#endif
    throw Error(ErrorKind::storage, "cannot exchange " + one + " and " + other + ": " + std::strerror(errno));
}

std::string folder_of(const std::string& path) {
    const std::string folder = path.substr(0, path.find_last_of('/') + 1);
    return folder.empty() ? "." : folder;
}

int allocate_blocks(int fd, std::uint64_t offset, std::uint64_t bytes, bool is_interruptible) {
#if defined(__APPLE__)
    (void)fd, (void)offset, (void)bytes, (void)is_interruptible;
    return 0;
#else
    // At first all at once: where there is no room for it, the kernel says so before it takes any. A signal may end the
    // call, and shared memory then gives back all that the call had got: what was interrupted is tried again at half
    // its size, so that something is got between two signals.
    std::uint64_t piece = bytes;
    while (bytes > 0) {
        const std::uint64_t count = std::min(bytes, piece);
        const int code = posix_fallocate(fd, static_cast<off_t>(offset), static_cast<off_t>(count));
        if (code == EINTR) {
            if (is_interruptible) check_interrupt();
            // In pieces the kernel no longer sees how much is wanted.
            if (!has_room_for(fd, bytes)) return ENOSPC;
            piece = std::max<std::uint64_t>(count / 2, 4096);
            continue;
        }
        if (code != 0) return code;
        offset += count;
        bytes -= count;
    }
    return 0;
#endif
}

bool reserve_blocks(int fd, std::uint64_t offset, std::uint64_t bytes) {
#if defined(__linux__)
    return fallocate(fd, FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset), static_cast<off_t>(bytes)) == 0;
#else
    static_cast<void>(fd), static_cast<void>(offset), static_cast<void>(bytes);
    return false;
#endif
}

void refuse_existing(const std::string& path) {
    throw Error(ErrorKind::storage, "'" + path +
                                        "' exists; open it with sharpwave.open(), remove it with `sharpwave rm`, " +
                                        "or give exist=\"replace\" or exist=\"attach\"");
}

NewFile::NewFile(std::string path) : path_(std::move(path)) {
#if defined(O_TMPFILE)
    if (access("/proc/self/fd", X_OK) == 0) {
        fd_ = open(folder_of(path_).c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    }
#endif
    if (fd_ < 0) {
        std::string name = path_ + ".XXXXXX";
        fd_ = mkstemp(name.data());
        if (fd_ < 0) fail_storage("cannot create '" + path_ + "'", errno);
        temporary_ = name;
        fcntl(fd_, F_SETFD, FD_CLOEXEC);
    }
}

NewFile::~NewFile() {
    if (!temporary_.empty()) unlink(temporary_.c_str());  // never published
    close(fd_);
}

void NewFile::resize(std::uint64_t bytes, const std::string& what) {
    while (ftruncate(fd_, static_cast<off_t>(bytes)) != 0) {
        if (errno != EINTR) fail_storage(what, errno);
    }
}

void NewFile::allocate(std::uint64_t bytes, const std::string& what) {
    if (const int code = allocate_blocks(fd_, 0, bytes, true)) fail_storage(what, code);
}

void NewFile::reserve(std::uint64_t bytes, const std::string& what) {
#if defined(__linux__)
    // A file system that cannot says so; only the library's own way would write zeros instead.
    if (fallocate(fd_, 0, 0, static_cast<off_t>(bytes)) != 0 && errno == ENOSPC) {
        fail_storage(what + ": cannot write '" + path_ + "', which needs " + std::to_string(bytes) + " bytes", errno);
    }
#else
    (void)bytes, (void)what;
#endif
}

void NewFile::write(std::uint64_t offset, const void* data, std::uint64_t bytes) {
    const auto* from = static_cast<const char*>(data);
    while (bytes > 0) {
        const ssize_t done = pwrite(fd_, from, bytes, static_cast<off_t>(offset));
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) fail_storage("cannot write '" + path_ + "'", done < 0 ? errno : ENOSPC);
        from += done;
        offset += static_cast<std::uint64_t>(done);
        bytes -= static_cast<std::uint64_t>(done);
    }
}

void NewFile::read(std::uint64_t offset, void* data, std::uint64_t bytes) const {
    auto* to = static_cast<char*>(data);
    while (bytes > 0) {
        const ssize_t done = pread(fd_, to, bytes, static_cast<off_t>(offset));
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) fail_storage("cannot read '" + path_ + "'", done < 0 ? errno : EIO);
        to += done;
        offset += static_cast<std::uint64_t>(done);
        bytes -= static_cast<std::uint64_t>(done);
    }
}

void NewFile::sync() {
    while (fsync(fd_) != 0) {
        if (errno != EINTR) fail_storage("cannot write '" + path_ + "' to the disk", errno);
    }
}

void NewFile::publish(bool replace, bool sync) {
    // link() refuses an existing name in one step, rename() replaces it in one step.
    int result = give_name(fd_, temporary_, path_);
    if (result != 0 && errno == EEXIST && replace) {
        // Through a second name, always the same: a process killed between the two steps leaves one file at most, and
        // the next one takes it away. Not at once: another one may be between its two steps, and a file that has lost
        // its first name cannot be given another.
        const std::string next = path_ + ".next";
        for (int tries = 0; result != 0 && tries < kMostTries; ++tries) {
            if (give_name(fd_, temporary_, next) != 0) {
                if (errno != EEXIST) break;
                if (tries % kTriesOfOthers == kTriesOfOthers - 1) {
                    unlink(next.c_str());
                } else {
                    usleep(kPauseMicroseconds);
                }
                continue;
            }
            SHARPWAVE_FAULT(publish_renaming);
            result = rename(next.c_str(), path_.c_str());
            if (result != 0 && errno != ENOENT) break;
        }
    }
    if (result != 0) {
        if (errno == EEXIST) refuse_existing(path_);
        fail_storage("cannot name '" + path_ + "'", errno);
    }
    if (!temporary_.empty()) unlink(temporary_.c_str());
    temporary_.clear();
    if (!sync) return;
    // The name itself is durable only when its folder is.
    const int folder = open(folder_of(path_).c_str(), O_RDONLY | O_CLOEXEC);
    if (folder >= 0) {
        fsync(folder);
        close(folder);
    }
}

}  // namespace sharpwave
