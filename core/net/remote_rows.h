// The rows of a server: docs/protocol.md. Behind a Buffer of "tcp://host:port/name" or "ipc:///path/name".
//
// Adds have a channel of their own and are numbered by row in one stream, so that rows that are sent again after a lost
// connection, or after the server was started again on the same file, are taken once. Every other call takes an idle
// channel: a draw that waits for its turn holds up no other call.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "buffer/buffer_rows.h"
#include "net/channel.h"
#include "net/session.h"
#include "table/packed_rows.h"

namespace sharpwave {

class RemoteRows final : public BufferRows {
public:
    // `facts`: the answer to OPEN.
    static std::shared_ptr<RemoteRows> open(const std::string& address, const OpenOptions& options, Deadline deadline);
    RemoteRows(std::string address, RowSpec spec, std::unique_ptr<net::Session> session,
               std::unique_ptr<net::Channel> channel, const json::Value& facts);
    ~RemoteRows() override;

    void add(const RowBatch& rows, Deadline deadline) override;
    void sample(Batch& batch, Deadline deadline) override;
    Updated update_priorities(std::span<const std::int64_t> indices, std::span<const float> magnitudes,
                              Deadline deadline) override;
    std::uint64_t size() override;
    std::map<std::string, double> stats() override;
    void clear() override;
    void flush() override;
    void close() override;

private:
    class Borrowed;
    std::unique_ptr<net::Channel> take();
    net::Reply ask(std::string_view verb, Deadline deadline = Deadline::never());
    void check_same(const json::Value& facts) const;
    void read_layout(const json::Value& facts);
    void add_part(const RowBatch& rows, Deadline deadline);
    void send_rows(std::span<const std::byte> body, std::uint64_t rows, Deadline deadline);
    std::uint64_t open_stream(Deadline deadline);
    void read_arrays(std::span<const std::byte> body, Batch& batch) const;
    void read_document(std::span<const std::byte> body, Batch& batch) const;

    std::unique_ptr<net::Session> session_;
    std::string description_;
    RowLayout layout_;
    std::vector<std::size_t> order_;  // which array of a batch comes when in an answer; empty: answers are documents

    std::mutex idle_mutex_;
    std::vector<std::unique_ptr<net::Channel>> idle_;

    std::timed_mutex adding_;  // around what follows
    std::unique_ptr<net::Channel> adder_;
    RowPacker packer_;
    std::vector<std::byte> body_;
    std::string stream_token_;
    std::uint32_t stream_ = 0;
    std::uint64_t stream_generation_ = 0;  // of the session that gave the stream its number
    std::uint64_t acknowledged_ = 0;       // rows of the stream
};

}  // namespace sharpwave
