#include "net/channel.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/error.h"

namespace sharpwave::net {
namespace {

constexpr double kProbeAfter = 1.0;

const char* name_of(Verb verb) {
    switch (verb) {
        case Verb::add:
            return "add()";
        case Verb::sample:
            return "sample()";
        case Verb::update:
            return "update_priorities()";
        case Verb::call:
            return "the call";
        default:
            return "open()";
    }
}

std::string text_of(std::span<const std::byte> body) {
    return {reinterpret_cast<const char*>(body.data()), body.size()};
}

std::uint64_t microseconds(Deadline deadline) {
    return deadline.is_never() ? kForever : static_cast<std::uint64_t>(deadline.left_s() * 1e6);
}

Deadline with_grace(Deadline deadline) {
    return deadline.is_never() ? deadline : Deadline::in(deadline.left_s() + kAnswerGrace);
}

}  // namespace

Channel::Channel(Session& session) : session_(session), socket_(session.connect()) {}

void Channel::enter(const Session::State& state) {
    state_ = state;
    number_ = session_.new_channel();
    call_ = 1;
    is_abandoned_ = false;
}

void Channel::finish() {
    ++call_;
    is_abandoned_ = false;
    session_.mark(number_, call_);
}

Head Channel::head_of(const Request& request, Deadline deadline) const {
    Head head;
    head.verb = request.verb;
    head.table = state_.table;
    head.session = state_.number;
    head.channel = number_;
    head.stream = request.stream;
    head.call = head.oldest = call_;
    head.timeout = microseconds(deadline);
    head.argument = request.argument;
    return head;
}

void Channel::fill(const Head& head, std::span<const std::byte> body) {
    frame_.resize(sizeof head + body.size());
    std::memcpy(frame_.data(), &head, sizeof head);
    if (!body.empty()) std::memcpy(frame_.data() + sizeof head, body.data(), body.size());
}

void Channel::send(Deadline deadline) {
    while (!socket_->send(frame_)) {
        session_.check_open();
        check_interrupt();
        if (deadline.is_over()) {
            throw Error(ErrorKind::not_ready, "'" + session_.address() +
                                                  "': no connection to the server; give a longer "
                                                  "timeout_s, or look whether it runs");
        }
        socket_->is_connected(std::min(deadline.left_s(), kWaitSlice));
    }
}

void Channel::probe() {
    Head head;
    head.verb = Verb::probe;
    head.table = state_.table;
    head.session = state_.number;
    head.channel = number_;
    head.call = head.oldest = call_;
    socket_->send(std::as_bytes(std::span(&head, 1)));  // lost, or not sent: the next one asks again
}

// Waits for what becomes of the call under way.
Channel::Outcome Channel::wait(Deadline deadline, Reply& reply) {
    Deadline ask_at = Deadline::in(kProbeAfter);
    for (;;) {
        const double slice = std::min({deadline.left_s(), ask_at.left_s(), kWaitSlice});
        if (socket_->receive(reply.frame, slice)) {
            if (!read_head(reply.frame.bytes(), reply.head) || reply.head.channel != number_) continue;
            if (reply.head.status == Status::unknown_session) return Outcome::session_lost;
            if (reply.head.call != call_) continue;  // of a call that was given up
            if (reply.head.status == Status::unknown_call) return Outcome::call_lost;
            if (reply.head.status != Status::working) return Outcome::answered;
            ask_at = Deadline::in(kProbeAfter);
            continue;
        }
        session_.check_open();
        check_interrupt();
        if (deadline.is_over()) refuse_silence();
        if (ask_at.is_over()) {
            probe();
            ask_at = Deadline::in(kProbeAfter);
        }
    }
}

void Channel::refuse_silence() const {
    throw Error(ErrorKind::not_ready, "'" + session_.address() +
                                          "': the server has not answered in time; give a longer "
                                          "timeout_s, or look whether it runs");
}

void Channel::check_status(const Reply& reply) const {
    const auto fail = [&](ErrorKind kind, const std::string& before = "") {
        throw Error(kind, before + text_of(reply.body()));
    };
    const std::string where = std::string(name_of(reply.head.verb)) + ": '" + session_.address() + "': ";
    switch (reply.head.status) {
        case Status::ok:
            return;
        case Status::schema_error:
        case Status::type_error:
            return fail(ErrorKind::schema);
        case Status::not_ready:
            return fail(ErrorKind::not_ready);
        case Status::stale_handle:
            return fail(ErrorKind::stale_handle);
        case Status::closed_error:
            return fail(ErrorKind::closed);
        case Status::buffer_full:
            return fail(ErrorKind::buffer_full);
        case Status::busy:
            return fail(ErrorKind::not_ready, where + "the server is busy: ");
        case Status::forbidden:
            return fail(ErrorKind::storage, where + "the key does not allow it: ");
        case Status::bad_message:
        case Status::version:
            return fail(ErrorKind::storage, where + "the server does not speak this client's protocol: ");
        default:
            return fail(ErrorKind::storage);
    }
}

std::optional<Reply> Channel::call(const Request& request, Deadline deadline) {
    const Session::State now = session_.state();
    if (now.generation == 0 || now.generation != state_.generation) {
        if (now.generation == 0) session_.renew(*this, 0, deadline);
        const bool is_first = state_.generation == 0;
        if (session_.state().generation != state_.generation) enter(session_.state());
        // The caller's numbers may be those of an older session.
        if (!is_first || request.stream != 0) return std::nullopt;
    }
    fill(head_of(request, deadline), request.body);
    send(deadline);  // nothing has been sent where it throws
    is_abandoned_ = true;
    const Deadline patience = with_grace(deadline);
    Reply reply;
    for (;;) {
        const Outcome outcome = wait(patience, reply);
        if (outcome == Outcome::answered) break;
        if (outcome == Outcome::session_lost) {
            is_abandoned_ = false;
            session_.renew(*this, state_.generation, deadline);
            if (session_.state().generation != state_.generation) enter(session_.state());
            return std::nullopt;
        }
        send(patience);
    }
    finish();
    check_status(reply);
    return reply;
}

Reply Channel::call_until_answered(const Request& request, Deadline deadline) {
    for (;;) {
        if (std::optional<Reply> reply = call(request, deadline)) return *std::move(reply);
        session_.check_open();
    }
}

Reply Channel::call_verb(std::string_view verb, std::string_view args, Deadline deadline) {
    const std::vector<std::byte> body =
        write_document("{\"verb\": " + json::quoted(verb) + ", \"args\": " + std::string(args) + "}");
    return call_until_answered({Verb::call, body}, deadline);
}

std::optional<Reply> Channel::settle(Deadline deadline) {
    if (!is_abandoned_) return std::nullopt;
    probe();
    Reply reply;
    switch (wait(with_grace(deadline), reply)) {
        case Outcome::answered:
            finish();
            return reply;
        case Outcome::call_lost:  // the server has never seen its number: the next call has it
            is_abandoned_ = false;
            return std::nullopt;
        case Outcome::session_lost:
            is_abandoned_ = false;
            session_.renew(*this, state_.generation, deadline);
            if (session_.state().generation != state_.generation) enter(session_.state());
    }
    return std::nullopt;
}

std::optional<Reply> Channel::ask(Head head, std::span<const std::byte> body, Deadline deadline) {
    head.channel = session_.new_channel();
    fill(head, body);
    bool is_sent = false;
    Deadline again = Deadline::in(0);
    for (;;) {
        if (!is_sent || again.is_over()) {
            is_sent = socket_->send(frame_);
            again = Deadline::in(kProbeAfter);
        }
        const double slice = std::min(deadline.left_s(), kWaitSlice);
        Reply reply;
        if (!is_sent) {
            if (head.verb == Verb::bye) return std::nullopt;  // there is nobody to say it to
            socket_->is_connected(slice);
        } else if (socket_->receive(reply.frame, slice) && read_head(reply.frame.bytes(), reply.head) &&
                   reply.head.channel == head.channel && reply.head.call == 0) {
            check_status(reply);
            return reply;
        }
        check_interrupt();
        if (deadline.is_over()) return std::nullopt;
    }
}

Reply Channel::open_table(std::uint64_t session, std::span<const std::byte> body, Deadline deadline) {
    enter({0, session, 0});
    fill(head_of({Verb::open}, deadline), body);
    send(deadline);
    Reply reply;
    const Deadline patience = with_grace(deadline);
    for (Outcome outcome; (outcome = wait(patience, reply)) != Outcome::answered;) {
        if (outcome == Outcome::session_lost) {
            throw Error(ErrorKind::not_ready, "open(): '" + session_.address() + "': the server was started again");
        }
        send(patience);
    }
    finish();
    check_status(reply);
    return reply;
}

}  // namespace sharpwave::net
