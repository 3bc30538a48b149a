#include "net/session.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>

#include "base/error.h"
#include "base/process.h"
#include "net/channel.h"
#include "net/document.h"
#include "net/token.h"

namespace sharpwave::net {
namespace {

constexpr double kByeTimeout = 0.5;

}  // namespace

Session::Session(Place place)
    : place_(std::move(place)),
      process_(process_generation()),
      token_(random_token()),
      context_(std::make_shared<Context>()) {}

Session::~Session() {
    close();
    if (beats_.joinable()) beats_.join();
}

Session::State Session::state() const {
    const std::scoped_lock lock(mutex_);
    return state_;
}

void Session::check_open() const {
    if (is_foreign()) {
        throw Error(ErrorKind::closed, "'" + place_.address + "' was opened by the parent process; open it again here");
    }
    if (is_closed_.load(std::memory_order_relaxed)) throw Error(ErrorKind::closed, "the buffer is closed");
}

bool Session::is_foreign() const { return process_ != process_generation(); }

void Session::mark(std::uint32_t channel, std::uint64_t oldest) {
    const std::scoped_lock lock(mutex_);
    for (ChannelMark& mark : marks_) {
        if (mark.number == channel) {
            mark.oldest = oldest;
            return;
        }
    }
    marks_.push_back({channel, oldest});
}

void Session::renew(Channel& channel, std::uint64_t seen, Deadline deadline) {
    std::unique_lock lock(renewing_, std::defer_lock);
    while (!lock.try_lock_for(std::chrono::duration<double>(std::min(deadline.left_s(), kWaitSlice)))) {
        check_open();
        check_interrupt();
        if (deadline.is_over()) break;
    }
    const auto refuse = [&](const std::string& what) {
        throw Error(ErrorKind::not_ready,
                    "'" + place_.address + "': " + what + "; give a longer timeout_s, or look whether the server runs");
    };
    if (!lock.owns_lock()) refuse("another thread waits for the server");
    if (state().generation != seen) return;
    for (;;) {
        check_open();
        Head hello;
        hello.verb = Verb::hello;
        const std::vector<std::byte> greeting =
            write_document("{\"versions\": [1, 1], \"token\": \"" + token_ + "\", \"client\": \"C++\"}");
        // In slices, so that close() ends it.
        const std::optional<Reply> answer =
            channel.ask(hello, greeting, Deadline::in(std::min(deadline.left_s(), 1.0)));
        if (!answer) {
            if (deadline.is_over()) refuse("no server answers");
            continue;
        }
        const Document told(answer->body());
        const json::Value& facts = told.value();
        const double timeout_s = Document::number(facts.at("client_timeout", "HELLO"));
        const json::Value& limits = facts.at("limits", "HELLO");
        message_bytes_ = static_cast<std::uint64_t>(
            limits.at("message_bytes", "HELLO").whole("message_bytes", 1024, std::numeric_limits<std::int64_t>::max()));
        const std::vector<std::byte> name = write_document("{\"name\": " + json::quoted(place_.table) + "}");
        const Reply opened = channel.open_table(answer->head.session, name, deadline);
        const Document table(opened.body());
        if (check) check(table.value());
        const std::scoped_lock own(mutex_);
        state_ = {state_.generation + 1, answer->head.session,
                  static_cast<std::uint32_t>(table.value().at("table", "OPEN").whole("table", 0, 0xffffffff))};
        marks_.clear();
        beat_s_ = std::clamp(timeout_s / 5, 0.02, 60.0);
        if (!beats_.joinable()) beats_ = std::thread([this] { beat(); });
        return;
    }
}

void Session::beat() {
    const std::unique_ptr<Socket> socket = connect();
    const std::uint32_t number = new_channel();
    std::vector<std::byte> frame;
    std::unique_lock lock(mutex_);
    while (!is_closed_) {
        stopping_.wait_for(lock, std::chrono::duration<double>(beat_s_));
        if (is_closed_) return;
        Head head;
        head.verb = Verb::beat;
        head.session = state_.number;
        head.channel = number;
        frame.resize(sizeof head + 16 * marks_.size());
        std::memcpy(frame.data(), &head, sizeof head);
        for (std::size_t i = 0; i < marks_.size(); ++i) {
            const std::uint64_t pair[2] = {marks_[i].number, marks_[i].oldest};
            std::memcpy(frame.data() + sizeof head + 16 * i, pair, sizeof pair);
        }
        lock.unlock();
        socket->send(frame);
        // An answer says that the session is unknown. The next call gets the same answer and makes it anew.
        for (Frame answer; socket->receive(answer, 0);) {
        }
        lock.lock();
    }
}

void Session::say_bye(Channel& channel) {
    const State now = state();
    if (now.generation == 0) return;
    Head head;
    head.verb = Verb::bye;
    head.session = now.number;
    channel.ask(head, {}, Deadline::in(kByeTimeout));
}

void Session::close() {
    {
        const std::scoped_lock lock(mutex_);
        is_closed_ = true;
    }
    stopping_.notify_all();
}

}  // namespace sharpwave::net
