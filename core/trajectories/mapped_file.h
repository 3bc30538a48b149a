// A data file that is mapped read-only: only the pages that are read are brought into memory.
//
// A file that another process cuts short while it is mapped is a SIGBUS for its readers. is_unchanged() asks the kernel
// (one fstat, 0.4 us) for size and time of the last write, and is called before each use; what is cut between that call
// and the copy of the rows still kills the process. Reading rows with pread() instead would close that gap and costs
// seven times as much as the whole draw (2,304 pieces of 256 rows: 1,150 us against 150 us), process_vm_readv() 860 us.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace sharpwave {

// The bytes. They may be kept longer than the file's descriptor: draws hold many, and descriptors are few.
class Mapping {
public:
    Mapping(const std::byte* data, std::uint64_t bytes) : data(data), bytes(bytes) {}
    ~Mapping();
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    const std::byte* const data;
    const std::uint64_t bytes;
};

class MappedFile {
public:
    // The first `bytes` of a file. ErrorKind::storage: it cannot be opened or mapped, is no file, or is shorter.
    MappedFile(const std::string& path, std::uint64_t bytes);
    ~MappedFile();
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;

    const std::shared_ptr<const Mapping>& mapping() const { return mapping_; }
    std::uint64_t file_bytes() const { return file_bytes_; }
    std::int64_t written_ns() const { return written_ns_; }  // time of the last write when it was mapped
    std::uint64_t inode() const { return inode_; }

    // Whether the file has the size and the time of the last write that it had when it was mapped.
    bool is_unchanged() const;

private:
    std::shared_ptr<const Mapping> mapping_;
    std::uint64_t file_bytes_ = 0, inode_ = 0;
    std::int64_t written_ns_ = 0;
    int fd_ = -1;
};

}  // namespace sharpwave
