// A channel: one socket and the numbered calls over it. The server executes them in order and each once; a reply that
// is lost is asked for again.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/wait.h"
#include "net/document.h"
#include "net/session.h"
#include "net/socket.h"
#include "wire/message.h"

namespace sharpwave::net {

struct Request {
    Verb verb;
    std::span<const std::byte> body = {};
    std::uint64_t argument = 0;
    std::uint32_t stream = 0;
};

struct Reply {
    Head head;
    Frame frame;
    std::span<const std::byte> body() const { return frame.body(); }
};

// How long the client waits for an answer beyond the time that the call may wait at the server.
inline constexpr double kAnswerGrace = 1.0;

// One thread at a time.
class Channel {
public:
    explicit Channel(Session& session);

    // Makes a call. Nothing: the session was made anew meanwhile, and the call has not been made in it; numbers that an
    // older session gave (of streams) have no meaning any more. A status other than OK is an Error of its kind. At the
    // deadline, with kAnswerGrace for the answer, ErrorKind::not_ready: the call is then *abandoned*, see settle().
    std::optional<Reply> call(const Request& request, Deadline deadline);

    // The same, made again until it is answered.
    Reply call_until_answered(const Request& request, Deadline deadline);
    Reply call_verb(std::string_view verb, std::string_view args, Deadline deadline);  // CALL

    // Learns what became of an abandoned call. Executed: its reply. Nothing: it was not executed and never will be, or
    // the session was made anew.
    bool has_abandoned() const { return is_abandoned_; }
    std::uint64_t generation() const { return state_.generation; }  // of the session that its numbers are of
    void give_up() { finish(); }  // an abandoned call: it is not executed if it has not begun, and has no reply
    std::optional<Reply> settle(Deadline deadline);

    // HELLO and BYE, which have no number: sent again until the deadline. Nothing: no answer.
    std::optional<Reply> ask(Head head, std::span<const std::byte> body, Deadline deadline);

    // For Session: the first call of a new life.
    Reply open_table(std::uint64_t session, std::span<const std::byte> body, Deadline deadline);

private:
    enum class Outcome { answered, session_lost, call_lost };
    Head head_of(const Request& request, Deadline deadline) const;
    void fill(const Head& head, std::span<const std::byte> body);
    void send(Deadline deadline);
    void probe();
    Outcome wait(Deadline deadline, Reply& reply);
    void enter(const Session::State& state);
    void finish();
    [[noreturn]] void refuse_silence() const;
    void check_status(const Reply& reply) const;

    Session& session_;
    std::unique_ptr<Socket> socket_;
    Session::State state_;  // in which the numbers below are
    std::uint32_t number_ = 0;
    std::uint64_t call_ = 1;  // of the next call, or of the one under way
    bool is_abandoned_ = false;
    std::vector<std::byte> frame_;  // of the call under way: it may have to be sent again
};

}  // namespace sharpwave::net
