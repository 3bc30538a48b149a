#include "storage/file_lock.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/process.h"

namespace sharpwave {
namespace {

// Far beyond the end of any file: mandatory or advisory locks of other programs on the data never meet ours.
constexpr std::uint64_t kFirstByte = std::uint64_t{1} << 62;

// The descriptors to close in a forked child. The mutex is held across a fork, so a child never finds it locked by a
// thread that it does not have.
std::mutex open_mutex;
std::vector<int>& open_descriptors() {
    static auto* descriptors = new std::vector<int>;  // outlives static destructors, which may still close files
    return *descriptors;
}
[[maybe_unused]] const int children_close_them = pthread_atfork([] { open_mutex.lock(); }, [] { open_mutex.unlock(); },
                                                                [] {
                                                                    for (int fd : open_descriptors()) ::close(fd);
                                                                    open_descriptors().clear();
                                                                    open_mutex.unlock();
                                                                });

// Opened and listed in one step: a fork in between would leave the child a descriptor that is never closed.
int open_listed(const std::string& path, int flags) {
    std::lock_guard<std::mutex> guard(open_mutex);
    open_descriptors().reserve(open_descriptors().size() + 1);
    const int fd = ::open(path.c_str(), flags | O_CLOEXEC, 0600);
    if (fd >= 0) open_descriptors().push_back(fd);
    return fd;
}

[[noreturn]] void fail(const std::string& what) { throw Error(ErrorKind::storage, what); }

struct flock region(short type, std::uint64_t place, std::uint64_t count) {
    struct flock lock{};
    lock.l_type = type;
    lock.l_whence = SEEK_SET;
    lock.l_start = static_cast<off_t>(kFirstByte + place);
    lock.l_len = static_cast<off_t>(count);
    return lock;  // l_pid stays 0: the kernel asks for that
}

#if defined(F_OFD_SETLK)
constexpr int kSet = F_OFD_SETLK, kGet = F_OFD_GETLK;
#else
constexpr int kSet = -1, kGet = -1;  // every call fails with EINVAL: sharing is refused
#endif

[[noreturn]] void refuse_locks(const std::string& path, int code) {
    fail("'" + path + "': its file system has no locks that end with their owner (" + std::strerror(code) +
         "); give a path on a local file system");
}

}  // namespace

FileLock::FileLock(FileLock&& other) noexcept { *this = std::move(other); }

FileLock& FileLock::operator=(FileLock&& other) noexcept {
    if (this == &other) return *this;
    close();
    fd_ = std::exchange(other.fd_, -1);
    generation_ = other.generation_;
    path_ = std::move(other.path_);
    return *this;
}

FileLock FileLock::open(const std::string& path, bool create) {
    FileLock lock;
    lock.path_ = path;
    lock.generation_ = process_generation();
    // Without O_NONBLOCK a pipe of that name would make us wait for its other end.
    lock.fd_ = open_listed(path, O_RDWR | O_NOFOLLOW | O_NONBLOCK | (create ? O_CREAT : 0));
    if (lock.fd_ < 0) {
        if (errno == ELOOP) fail("'" + path + "' is a symbolic link; give the path of the file itself");
        fail("cannot open '" + path + "': " + std::strerror(errno));
    }
    struct stat info{};
    if (fstat(lock.fd_, &info) != 0) fail("cannot open '" + path + "': " + std::strerror(errno));
    if (!S_ISREG(info.st_mode)) fail("'" + path + "' is not a file");
    if (info.st_uid != geteuid()) {
        fail("'" + path + "' belongs to user " + std::to_string(info.st_uid) + ", this process runs as user " +
             std::to_string(geteuid()) +
             "; a file of another user is not opened for writing: copy it, or change its owner");
    }
    return lock;
}

FileLock FileLock::reopen(int fd, const std::string& path) {
    FileLock lock;
    lock.path_ = path;
    lock.generation_ = process_generation();
    const std::string self = "/proc/self/fd/" + std::to_string(fd);
    lock.fd_ = open_listed(self, O_RDWR);
    if (lock.fd_ < 0 && errno == EACCES) lock.fd_ = open_listed(self, O_RDONLY);  // enough to ask who holds what
    if (lock.fd_ >= 0) return lock;
    // No such folder (macOS, and containers without it): by name, if that is still the same file.
    lock.fd_ = open_listed(path, O_RDWR | O_NOFOLLOW);
    struct stat given{}, named{};
    if (lock.fd_ < 0 || fstat(fd, &given) != 0 || fstat(lock.fd_, &named) != 0 || given.st_ino != named.st_ino ||
        given.st_dev != named.st_dev) {
        fail("cannot open '" + path +
             "' a second time, to lock it: " + (lock.fd_ < 0 ? std::strerror(errno) : "another file has its name now"));
    }
    return lock;
}

std::optional<FileLock> FileLock::own(const std::string& path, bool create, Deadline deadline) {
    Pauses pauses(deadline);
    do {
        FileLock lock = open(path, create);
        if (lock.lock(0, deadline) && lock.is_named(path)) return lock;
    } while (pauses.next());
    return {};
}

bool FileLock::try_lock(std::uint64_t place) {
    struct flock lock = region(F_WRLCK, place, 1);
    if (fcntl(fd(), kSet, &lock) == 0) return true;
    if (errno == EAGAIN || errno == EACCES) return false;
    refuse_locks(path_, errno);
}

bool FileLock::lock(std::uint64_t place, Deadline deadline, bool is_interruptible) {
    for (Pauses pauses(deadline, is_interruptible); !try_lock(place);) {
        if (!pauses.next()) return false;
    }
    return true;
}

void FileLock::unlock(std::uint64_t place) {
    struct flock lock = region(F_UNLCK, place, 1);
    fcntl(fd(), kSet, &lock);
}

bool FileLock::is_held_elsewhere(std::uint64_t first, std::uint64_t count) const {
    struct flock lock = region(F_WRLCK, first, count);
    // Where the kernel cannot say, it counts as held: nothing is taken from a holder by mistake.
    return fcntl(fd(), kGet, &lock) != 0 || lock.l_type != F_UNLCK;
}

bool FileLock::is_named(const std::string& path) const {
    struct stat mine{}, named{};
    return fstat(fd(), &mine) == 0 && lstat(path.c_str(), &named) == 0 && mine.st_ino == named.st_ino &&
           mine.st_dev == named.st_dev;
}

int FileLock::fd() const { return generation_ == process_generation() ? fd_ : -1; }

void FileLock::close() noexcept {
    const int fd = this->fd();
    fd_ = -1;
    if (fd < 0) return;
    std::lock_guard<std::mutex> guard(open_mutex);
    std::erase(open_descriptors(), fd);
    ::close(fd);
}

}  // namespace sharpwave
