// The desk of a server: takes every message, answers at once what can be answered at once, and hands the rest over.
//
// It knows sessions, the numbers of calls, and the replies that clients have not taken yet. SAMPLE and ADD are answered
// here where no call has to wait, without the interpreter: a server in a process that trains answers as fast as one
// that does nothing else. What the desk cannot do, or what is wrong, goes the long way, which has the words for it.
//
// One thread serves. Clients are admitted and parted by that thread while it has the interpreter, so that others that
// have the interpreter may read what a client is known by.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "wire/client.h"
#include "wire/message.h"
#include "wire/zmq.h"

namespace sharpwave::wire {

// A table of the server.
class Table {
public:
    virtual ~Table() = default;
    // The body of a reply to SAMPLE behind the space of a head. Null: it would have to wait, or something is wrong.
    virtual std::shared_ptr<Memory> sample(std::uint64_t count, bool tells_odds, std::uint64_t most_bytes) noexcept = 0;
};

struct DeskLimits {
    std::uint64_t message_bytes, calls, kept_bytes, channels, waiting_bytes;
};

// What the desk hands over.
struct Event {
    enum class Kind {
        quiet,     // no message: a client is dead or barred, or the list of keys has changed
        bell,      // another thread rang
        hello,     // a client introduces itself
        bye,       // and takes its leave
        call,      // a call to be executed; where its line is held, after the call that holds it
        barred,    // any message of a client whose key is not known (any more)
        given_up,  // the client wants no answer of the call that holds a line
        broken,    // a client that breaks the protocol: it was told so
        keys,      // the list of keys has changed
    };
    Kind kind = Kind::quiet;
    std::string who;
    Head head;
    std::shared_ptr<Message> frame;
    double came = 0;

    std::span<const std::byte> body() const { return frame->bytes().subspan(sizeof(Head)); }
};

class Desk {
public:
    // `zmq` must outlive the desk and every event. `socket`: a bound ROUTER, used by the thread that serves. Its
    // receive timeout bounds a wait.
    Desk(const Zmq& zmq, void* socket, const DeskLimits& limits) : zmq_(zmq), socket_(socket), limits_(limits) {}

    // Answers until something comes that it cannot answer. Every `look_s` seconds, and whenever the socket's receive
    // timeout passes without a message, it looks after its clients: `quiet` comes only if one of them was silent for
    // longer than `timeout` seconds or is barred, or if the list of keys has changed. Otherwise it serves on: a return
    // needs the interpreter, and while another thread has that no client would be answered. Time in which the desk did
    // not read is no silence of its clients.
    Event serve(double look_s, double timeout);

    // ---- what the long way tells the desk; all by the thread that serves ----

    void host(std::uint32_t number, std::shared_ptr<Table> table) { tables_[number] = std::move(table); }
    Client& admit(std::uint64_t session, std::string user, std::uint16_t version, std::uint8_t roles);
    void part(std::uint64_t session);
    Client* find(std::uint64_t session);
    const std::unordered_map<std::uint64_t, std::unique_ptr<Client>>& clients() const { return clients_; }

    // The list of keys: its file, and what the file looked like when the roles of all clients were read.
    struct FileState {
        std::uint64_t device = 0, inode = 0, bytes = 0, modified_ns = 0, changed_ns = 0;
        bool operator==(const FileState&) const = default;
    };
    void watch(std::string path, const FileState& state);

    // A call waits elsewhere: those behind it are handed over.
    void hold(std::uint64_t session, std::uint32_t channel, std::uint64_t call);
    void release(std::uint64_t session, std::uint32_t channel) { hold(session, channel, 0); }
    std::uint64_t oldest(std::uint64_t session, std::uint32_t channel);

    // The reply to a call that was handed over; `message` begins with the space of a head. Of a client that is gone it
    // does nothing.
    void reply(Head head, Message message, double came, std::uint64_t bytes_in);
    // The answer to HELLO; `body` has the space of a head.
    void introduce(const std::string& who, const Head& head, std::span<const std::byte> body);
    // A reply that belongs to no call, and is not kept.
    void reply_bare(const std::string& who, Head head, Status status, std::string_view text);
    // A call of which nothing remains: its client gave it up before it began.
    void drop_call(std::uint64_t session);

    std::uint64_t waiting_bytes = 0;  // of calls that wait elsewhere

    // Messages that were refused, by reason. Other threads may read it.
    enum Reason { kFrames, kShort, kMagic, kForeign, kBeat, kOrder, kBad, kUnsent, kReasons };
    static const char* reason_name(int reason);
    std::uint64_t refused(int reason) const { return refused_[reason].load(std::memory_order_relaxed); }

    const Zmq& zmq() const { return zmq_; }

private:
    bool receive();
    bool handle(Event& event);
    bool take_call(Client& client, Line& line, const Head& head, Event& event);
    bool begin_call(Client& client, Line& line, const Head& head, Event& event);
    bool try_at_once(Client& client, Line& line, const Head& head);
    bool hear_beat(Client& client, Event& event);
    bool forget(Client& client, Line& line, std::uint64_t oldest);
    void answer_probe(Line& line, const Head& head);
    void refuse_busy(Client& client, Line& line, const Head& head, const std::string& text);
    void keep(Client& client, Line& line, std::uint64_t call, Message message);
    bool hand_over(Event& event, Event::Kind kind, const Head& head);
    bool are_keys_old() const;
    bool has_to_part(double now, double timeout) const;
    void excuse(double now, double late);
    void send(const std::string& who, Message message);
    Message make(Head head, Status status, std::string_view text);
    void count(Reason reason) { refused_[reason].fetch_add(1, std::memory_order_relaxed); }

    const Zmq& zmq_;
    void* const socket_;
    const DeskLimits limits_;
    std::unordered_map<std::uint64_t, std::unique_ptr<Client>> clients_;
    std::unordered_map<std::uint32_t, std::shared_ptr<Table>> tables_;
    std::string keys_path_;  // empty: without keys
    FileState keys_state_;
    std::string who_;                 // of the message that is being handled
    std::shared_ptr<Message> frame_;  // null: the next one is to be received
    double came_ = 0;
    double looked_ = 0;  // when it last looked after its clients
    std::atomic<std::uint64_t> refused_[kReasons] = {};
};

double monotonic_now();

}  // namespace sharpwave::wire
