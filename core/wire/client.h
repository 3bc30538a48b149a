// What a server knows of a client, as far as every message needs it.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "wire/message.h"
#include "wire/zmq.h"

namespace sharpwave::wire {

enum Role : std::uint8_t { kRead = 1, kWrite = 2, kAdmin = 4 };

// A stream of rows of a client into a table.
class Stream {
public:
    virtual ~Stream() = default;
    // Adds rows of a body, each once; see Writer::append_once(). False: it would have to wait, or something is wrong
    // with them. Then nothing was added.
    virtual bool add(std::span<const std::byte> body, std::uint64_t first_row, std::uint64_t& accepted) noexcept = 0;
};

// How often a verb was called, with how many bytes, and how long the newest calls took. Other threads may read it.
class VerbTimes {
public:
    void note(double seconds, std::uint64_t in, std::uint64_t out) {
        const std::uint64_t number = count.load(std::memory_order_relaxed);
        newest[number % kNewest].store(static_cast<float>(seconds), std::memory_order_relaxed);
        count.store(number + 1, std::memory_order_relaxed);
        bytes_in.fetch_add(in, std::memory_order_relaxed);
        bytes_out.fetch_add(out, std::memory_order_relaxed);
    }
    static constexpr std::size_t kNewest = 512;
    std::atomic<std::uint64_t> count{0}, bytes_in{0}, bytes_out{0};
    std::atomic<float> newest[kNewest] = {};
};

// A channel: calls come in order, are executed one after the other, and replies are kept until they have arrived.
struct Line {
    std::string who;             // the connection of the last message: replies go there
    std::uint64_t expected = 1;  // the next call's number
    std::uint64_t oldest = 1;    // the least call whose reply is wanted
    std::uint64_t held = 0;      // the call that waits elsewhere; those behind it wait there, too. 0: none
    std::deque<std::pair<std::uint64_t, Message>> replies;  // by call
};

struct Client {
    std::uint64_t session = 0;
    std::string user;  // the public key that it has proved; empty without keys
    std::uint16_t version = 0;
    std::uint8_t roles = 0;
    bool is_barred = false;  // its key is not known (any more): others decide what it is told
    std::unordered_map<std::uint32_t, Line> lines;
    std::unordered_map<std::uint64_t, std::shared_ptr<Stream>> streams;  // by table and number
    std::uint64_t kept = 0;                                              // replies of all lines
    std::atomic<double> seen{0};
    std::atomic<std::uint64_t> open_calls{0};  // without a reply
    std::atomic<std::uint64_t> kept_bytes{0};  // of replies

    Client() = default;
    ~Client() {
        for (const auto& one : times_) delete one.load(std::memory_order_relaxed);
    }
    Client(const Client&) = delete;
    Client& operator=(const Client&) = delete;

    // Of a verb that was called. Only the server's thread makes one.
    VerbTimes& times(std::uint16_t verb) {
        VerbTimes* found = times_[verb].load(std::memory_order_relaxed);
        if (!found) {
            found = new VerbTimes;
            times_[verb].store(found, std::memory_order_release);
        }
        return *found;
    }
    const VerbTimes* find_times(std::uint16_t verb) const { return times_[verb].load(std::memory_order_acquire); }

private:
    std::atomic<VerbTimes*> times_[kVerbs] = {};
};

inline std::uint64_t stream_key(std::uint32_t table, std::uint32_t stream) {
    return (static_cast<std::uint64_t>(table) << 32) | stream;
}

}  // namespace sharpwave::wire
