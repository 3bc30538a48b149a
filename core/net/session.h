// A client of a server: one session, one open table. Channels make the calls; the session says HELLO, keeps the
// connection alive with BEAT and opens the table again after the server was started anew.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/json.h"
#include "base/wait.h"
#include "net/socket.h"
#include "wire/message.h"

namespace sharpwave::net {

using namespace wire;  // the messages, which servers speak, too

class Channel;

// What one channel tells the heartbeat: replies to calls below `oldest` have been received.
struct ChannelMark {
    std::uint32_t number;
    std::uint64_t oldest;
};

class Session {
public:
    struct Place {
        std::string endpoint;  // "tcp://host:port"
        std::string table;     // its name at the server
        std::string address;   // both, for messages
        std::optional<ClientKey> key;
    };
    explicit Session(Place place);
    ~Session();
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;

    // Of this life of the session. `generation` grows each time that it had to be made anew; 0: there is none yet.
    struct State {
        std::uint64_t generation = 0, number = 0;
        std::uint32_t table = 0;
    };
    State state() const;

    // Says HELLO and opens the table, unless another thread has done so since `seen`. `check` reads the answer to OPEN
    // and throws if the table is not the one that it was.
    void renew(Channel& channel, std::uint64_t seen, Deadline deadline);
    std::function<void(const json::Value& facts)> check;

    std::unique_ptr<Socket> connect() const { return std::make_unique<Socket>(context_, place_.endpoint, place_.key); }
    const std::string& address() const { return place_.address; }
    std::uint64_t message_bytes() const { return message_bytes_; }  // the largest that the server takes

    // Numbers of channels are not used twice.
    std::uint32_t new_channel() { return ++channels_; }
    void mark(std::uint32_t channel, std::uint64_t oldest);

    // Throws ErrorKind::closed after close(), and in a forked child.
    void check_open() const;
    bool is_closed() const { return is_closed_.load(std::memory_order_relaxed); }
    bool is_foreign() const;  // this is a forked child of the process that opened it
    void say_bye(Channel& channel);
    void close();  // waiting calls end with ErrorKind::closed

private:
    void beat();

    Place place_;
    std::uint64_t process_;
    std::string token_;
    std::shared_ptr<Context> context_;
    std::atomic<std::uint32_t> channels_{0};
    std::atomic<std::uint64_t> message_bytes_{~std::uint64_t{0}};
    std::atomic<bool> is_closed_{false};
    std::timed_mutex renewing_;
    mutable std::mutex mutex_;  // around what follows
    State state_;
    std::vector<ChannelMark> marks_;
    double beat_s_ = 1;
    std::condition_variable stopping_;
    std::thread beats_;
};

}  // namespace sharpwave::net
