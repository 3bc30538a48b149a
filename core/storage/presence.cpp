#include "storage/presence.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>
#include <thread>

#include "base/error.h"
#include "base/process.h"

namespace sharpwave {
namespace {

// Byte 0 is the door, bytes 1 to 1024 stand for processes, those behind for turns.
constexpr off_t kDoor = 0;
constexpr off_t kSeats = 1024;
constexpr off_t kTurns = kSeats + 1;

struct flock region(short type, off_t start, off_t length) {
    struct flock lock{};
    lock.l_type = type;
    lock.l_whence = SEEK_SET;
    lock.l_start = start;
    lock.l_len = length;
    return lock;
}

// Guards the list of lock files. Held across a fork, so that a child never finds it locked by a thread that it has not.
std::mutex files_mutex;
[[maybe_unused]] const int registered =
    pthread_atfork([] { files_mutex.lock(); }, [] { files_mutex.unlock(); }, [] { files_mutex.unlock(); });

}  // namespace

// One descriptor a process and table, kept until the last user in the process is gone: closing any descriptor of a
// file drops all of a process's POSIX locks on it.
struct Presence::LockFile {
    explicit LockFile(const std::string& path) : fd(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)) {
        if (fd < 0) throw Error(ErrorKind::storage, "cannot open '" + path + "': " + std::strerror(errno));
    }
    // Not in a forked child: there it would drop the locks that the child has taken since through its own descriptor.
    ~LockFile() {
        if (generation == process_generation()) close(fd);
    }

    int fd;
    int users = 0;
    off_t seat = 0;
    // POSIX locks do not keep threads of one process apart.
    std::mutex door;
    std::timed_mutex turns[2];
    std::uint64_t generation = process_generation();

    void lock_door() {
        door.lock();
        struct flock lock = region(F_WRLCK, kDoor, 1);
        while (fcntl(fd, F_SETLKW, &lock) != 0) {
            if (errno == EINTR) continue;
            const int code = errno;
            door.unlock();
            throw Error(ErrorKind::storage, std::string("cannot lock the table's lock file: ") + std::strerror(code));
        }
    }

    void unlock_door() {
        struct flock lock = region(F_UNLCK, kDoor, 1);
        fcntl(fd, F_SETLK, &lock);
        door.unlock();
    }

    // False when the name was removed and perhaps given to another file.
    bool is_named(const std::string& path) const {
        struct stat mine{}, named{};
        return fstat(fd, &mine) == 0 && stat(path.c_str(), &named) == 0 && mine.st_ino == named.st_ino &&
               mine.st_dev == named.st_dev;
    }

    bool others_inside() const {
        struct flock lock = region(F_WRLCK, 1, kSeats);
        return fcntl(fd, F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
    }

    void take_seat() {
        for (seat = 1; seat <= kSeats; ++seat) {
            struct flock lock = region(F_WRLCK, seat, 1);
            if (fcntl(fd, F_SETLK, &lock) == 0) return;
        }
        throw Error(ErrorKind::storage, "more than 1024 processes have the table open");
    }

    static std::shared_ptr<LockFile> of(const std::string& path) {
        std::lock_guard<std::mutex> guard(files_mutex);
        static std::map<std::string, std::weak_ptr<LockFile>> files;
        auto known = files[path].lock();
        if (known && known->generation == process_generation() && known->is_named(path)) return known;
        auto opened = std::make_shared<LockFile>(path);
        files[path] = opened;
        return opened;
    }
};

std::string lock_path(const std::string& table_path) {
    std::error_code ignored;
    const auto whole = std::filesystem::weakly_canonical(table_path, ignored);
    return (whole.empty() ? table_path : whole.string()) + ".lock";
}

std::uint32_t Presence::seat() const { return static_cast<std::uint32_t>(file_->seat); }

bool Presence::is_alive(std::uint32_t seat, std::uint64_t pid) const {
    // The kernel does not report a process's own locks to itself.
    if (seat == this->seat()) return pid == process_id();
    struct flock lock = region(F_WRLCK, static_cast<off_t>(seat), 1);
    if (fcntl(file_->fd, F_GETLK, &lock) != 0) return true;
    // Another process may have got the seat since; one of another PID namespace shows no number we could compare.
    return lock.l_type != F_UNLCK && (lock.l_pid <= 0 || static_cast<std::uint64_t>(lock.l_pid) == pid);
}

Presence::Presence(const std::string& table_path) {
    const std::string path = lock_path(table_path);
    // Whoever had the door may have taken the file away meanwhile: then the door is another one.
    do {
        if (file_) file_->unlock_door();
        file_ = LockFile::of(path);
        file_->lock_door();
    } while (!file_->is_named(path));
    at_door_ = true;
    try {
        first_ = file_->users == 0 && !file_->others_inside();
        if (file_->users == 0) file_->take_seat();
    } catch (...) {
        file_->unlock_door();
        throw;
    }
    ++file_->users;
}

bool Presence::is_alone() const { return !file_->others_inside(); }

void Presence::settle() {
    if (at_door_) file_->unlock_door();
    at_door_ = false;
}

bool Presence::take(Turn turn, double timeout_s) const {
    constexpr std::chrono::microseconds pause(200);
    const int number = static_cast<int>(turn);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
    if (!file_->turns[number].try_lock_until(deadline)) return false;
    struct flock lock = region(F_WRLCK, kTurns + number, 1);
    while (fcntl(file_->fd, F_SETLK, &lock) != 0) {
        if (std::chrono::steady_clock::now() >= deadline) {
            file_->turns[number].unlock();
            return false;
        }
        std::this_thread::sleep_for(pause);
    }
    return true;
}

void Presence::give(Turn turn) const {
    const int number = static_cast<int>(turn);
    struct flock lock = region(F_UNLCK, kTurns + number, 1);
    fcntl(file_->fd, F_SETLK, &lock);
    file_->turns[number].unlock();
}

bool Presence::begin_leave() {
    if (!at_door_) file_->lock_door();
    at_door_ = true;
    return file_->users == 1 && !file_->others_inside();
}

Presence::~Presence() {
    if (file_->generation != process_generation()) return;  // a forked child holds no lock to give back
    if (--file_->users == 0) {
        struct flock lock = region(F_UNLCK, 1, kSeats);
        fcntl(file_->fd, F_SETLK, &lock);
    }
    if (at_door_) file_->unlock_door();
}

}  // namespace sharpwave
