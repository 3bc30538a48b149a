// Rows on their way from a table to a snapshot: one thread takes their checksums, another one writes, so that the
// system's time is not ours.
//
// Bytes go out in whole mebibytes of the file, as far as they follow each other: a file system takes those in half the
// time that pieces across its pages' borders cost.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "storage/format.h"
#include "storage/new_file.h"
#include "table/table.h"

namespace sharpwave {

inline constexpr std::uint64_t kPieceBytes = 1 << 20;

// Copied rows, with their columns.
struct Chunk {
    std::uint64_t slot = 0, count = 0, rows_at = 0;
    std::uint64_t end = 0;              // rows from this serial on were not done when the copy was planned
    const std::byte* direct = nullptr;  // written from where they stand in the table, and looked at again afterwards
    std::vector<std::byte> rows;
    std::vector<std::byte> mutables;  // the values of mutable fields, row by row
    std::vector<std::uint32_t> checksums;
    std::vector<std::uint64_t> words, finals;
};

// Small writes that follow each other, made large ones.
class Stream {
public:
    explicit Stream(NewFile& file) : file_(file) {}
    void write(std::uint64_t offset, const void* data, std::uint64_t bytes);
    void flush();

private:
    NewFile& file_;
    std::uint64_t begin_ = 0;
    std::vector<std::byte> bytes_;
};

class SavePipe {
public:
    // `copy` fills a chunk whose rows changed while they were written.
    SavePipe(NewFile& file, const format::Header& header, const Table& table, bool threaded,
             std::function<void(Chunk&)> copy);
    ~SavePipe();

    Chunk take();
    void put(Chunk chunk);
    void drain();  // returns when all that was put is in the file

    struct Early {
        std::uint64_t slot, serial;
    };
    // Rows that were written though their writers had not said that they are done. Behind drain().
    const std::vector<Early>& early() const { return early_; }

private:
    // Bytes to write at once, and the chunks that end in them.
    struct Piece {
        const std::byte* from = nullptr;
        std::uint64_t at = 0, bytes = 0;
        std::vector<Chunk> chunks;
    };
    void queue_run(std::uint64_t end);
    void queue(Piece piece);
    void write(Piece& piece);
    void settle(std::size_t most_left);
    void run();

    NewFile& file_;
    const format::Header& header_;
    const Table& table_;
    std::function<void(Chunk&)> copy_;

    // Of the thread that copies: chunks that follow each other in the table and in the file, and what of them is not
    // queued yet.
    std::deque<Chunk> run_;
    Piece rest_;
    Stream checksums_, words_, finals_, mutables_;
    std::vector<Chunk> spare_;
    std::vector<Early> early_;

    std::thread thread_;
    std::mutex mutex_;
    std::condition_variable queued_, written_;
    std::deque<Piece> waiting_, done_;
    std::size_t unsettled_ = 0;
    bool ended_ = false;
    std::exception_ptr error_;
};

}  // namespace sharpwave
