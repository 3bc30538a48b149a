#include "net/socket.h"

#include <zmq.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "base/process.h"
#include "base/wait.h"

namespace sharpwave::net {
namespace {

constexpr int kReconnectMs = 20, kMostReconnectMs = 500, kPingMs = 1000, kSilenceMs = 3000;

[[noreturn]] void fail(const std::string& what) {
    throw Error(ErrorKind::storage, what + ": " + zmq_strerror(zmq_errno()));
}

int to_ms(double seconds) { return static_cast<int>(std::min(seconds, 1e6) * 1000 + 0.999); }

bool poll(void* socket, short events, double seconds) {
    zmq_pollitem_t item{socket, 0, events, 0};
    return zmq_poll(&item, 1, to_ms(seconds)) > 0;
}

}  // namespace

Context::Context() : context_(zmq_ctx_new()), generation_(process_generation()) {
    if (!context_) fail("open(): libzmq has no context");
}

Context::~Context() {
    if (generation_ == process_generation()) zmq_ctx_term(context_);
}

Socket::Socket(std::shared_ptr<Context> context, const std::string& endpoint, const std::optional<ClientKey>& key)
    : context_(std::move(context)),
      socket_(zmq_socket(context_->get(), ZMQ_DEALER)),
      generation_(process_generation()) {
    if (!socket_) fail("open(): libzmq has no socket");
    const auto set = [&](int option, int value) { zmq_setsockopt(socket_, option, &value, sizeof value); };
    set(ZMQ_LINGER, 0);
    set(ZMQ_IMMEDIATE, 1);  // nothing is queued for a server that is not there: PROBE finds out what was lost
    // Connections that are open and lead nowhere are given up and made anew.
    set(ZMQ_HEARTBEAT_IVL, kPingMs);
    set(ZMQ_HEARTBEAT_TIMEOUT, kSilenceMs);
    set(ZMQ_HANDSHAKE_IVL, kSilenceMs);
    set(ZMQ_RECONNECT_IVL, kReconnectMs);
    set(ZMQ_RECONNECT_IVL_MAX, kMostReconnectMs);
    set(ZMQ_IPV6, 1);
    if (key) {
        const bool is_set = zmq_setsockopt(socket_, ZMQ_CURVE_SERVERKEY, key->server.c_str(), 41) == 0 &&
                            zmq_setsockopt(socket_, ZMQ_CURVE_PUBLICKEY, key->public_key.c_str(), 41) == 0 &&
                            zmq_setsockopt(socket_, ZMQ_CURVE_SECRETKEY, key->secret.c_str(), 41) == 0;
        if (!is_set) {
            zmq_close(socket_);
            fail("open(): keys: this libzmq does not take them");
        }
    }
    if (zmq_connect(socket_, endpoint.c_str()) != 0) {
        zmq_close(socket_);
        fail("open(): '" + endpoint + "'");
    }
}

Socket::~Socket() {
    if (generation_ == process_generation()) zmq_close(socket_);
}

bool Socket::send(std::span<const std::byte> frame) {
    for (;;) {
        if (zmq_send(socket_, frame.data(), frame.size(), ZMQ_DONTWAIT) >= 0) return true;
        if (zmq_errno() == EAGAIN) return false;
        if (zmq_errno() != EINTR) fail("the connection");
    }
}

bool Socket::receive(Frame& frame, double seconds) {
    const Deadline deadline = Deadline::in(seconds);
    for (;;) {
        const std::shared_ptr<zmq_msg_t> message(new zmq_msg_t, [](zmq_msg_t* gone) {
            zmq_msg_close(gone);
            delete gone;
        });
        zmq_msg_init(message.get());
        if (zmq_msg_recv(message.get(), socket_, ZMQ_DONTWAIT) >= 0) {
            bool is_one = zmq_msg_more(message.get()) == 0;
            for (bool more = !is_one; more;) {
                zmq_msg_t rest;
                zmq_msg_init(&rest);
                more = zmq_msg_recv(&rest, socket_, 0) >= 0 && zmq_msg_more(&rest);
                zmq_msg_close(&rest);
            }
            if (!is_one) continue;
            frame.message_ = message;
            frame.bytes_ = {static_cast<const std::byte*>(zmq_msg_data(message.get())), zmq_msg_size(message.get())};
            return true;
        }
        if (zmq_errno() != EAGAIN && zmq_errno() != EINTR) fail("the connection");
        if (deadline.is_over()) return false;
        poll(socket_, ZMQ_POLLIN, deadline.left_s());
    }
}

bool Socket::is_connected(double seconds) { return poll(socket_, ZMQ_POLLOUT, seconds); }

}  // namespace sharpwave::net
