#include "storage/storage.h"

#include <fcntl.h>
#include <poll.h>
#if defined(__linux__)
#include <sys/inotify.h>
#include <sys/vfs.h>
#endif
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <utility>

#include "base/error.h"
#include "storage/format.h"
#include "storage/new_file.h"

namespace sharpwave {
namespace {

using format::kHugePageBytes;
using format::kPageBytes;

std::uint64_t round_up(std::uint64_t value, std::uint64_t unit) { return (value + unit - 1) / unit * unit; }

std::string in_gib(std::uint64_t bytes) {
    char text[64];
    std::snprintf(text, sizeof text, "%.3g GiB", static_cast<double>(bytes) / (1 << 30));
    return text;
}

// Addresses aligned to huge pages: both a file mapping and anonymous memory need it to get them.
std::byte* reserve(std::uint64_t bytes) {
    const std::uint64_t asked = bytes + kHugePageBytes;
    if (asked < bytes) fail_storage("cannot reserve " + in_gib(bytes), ENOMEM);
    void* start = mmap(nullptr, asked, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED)
        fail_storage("cannot reserve " + in_gib(bytes) + " of addresses; give a smaller capacity", errno);
    const auto from = reinterpret_cast<std::uintptr_t>(start);
    const auto aligned = round_up(from, kHugePageBytes);
    if (aligned > from) munmap(start, aligned - from);
    munmap(reinterpret_cast<void*>(aligned + bytes), from + asked - aligned - bytes);
    return reinterpret_cast<std::byte*>(aligned);
}

class Descriptor {
public:
    explicit Descriptor(int fd) : fd_(fd) {}
    ~Descriptor() {
        if (fd_ >= 0) close(fd_);
    }
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    operator int() const { return fd_; }

private:
    int fd_;
};

std::byte* map_file(int fd, std::uint64_t bytes, const std::string& path, bool read_only = false) {
    std::byte* place = reserve(bytes);
    const int protection = read_only ? PROT_READ : PROT_READ | PROT_WRITE;
    if (mmap(place, bytes, protection, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
        const int code = errno;
        munmap(place, bytes);
        fail_storage("cannot map '" + path + "'", code);
    }
    return place;
}

// Where reading a hole takes space.
bool is_memory_file_system(int fd) {
#if defined(__linux__)
    constexpr long kTmpfs = 0x01021994;
    struct statfs info{};
    return fstatfs(fd, &info) == 0 && info.f_type == kTmpfs;
#else
    (void)fd;
    return false;
#endif
}

// Space is given in chunks of this size.
constexpr std::uint64_t kChunk = kPageBytes;

}  // namespace

std::string shared_memory_folder() {
#if defined(__APPLE__)
    return "/tmp";
#else
    return "/dev/shm";
#endif
}

bool wait_for_file(const std::string& path, Deadline deadline) {
    const auto is_there = [&] { return access(path.c_str(), F_OK) == 0; };
#if defined(__linux__)
    // Watched before it is looked for: nothing is missed in between.
    const Descriptor watch(inotify_init1(IN_CLOEXEC | IN_NONBLOCK));
    const bool watches = watch >= 0 && inotify_add_watch(watch, folder_of(path).c_str(), IN_CREATE | IN_MOVED_TO) >= 0;
#else
    const Descriptor watch(-1);
    const bool watches = false;  // short sleeps instead (untested)
#endif
    for (;;) {
        if (is_there()) return true;
        if (deadline.is_over()) return false;
        const double slice = std::min(deadline.left_s(), watches ? kWaitSlice : 5e-3);
        pollfd wanted{watch, POLLIN, 0};
        if (poll(&wanted, watches ? 1 : 0, static_cast<int>(slice * 1000) + 1) > 0) {
            char events[4096];
            while (read(watch, events, sizeof events) > 0) {
            }
        }
        check_interrupt();
    }
}

Storage Storage::anonymous(std::uint64_t bytes) {
    Storage storage;
    storage.bytes_ = round_up(bytes, kPageBytes);
    if (storage.bytes_ < bytes) fail_storage("cannot reserve 2^64 bytes", ENOMEM);
    storage.data_ = reserve(storage.bytes_);
    if (mprotect(storage.data_, storage.bytes_, PROT_READ | PROT_WRITE) != 0) {
        fail_storage("cannot use " + in_gib(bytes) + " of memory; give a smaller capacity", errno);
    }
    return storage;
}

// Which chunks are known to have their space. Another process may know more; asking twice does no harm.
struct Storage::Sparse {
    Sparse(int descriptor, std::uint64_t bytes)
        : fd(descriptor), known(static_cast<std::atomic<bool>*>(std::calloc((bytes + kChunk - 1) / kChunk, 1))) {
        static_assert(sizeof(std::atomic<bool>) == 1);
    }
    ~Sparse() {
        close(fd);
        std::free(known);
    }
    int fd;
    std::atomic<bool>* known;  // fresh zeroed pages cost nothing until they are touched
};

Storage::Storage() = default;

Storage Storage::create(const std::string& path, std::uint64_t bytes, std::uint64_t sparse_from) {
    Storage storage;
    storage.path_ = path;
    storage.bytes_ = round_up(bytes, kPageBytes);
    storage.unpublished_ = std::make_unique<NewFile>(path);
    const std::uint64_t filled = std::min(sparse_from, storage.bytes_);
    const bool is_shared = path.rfind(shared_memory_folder(), 0) == 0;
    const std::string what =
        "cannot allocate " + in_gib(filled) + " for '" + path + "'; give a smaller capacity" +
        (is_shared ? ", or make shared memory larger (Docker: --shm-size), or storage=\"file://path\""
                   : " or another storage=");
    storage.unpublished_->resize(storage.bytes_, what);
    storage.unpublished_->allocate(filled, what);
    const int fd = storage.unpublished_->fd();
    storage.data_ = map_file(fd, storage.bytes_, path);
    storage.in_memory_ = is_memory_file_system(fd);
    if (sparse_from < storage.bytes_) storage.advise_small_pages(sparse_from);
    storage.sparse_ = std::make_unique<Sparse>(fcntl(fd, F_DUPFD_CLOEXEC, 0), storage.bytes_);
    return storage;
}

// Where a page is touched, file systems may bring, and then allocate, a run of its neighbours: up to twice the space of
// heaps that are filled in part.
void Storage::advise_small_pages(std::uint64_t offset) const { madvise(data_ + offset, bytes_ - offset, MADV_RANDOM); }

void Storage::ensure(std::uint64_t offset, std::uint64_t bytes) const {
    for (std::uint64_t chunk = offset / kChunk; chunk * kChunk < offset + bytes; ++chunk) {
        if (sparse_->known && sparse_->known[chunk].load(std::memory_order_relaxed)) continue;
        const std::uint64_t begin = chunk * kChunk, end = std::min(begin + kChunk, bytes_);
        if (!sparse_->known) fail_storage("'" + path_ + "' cannot grow", ENOMEM);
        if (const int code = allocate_blocks(sparse_->fd, begin, end - begin)) {
            fail_storage("'" + path_ + "' cannot grow", code);
        }
        sparse_->known[chunk].store(true, std::memory_order_relaxed);
    }
}

Storage Storage::attach(const std::string& path, bool read_only) {
    const int access = read_only ? O_RDONLY : O_RDWR | O_NOFOLLOW;
    const Descriptor fd(open(path.c_str(), access | O_CLOEXEC | O_NONBLOCK));
    if (fd < 0 && errno == ELOOP && !read_only) {
        throw Error(ErrorKind::storage, "'" + path + "' is a symbolic link; give the path of the file itself");
    }
    if (fd < 0) fail_storage("cannot open '" + path + "'", errno);
    struct stat info{};
    if (fstat(fd, &info) != 0) fail_storage("cannot open '" + path + "'", errno);
    if (!S_ISREG(info.st_mode)) throw Error(ErrorKind::storage, "'" + path + "' is not a file");
    if (!read_only && info.st_uid != geteuid()) {
        throw Error(ErrorKind::storage, "'" + path + "' belongs to user " + std::to_string(info.st_uid) +
                                            ", this process runs as user " + std::to_string(geteuid()) +
                                            "; a buffer of another user is not joined: copy it, or change its owner");
    }
    if (static_cast<std::uint64_t>(info.st_size) < kPageBytes) {
        throw Error(ErrorKind::storage, "'" + path + "' is not a Sharpwave table: it holds " +
                                            std::to_string(info.st_size) + " bytes, a header alone has 4096");
    }
    Storage storage;
    storage.path_ = path;
    storage.bytes_ = static_cast<std::uint64_t>(info.st_size);
    storage.data_ = map_file(fd, storage.bytes_, path, read_only);
    storage.in_memory_ = is_memory_file_system(fd);
    storage.sparse_ = std::make_unique<Sparse>(fcntl(fd, F_DUPFD_CLOEXEC, 0), storage.bytes_);
    return storage;
}

void Storage::extend(std::uint64_t bytes) {
    if (ftruncate(fd(), static_cast<off_t>(bytes)) != 0) fail_storage("cannot lengthen '" + path_ + "'", errno);
    std::byte* longer = map_file(fd(), bytes, path_);
    auto sparse = std::make_unique<Sparse>(fcntl(fd(), F_DUPFD_CLOEXEC, 0), bytes);
    munmap(data_, bytes_);
    data_ = longer;
    bytes_ = bytes;
    sparse_ = std::move(sparse);
}

void Storage::fill_holes(std::uint64_t bytes) {
#if defined(SEEK_HOLE)
    for (off_t at = 0; (at = lseek(fd(), at, SEEK_HOLE)) >= 0 && static_cast<std::uint64_t>(at) < bytes;) {
        const off_t data = lseek(fd(), at, SEEK_DATA);
        const std::uint64_t end = data < 0 ? bytes : std::min(bytes, static_cast<std::uint64_t>(data));
        if (const int code =
                allocate_blocks(fd(), static_cast<std::uint64_t>(at), end - static_cast<std::uint64_t>(at)))
            fail_storage("open(): '" + path_ + "' has holes, and there is no space to fill them", code);
        at = static_cast<off_t>(end);
    }
#else
    (void)bytes;
#endif
}

bool Storage::is_hole(std::uint64_t offset, std::uint64_t bytes) const {
#if defined(SEEK_DATA)
    if (!is_file()) return false;
    const off_t data = lseek(fd(), static_cast<off_t>(offset), SEEK_DATA);
    return data < 0 ? errno == ENXIO : static_cast<std::uint64_t>(data) >= offset + bytes;
#else
    (void)offset, (void)bytes;
    return false;
#endif
}

const std::string& Storage::name_now() const { return unpublished_ ? unpublished_->name_now() : path_; }
int Storage::fd() const { return sparse_->fd; }

Storage::Storage(Storage&& other) noexcept { *this = std::move(other); }  // what is left of `other` is never used

Storage& Storage::operator=(Storage&& other) noexcept {
    if (this == &other) return *this;
    release();
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    path_ = std::exchange(other.path_, {});
    in_memory_ = other.in_memory_;
    unpublished_ = std::move(other.unpublished_);
    sparse_ = std::move(other.sparse_);
    return *this;
}

Storage::~Storage() { release(); }

void Storage::release() noexcept {
    if (data_) munmap(data_, bytes_);
    data_ = nullptr;
    unpublished_.reset();
}

void Storage::publish(bool replace) {
    unpublished_->publish(replace);
    unpublished_.reset();
}

void Storage::advise_huge_pages(std::uint64_t offset, std::uint64_t bytes) {
#if defined(__linux__)
    const std::uint64_t begin = round_up(offset, kHugePageBytes);
    const std::uint64_t end = (offset + bytes) / kHugePageBytes * kHugePageBytes;
    if (begin >= end) return;
    madvise(data_ + begin, end - begin, MADV_HUGEPAGE);
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1; older headers lack the name
#endif
    // Shared memory gets huge pages only by collapsing, where the system's setting says never. 64 MB a call, up to
    // half a second in all: a fragmented machine must not make creation hang.
    if (!is_file() || path_.rfind(shared_memory_folder(), 0) != 0) return;
    const Deadline deadline = Deadline::in(0.5);
    for (std::uint64_t at = begin; at < end && !deadline.is_over(); at += 32 * kHugePageBytes) {
        const std::uint64_t piece = std::min<std::uint64_t>(32 * kHugePageBytes, end - at);
        if (madvise(data_ + at, piece, MADV_COLLAPSE) != 0) break;
    }
#else
    (void)offset;
    (void)bytes;
#endif
}

std::uint64_t Storage::huge_page_bytes() const {
    if (bytes_ < kHugePageBytes) return 0;
    std::ifstream maps("/proc/self/smaps");
    std::string line;
    bool inside = false;
    std::uint64_t kib = 0;
    const auto from = reinterpret_cast<std::uintptr_t>(data_);
    while (std::getline(maps, line)) {
        std::uint64_t begin = 0, end = 0, count = 0;
        if (std::sscanf(line.c_str(), "%" SCNx64 "-%" SCNx64 " ", &begin, &end) == 2) {
            inside = begin >= from && end <= from + bytes_;
        } else if (inside && (std::sscanf(line.c_str(), "AnonHugePages: %" SCNu64, &count) == 1 ||
                              std::sscanf(line.c_str(), "ShmemPmdMapped: %" SCNu64, &count) == 1)) {
            kib += count;
        }
    }
    return kib * 1024;
}

void Storage::flush(std::uint64_t offset, std::uint64_t bytes) const {
    if (!is_file()) return;
    if (msync(data_ + offset, bytes, MS_SYNC) != 0) fail_storage("cannot write '" + path_ + "' to the disk", errno);
}

}  // namespace sharpwave
