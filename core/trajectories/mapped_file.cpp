#include "trajectories/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace sharpwave {
namespace {

std::int64_t last_write(const struct stat& found) {
#if defined(__APPLE__)
    const struct timespec& time = found.st_mtimespec;
#else
    const struct timespec& time = found.st_mtim;
#endif
    return static_cast<std::int64_t>(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

}  // namespace

MappedFile::MappedFile(const std::string& path, std::uint64_t bytes) {
    const auto fail = [&](const std::string& what) {
        if (fd_ >= 0) ::close(fd_);
        throw Error(ErrorKind::storage, path + ": " + what);
    };
    // Without O_NONBLOCK a pipe of that name would make us wait for its other end.
    fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd_ < 0) fail(std::string("cannot open it: ") + std::strerror(errno));
    struct stat found{};
    if (::fstat(fd_, &found) != 0) fail(std::string("cannot open it: ") + std::strerror(errno));
    if (!S_ISREG(found.st_mode)) fail("expected a file");
    file_bytes_ = static_cast<std::uint64_t>(found.st_size);
    inode_ = static_cast<std::uint64_t>(found.st_ino);
    written_ns_ = last_write(found);
    if (bytes == 0 || file_bytes_ < bytes) {
        fail("expected " + std::to_string(bytes) + " bytes, the file has " + std::to_string(file_bytes_));
    }
    void* mapped = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd_, 0);
    if (mapped == MAP_FAILED) fail(std::string("cannot map it: ") + std::strerror(errno));
    ::madvise(mapped, bytes, MADV_RANDOM);  // rows are read here and there: no reading ahead
    mapping_ = std::make_shared<const Mapping>(static_cast<const std::byte*>(mapped), bytes);
}

Mapping::~Mapping() { ::munmap(const_cast<std::byte*>(data), bytes); }

MappedFile::~MappedFile() { ::close(fd_); }

bool MappedFile::is_unchanged() const {
    struct stat found{};
    return ::fstat(fd_, &found) == 0 && static_cast<std::uint64_t>(found.st_size) == file_bytes_ &&
           last_write(found) == written_ns_;
}

}  // namespace sharpwave
