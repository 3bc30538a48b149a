// A file that gets its name when it is whole: no process ever finds half of one, and a killed process leaves none
// behind.
#pragma once

#include <cstdint>
#include <string>

namespace sharpwave {

class NewFile {
public:
    // Beside `path`, readable by its owner only. Where the system can, it has no name at all until publish().
    explicit NewFile(std::string path);
    ~NewFile();
    NewFile(const NewFile&) = delete;
    NewFile& operator=(const NewFile&) = delete;

    // Lack of space is ErrorKind::storage, from whichever call meets it; `what` begins the message.
    void resize(std::uint64_t bytes, const std::string& what);
    void allocate(std::uint64_t bytes, const std::string& what);
    // The same where it is cheap: what is written then is written faster. `what` is the call that needs it.
    void reserve(std::uint64_t bytes, const std::string& what);
    void write(std::uint64_t offset, const void* data, std::uint64_t bytes);
    void read(std::uint64_t offset, void* data, std::uint64_t bytes) const;
    void sync();  // returns when all of it is on the disk

    // Makes it visible, whole or not at all. An existing name is an error unless `replace`. Without `sync` the name may
    // be gone after a power cut: many small files are then named a thousand times faster.
    void publish(bool replace, bool sync = true);

    int fd() const { return fd_; }
    const std::string& name_now() const { return temporary_.empty() ? path_ : temporary_; }

private:
    std::string path_, temporary_;  // the second one is empty where the file has no name
    int fd_ = -1;
};

[[noreturn]] void refuse_existing(const std::string& path);

// Gives a range of a file its space; an error number, or 0. Goes on after a signal, unless `is_interruptible` and the
// signal's handler raised.
int allocate_blocks(int fd, std::uint64_t offset, std::uint64_t bytes, bool is_interruptible = false);

// Asks for the blocks of bytes that will be written there: writing them is faster then. The file keeps its size. False
// where there is no space or the system has no such call; nothing has changed then.
bool reserve_blocks(int fd, std::uint64_t offset, std::uint64_t bytes);

// Two names of files or folders change places, in one step.
void exchange_paths(const std::string& one, const std::string& other);

// The folder that a path is in.
std::string folder_of(const std::string& path);

}  // namespace sharpwave
