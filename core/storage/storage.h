// A run of bytes: anonymous memory, or a mapped file (on disk, or in the system's shared-memory folder).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/wait.h"

namespace sharpwave {

class NewFile;

class Storage {
public:
    // Reserves addresses and commits on touch: asking for more than the machine has is allowed, filling it is not.
    static Storage anonymous(std::uint64_t bytes);

    // Makes a file of `bytes`, readable by its owner only; publish() gives it its name. The space up to `sparse_from`
    // is allocated now: lack of it is an error here, never a bus error later. What follows gets its space from
    // ensure().
    static Storage create(const std::string& path, std::uint64_t bytes, std::uint64_t sparse_from);

    // Maps an existing file as it is. The caller checks what is in it. To be written to, it must be this user's own and
    // no symbolic link.
    static Storage attach(const std::string& path, bool read_only = false);

    // Makes a mapped file that lost its end as long as it was; the end is zeros.
    void extend(std::uint64_t bytes);

    // Gives the file's first bytes their space where it has holes: a copy may have left some.
    void fill_holes(std::uint64_t bytes);

    // Whether a range of a file was never written: then it is zeros, and looking at it could need space that is not
    // there (reading a hole of a full tmpfs is a bus error).
    bool is_hole(std::uint64_t offset, std::uint64_t bytes) const;

    Storage();
    Storage(Storage&& other) noexcept;
    Storage& operator=(Storage&& other) noexcept;
    ~Storage();

    // Makes a created file visible, whole or not at all. An existing one is an error unless `replace`.
    void publish(bool replace);

    // Asks for huge pages on whole 2 MB pages of this range. Best effort; huge_page_bytes() tells what was got.
    void advise_huge_pages(std::uint64_t offset, std::uint64_t bytes);
    // The kernel counts every page of the process for the answer: 3 to 20 ms.
    std::uint64_t huge_page_bytes() const;

    // Gives a range of a file its space, if it has none yet. Costs next to nothing where it has.
    void ensure(std::uint64_t offset, std::uint64_t bytes) const;

    // Keeps what is touched from here on from bringing its neighbours along.
    void advise_small_pages(std::uint64_t offset) const;

    // Returns when what was written is on the disk (nothing to do for anonymous memory).
    void flush() const { flush(0, bytes_); }
    void flush(std::uint64_t offset, std::uint64_t bytes) const;  // of a range that begins a page

    std::byte* data() const { return data_; }
    std::uint64_t bytes() const { return bytes_; }
    bool is_file() const { return !path_.empty(); }
    bool is_in_memory() const { return in_memory_; }  // a file of a memory file system (shared memory)
    const std::string& path() const { return path_; }
    const std::string& name_now() const;  // the path, or the name that a created file has until publish()
    int fd() const;                       // of a file

private:
    void release() noexcept;

    bool in_memory_ = false;
    std::byte* data_ = nullptr;
    std::uint64_t bytes_ = 0;
    std::string path_;
    std::unique_ptr<NewFile> unpublished_;  // created, not yet named
    struct Sparse;
    std::unique_ptr<Sparse> sparse_;  // files only
};

// Waits until there is a file of that name; false when there is none at the deadline. Ended by signals.
bool wait_for_file(const std::string& path, Deadline deadline);

// The folder where a file is shared memory.
std::string shared_memory_folder();

}  // namespace sharpwave
