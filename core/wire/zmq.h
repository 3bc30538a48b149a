// libzmq in a process that has it by way of pyzmq: the functions are looked up when the program runs, so the engine is
// built without the library. Sockets are made and bound by pyzmq; here they are only read and written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <utility>

#include "wire/memory.h"

namespace sharpwave::wire {

struct Zmq {
    int (*msg_init)(void*);
    int (*msg_init_size)(void*, std::size_t);
    int (*msg_init_data)(void*, void*, std::size_t, void (*)(void*, void*), void*);
    int (*msg_close)(void*);
    int (*msg_copy)(void*, void*);
    int (*msg_move)(void*, void*);
    void* (*msg_data)(void*);
    std::size_t (*msg_size)(const void*);
    int (*msg_more)(const void*);
    const char* (*msg_gets)(const void*, const char*);
    int (*msg_recv)(void*, void*, int);
    int (*msg_send)(void*, void*, int);
    int (*error)();
};

inline constexpr int kDontWait = 1, kSendMore = 2;  // ZMQ_DONTWAIT, ZMQ_SNDMORE

// A zmq_msg_t. Copies share the bytes, which are freed with the last of them, in whatever thread.
class Message {
public:
    explicit Message(const Zmq& zmq) : zmq_(&zmq) { zmq.msg_init(raw_); }
    Message(const Zmq& zmq, std::size_t bytes) : zmq_(&zmq) {
        if (zmq.msg_init_size(raw_, bytes) != 0) throw std::bad_alloc();
    }
    // The first `bytes` of the memory, which is held until the message was sent.
    Message(const Zmq& zmq, const std::shared_ptr<Memory>& memory, std::size_t bytes) : zmq_(&zmq) {
        auto* held = new std::shared_ptr<Memory>(memory);
        const auto drop = [](void*, void* hint) { delete static_cast<std::shared_ptr<Memory>*>(hint); };
        if (zmq.msg_init_data(raw_, memory->data(), bytes, drop, held) != 0) {
            delete held;
            throw std::bad_alloc();
        }
    }
    Message(const Message& other) : zmq_(other.zmq_) {
        zmq_->msg_init(raw_);
        zmq_->msg_copy(raw_, const_cast<unsigned char*>(other.raw_));
    }
    Message(Message&& other) noexcept : zmq_(other.zmq_) {
        zmq_->msg_init(raw_);
        zmq_->msg_move(raw_, other.raw_);
    }
    Message& operator=(Message&& other) noexcept {
        if (this != &other) zmq_->msg_move(raw_, other.raw_);
        return *this;
    }
    Message& operator=(const Message&) = delete;
    ~Message() { zmq_->msg_close(raw_); }

    std::byte* data() { return static_cast<std::byte*>(zmq_->msg_data(raw_)); }
    std::size_t size() const { return zmq_->msg_size(raw_); }
    std::span<const std::byte> bytes() { return {data(), size()}; }
    bool has_more() const { return zmq_->msg_more(raw_) != 0; }
    const char* property(const char* name) const { return zmq_->msg_gets(raw_, name); }  // null: it has none

    // False: error() tells why. A message that was sent is empty.
    bool receive(void* socket, int flags) { return zmq_->msg_recv(raw_, socket, flags) >= 0; }
    bool send(void* socket, int flags) { return zmq_->msg_send(raw_, socket, flags) >= 0; }

private:
    const Zmq* zmq_;
    alignas(8) unsigned char raw_[64];  // what libzmq's interface says of its size
};

}  // namespace sharpwave::wire
