#include "table/save_pipe.h"

#include <algorithm>
#include <atomic>
#include <system_error>
#include <utility>

namespace sharpwave {

using namespace format;

namespace {

constexpr std::size_t kPiecesWaiting = 8;

}  // namespace

void Stream::write(std::uint64_t offset, const void* data, std::uint64_t bytes) {
    if (offset != begin_ + bytes_.size()) flush();
    if (bytes_.empty()) begin_ = offset;
    const auto* from = static_cast<const std::byte*>(data);
    bytes_.insert(bytes_.end(), from, from + bytes);
    if (bytes_.size() >= kPieceBytes) flush();
}

void Stream::flush() {
    file_.write(begin_, bytes_.data(), bytes_.size());
    bytes_.clear();
}

SavePipe::SavePipe(NewFile& file, const Header& header, const Table& table, bool threaded,
                   std::function<void(Chunk&)> copy)
    : file_(file),
      header_(header),
      table_(table),
      copy_(std::move(copy)),
      checksums_(file),
      words_(file),
      finals_(file),
      mutables_(file) {
    try {
        if (threaded) thread_ = std::thread([this] { run(); });
    } catch (const std::system_error&) {
        // No thread to be had: this one writes, as it does for small tables.
    }
}

SavePipe::~SavePipe() {
    {
        std::lock_guard<std::mutex> guard(mutex_);
        ended_ = true;
    }
    queued_.notify_one();
    if (thread_.joinable()) thread_.join();
}

Chunk SavePipe::take() {
    settle(kPiecesWaiting - 1);
    if (spare_.empty()) return {};
    Chunk chunk = std::move(spare_.back());
    spare_.pop_back();
    return chunk;
}

void SavePipe::put(Chunk chunk) {
    const std::uint64_t bytes = chunk.count * header_.row_bytes, end = rest_.at + rest_.bytes;
    if (!chunk.direct || chunk.direct != rest_.from + rest_.bytes || chunk.rows_at != end) {
        queue_run(end);
        rest_.from = chunk.direct;
        rest_.at = chunk.rows_at;
    }
    if (!chunk.direct) {
        Piece piece{chunk.rows.data(), chunk.rows_at, bytes, {}};
        piece.chunks.push_back(std::move(chunk));
        return queue(std::move(piece));
    }
    rest_.bytes += bytes;
    run_.push_back(std::move(chunk));
    queue_run((rest_.at + rest_.bytes) / kPieceBytes * kPieceBytes);
}

void SavePipe::drain() {
    queue_run(rest_.at + rest_.bytes);
    settle(0);
    for (Stream* column : {&checksums_, &words_, &finals_, &mutables_}) column->flush();
}

// What is not queued yet of the run, up to `end` of the file.
void SavePipe::queue_run(std::uint64_t end) {
    if (end <= rest_.at) return;
    Piece piece{rest_.from, rest_.at, end - rest_.at, {}};
    while (!run_.empty() && run_.front().rows_at + run_.front().count * header_.row_bytes <= end) {
        piece.chunks.push_back(std::move(run_.front()));
        run_.pop_front();
    }
    rest_ = Piece{rest_.from + piece.bytes, end, rest_.bytes - piece.bytes, {}};
    queue(std::move(piece));
}

void SavePipe::queue(Piece piece) {
    ++unsettled_;
    if (!thread_.joinable()) {
        write(piece);
        done_.push_back(std::move(piece));
        return;
    }
    std::lock_guard<std::mutex> guard(mutex_);
    waiting_.push_back(std::move(piece));
    if (waiting_.size() == 1) queued_.notify_one();
}

// The columns of what has been written follow, until at most so many pieces are on their way.
void SavePipe::settle(std::size_t most_left) {
    for (;;) {
        std::deque<Piece> done;
        {
            std::unique_lock<std::mutex> guard(mutex_);
            if (unsettled_ > most_left) written_.wait(guard, [&] { return error_ || !done_.empty(); });
            if (error_) std::rethrow_exception(error_);
            done.swap(done_);
        }
        if (done.empty()) return;
        unsettled_ -= done.size();
        const auto put = [&](Stream& column, RegionId id, const Chunk& chunk, const auto& values) {
            const std::uint64_t bytes = sizeof values[0];
            if (header_.regions[id].bytes)
                column.write(header_.regions[id].offset + chunk.slot * bytes, values.data(), chunk.count * bytes);
        };
        for (Piece& piece : done) {
            for (Chunk& chunk : piece.chunks) {
                for (std::uint64_t i = 0; i < chunk.count; ++i) {
                    const std::uint64_t serial = serial_of(chunk.words[i]);
                    if (serial >= chunk.end) early_.push_back({chunk.slot + i, serial});
                }
                put(checksums_, kChecksums, chunk, chunk.checksums);
                put(words_, kWords, chunk, chunk.words);
                put(finals_, kFinals, chunk, chunk.finals);
                if (const std::uint64_t bytes = table_.layout().mutable_bytes()) {
                    const std::uint64_t row = (chunk.rows_at - header_.regions[kRows].offset) / header_.row_bytes;
                    mutables_.write(header_.regions[kMutables].offset + row * bytes, chunk.mutables.data(),
                                    chunk.count * bytes);
                }
                spare_.push_back(std::move(chunk));
            }
        }
    }
}

// Rows that stand in the table are looked at again at once, while they are in the cache.
void SavePipe::write(Piece& piece) {
    file_.write(piece.at, piece.from, piece.bytes);
    fence(std::memory_order_acquire);
    for (Chunk& chunk : piece.chunks) {
        bool is_as_written = true;
        for (std::uint64_t i = 0; chunk.direct && is_as_written && i < chunk.count; ++i) {
            std::atomic_ref<std::uint64_t> word(table_.word(chunk.slot + i));
            is_as_written = word.load(std::memory_order_acquire) == chunk.words[i];
        }
        if (is_as_written) continue;
        copy_(chunk);
        file_.write(chunk.rows_at, chunk.rows.data(), chunk.count * header_.row_bytes);
    }
}

void SavePipe::run() {
    std::unique_lock<std::mutex> guard(mutex_);
    for (;;) {
        queued_.wait(guard, [&] { return ended_ || !waiting_.empty(); });
        if (waiting_.empty() || error_) return;
        Piece piece = std::move(waiting_.front());
        waiting_.pop_front();
        guard.unlock();
        std::exception_ptr error;
        try {
            write(piece);
        } catch (...) {
            error = std::current_exception();
        }
        guard.lock();
        done_.push_back(std::move(piece));
        error_ = error;
        written_.notify_one();
    }
}

}  // namespace sharpwave
