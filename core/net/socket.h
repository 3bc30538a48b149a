// One DEALER socket of libzmq, of which this room uses the C interface alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "net/client_key.h"

namespace sharpwave::net {

// The context of libzmq: one thread for the sockets of a session. In a forked child it is left alone.
class Context {
public:
    Context();
    ~Context();
    Context(const Context&) = delete;
    Context& operator=(const Context&) = delete;
    void* get() const { return context_; }

private:
    void* context_;
    std::uint64_t generation_;
};

// A message that was received. Its bytes live as long as it, and begin anywhere: read them with memcpy.
class Frame {
public:
    Frame() = default;
    std::span<const std::byte> bytes() const { return bytes_; }
    std::span<const std::byte> body() const { return bytes_.subspan(64); }

private:
    friend class Socket;
    std::shared_ptr<void> message_;
    std::span<const std::byte> bytes_;
};

// Any thread may use it, one at a time.
class Socket {
public:
    Socket(std::shared_ptr<Context> context, const std::string& endpoint, const std::optional<ClientKey>& key);
    ~Socket();
    Socket(const Socket&) = delete;
    Socket& operator=(const Socket&) = delete;

    // False: there is no connection now, or its queue is full.
    bool send(std::span<const std::byte> frame);

    // False: none has come in so many seconds. Messages of several frames are dropped.
    bool receive(Frame& frame, double seconds);

    // Whether a message can be sent; waits so many seconds for that.
    bool is_connected(double seconds);

private:
    std::shared_ptr<Context> context_;
    void* socket_;
    std::uint64_t generation_;
};

}  // namespace sharpwave::net
