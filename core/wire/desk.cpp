#include "wire/desk.h"

#include <sys/stat.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace sharpwave::wire {

double monotonic_now() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

namespace {

// Replies of one client, also of those that only say BUSY: a client that never takes one does not fill the memory.
constexpr std::uint64_t kMostKept = 1 << 16;

bool is_numbered(Verb verb) {
    switch (verb) {
        case Verb::open:
        case Verb::call:
        case Verb::add:
        case Verb::sample:
        case Verb::update:
        case Verb::settle:
        case Verb::tables:
            return true;
        default:
            return false;
    }
}

Head reply_head(const Client& client, const Head& request, std::uint64_t argument) {
    Head head;
    head.version = client.version;
    head.verb = request.verb;
    head.table = request.table;
    head.session = request.session;
    head.channel = request.channel;
    head.stream = request.stream;
    head.call = request.call;
    head.argument = argument;
    return head;
}

// The place of a call's reply: its own, or that of the next one.
auto place_of(Line& line, std::uint64_t call) {
    return std::lower_bound(line.replies.begin(), line.replies.end(), call,
                            [](const auto& reply, std::uint64_t number) { return reply.first < number; });
}

std::uint64_t nanoseconds(const timespec& time) {
    return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(time.tv_nsec);
}

}  // namespace

const char* Desk::reason_name(int reason) {
    static constexpr const char* kNames[kReasons] = {"frames", "short",        "magic",       "session of another key",
                                                     "beat",   "out of order", "bad message", "unsent"};
    return kNames[reason];
}

// ---- messages -------------------------------------------------------------------------------------------------------

Event Desk::serve(double look_s, double timeout) {
    for (;;) {
        const bool is_idle = !frame_ && !receive();
        const double now = is_idle ? monotonic_now() : came_;
        if (is_idle || now >= looked_ + look_s) {
            const double late = now - looked_ - look_s;
            if (looked_ > 0 && late > timeout / 2) excuse(now, late);
            looked_ = now;
            if (are_keys_old() || has_to_part(now, timeout)) return {};  // a message that has come is handled next
        }
        if (!frame_) continue;  // none came, or it was dropped
        try {
            Event event;
            if (handle(event)) return event;
        } catch (...) {  // no memory: this message is lost, as if the network had lost it
            frame_.reset();
            throw;
        }
        frame_.reset();
    }
}

// False: nothing came in time. True without a frame: what came is no message of the protocol.
bool Desk::receive() {
    Message who(zmq_);
    auto frame = std::make_shared<Message>(zmq_);
    for (Message* part : {&who, frame.get()}) {
        while (!part->receive(socket_, 0)) {
            const int error = zmq_.error();
            if (error == EAGAIN) return false;
            if (error != EINTR) throw Error(ErrorKind::storage, "serve(): the server's socket failed");
        }
    }
    came_ = monotonic_now();
    if (frame->has_more()) {  // more frames than the protocol has
        Message rest(zmq_);
        while (rest.receive(socket_, 0) && rest.has_more()) {
        }
        return count(kFrames), true;
    }
    who_.assign(reinterpret_cast<const char*>(who.data()), who.size());
    frame_ = std::move(frame);
    return true;
}

bool Desk::hand_over(Event& event, Event::Kind kind, const Head& head) {
    event.kind = kind;
    event.who = who_;
    event.head = head;
    event.came = came_;
    event.frame = kind == Event::Kind::given_up || kind == Event::Kind::keys ? frame_ : std::move(frame_);
    return true;
}

// True: the event is to be handed over. A message behind a given_up or keys event is handled again afterwards.
bool Desk::handle(Event& event) {
    const std::span<const std::byte> bytes = frame_->bytes();
    Head head;
    if (bytes.empty()) return hand_over(event, Event::Kind::bell, head);
    if (bytes.size() < sizeof head) return count(kShort), false;
    if (!read_head(bytes, head)) return count(kMagic), false;
    if (head.verb == Verb::hello) return hand_over(event, Event::Kind::hello, head);
    if (are_keys_old()) return hand_over(event, Event::Kind::keys, head);
    Client* client = find(head.session);
    if (!client) return reply_bare(who_, head, Status::unknown_session, ""), false;
    if (!keys_path_.empty()) {
        const char* user = frame_->property("User-Id");
        if (client->user != (user ? user : "")) {
            count(kForeign);
            return reply_bare(who_, head, Status::unknown_session, ""), false;
        }
        if (client->is_barred) return hand_over(event, Event::Kind::barred, head);
    }
    client->seen.store(came_, std::memory_order_relaxed);
    if (head.verb == Verb::beat) return hear_beat(*client, event);
    if (head.verb == Verb::bye) return hand_over(event, Event::Kind::bye, head);
    auto found = client->lines.find(head.channel);
    if (found == client->lines.end()) {
        if (client->lines.size() >= limits_.channels) {
            const std::string text = "at most " + std::to_string(limits_.channels) + " channels a client";
            return reply_bare(who_, head, Status::busy, text), false;
        }
        found = client->lines.try_emplace(head.channel).first;
    }
    Line& line = found->second;
    if (line.who != who_) line.who = who_;
    if (head.oldest > line.oldest && forget(*client, line, head.oldest)) {
        return hand_over(event, Event::Kind::given_up, head);
    }
    return take_call(*client, line, head, event);
}

bool Desk::take_call(Client& client, Line& line, const Head& head, Event& event) {
    if (head.verb == Verb::probe) return answer_probe(line, head), false;
    if (!is_numbered(head.verb) || head.version != client.version) {
        count(kBad);
        reply_bare(who_, head, Status::bad_message,
                   "verb " + std::to_string(static_cast<int>(head.verb)) + " of version " +
                       std::to_string(head.version) + " is not known");
        return hand_over(event, Event::Kind::broken, head);
    }
    if (head.call < line.expected) return answer_probe(line, head), false;  // it came before
    if (head.call > line.expected) return count(kOrder), false;             // the client sends again from the lost one
    if (client.kept >= kMostKept) {
        count(kBad);
        reply_bare(who_, head, Status::bad_message,
                   "the replies of " + std::to_string(client.kept) + " calls were not taken");
        return hand_over(event, Event::Kind::broken, head);
    }
    ++line.expected;
    try {
        return begin_call(client, line, head, event);
    } catch (...) {  // no memory: the client sends it again, unless its reply is kept
        const auto found = place_of(line, head.call);
        if (found == line.replies.end() || found->first != head.call) --line.expected;
        throw;
    }
}

// The next call of its line.
bool Desk::begin_call(Client& client, Line& line, const Head& head, Event& event) {
    if (client.open_calls >= limits_.calls) {
        return refuse_busy(client, line, head, "at most " + std::to_string(limits_.calls) + " open calls"), false;
    }
    if (client.kept_bytes >= limits_.kept_bytes) {
        const std::string text = "the client has not taken replies of " + std::to_string(client.kept_bytes) +
                                 " bytes, limits['kept_bytes']=" + std::to_string(limits_.kept_bytes);
        return refuse_busy(client, line, head, text), false;
    }
    if (waiting_bytes > 0 && waiting_bytes + frame_->size() > limits_.waiting_bytes) {
        const std::string text = "calls of " + std::to_string(waiting_bytes) +
                                 " bytes wait, limits['waiting_bytes']=" + std::to_string(limits_.waiting_bytes);
        return refuse_busy(client, line, head, text), false;
    }
    if (!line.held && try_at_once(client, line, head)) return false;
    hand_over(event, Event::Kind::call, head);
    client.open_calls.fetch_add(1, std::memory_order_relaxed);
    return true;
}

bool Desk::try_at_once(Client& client, Line& line, const Head& head) {
    const std::span<const std::byte> body = frame_->bytes().subspan(sizeof head);
    std::optional<Message> message;
    if (head.verb == Verb::sample) {
        const bool is_plain = body.empty() && (head.flags & ~kSampleTellsOdds) == 0 && (client.roles & kRead);
        const auto table = tables_.find(head.table);
        if (!is_plain || table == tables_.end()) return false;
        const std::shared_ptr<Memory> memory =
            table->second->sample(head.argument, head.flags & kSampleTellsOdds, limits_.message_bytes);
        if (!memory) return false;
        message.emplace(zmq_, memory, memory->size());
        const Head answer = reply_head(client, head, head.argument);
        std::memcpy(memory->data(), &answer, sizeof answer);
    } else if (head.verb == Verb::add) {
        const auto stream = client.streams.find(stream_key(head.table, head.stream));
        if (head.flags || !(client.roles & kWrite) || stream == client.streams.end()) return false;
        std::uint64_t accepted;
        if (!stream->second->add(body, head.argument, accepted)) return false;
        message.emplace(zmq_, sizeof head);
        const Head answer = reply_head(client, head, accepted);
        std::memcpy(message->data(), &answer, sizeof answer);
    } else {
        return false;
    }
    const std::uint64_t bytes_out = message->size();
    keep(client, line, head.call, *std::move(message));
    client.times(static_cast<std::uint16_t>(head.verb)).note(monotonic_now() - came_, body.size(), bytes_out);
    return true;
}

bool Desk::hear_beat(Client& client, Event& event) {
    const std::span<const std::byte> body = frame_->bytes().subspan(sizeof(Head));
    if (body.size() % 16) return count(kBeat), false;
    for (std::size_t at = 0; at < body.size(); at += 16) {
        std::uint64_t pair[2];
        std::memcpy(pair, body.data() + at, sizeof pair);
        const auto found = client.lines.find(static_cast<std::uint32_t>(pair[0]));
        if (found == client.lines.end() || pair[0] >> 32 || pair[1] <= found->second.oldest) continue;
        if (forget(client, found->second, pair[1])) {
            Head head;
            head.session = client.session;
            head.channel = found->first;
            return hand_over(event, Event::Kind::given_up, head);
        }
    }
    return false;
}

// Whether the client has given up the call that holds the line: else the calls behind it would wait for ever.
bool Desk::forget(Client& client, Line& line, std::uint64_t oldest) {
    line.oldest = oldest;
    line.expected = std::max(line.expected, oldest);  // calls that never came were given up
    while (!line.replies.empty() && line.replies.front().first < oldest) {
        client.kept_bytes.fetch_sub(line.replies.front().second.size(), std::memory_order_relaxed);
        line.replies.pop_front();
        --client.kept;
    }
    return line.held && line.held < oldest;
}

void Desk::answer_probe(Line& line, const Head& head) {
    const auto found = place_of(line, head.call);
    if (found != line.replies.end() && found->first == head.call) {
        send(line.who, found->second);
    } else if (head.call >= line.expected) {
        reply_bare(line.who, head, Status::unknown_call, "");
    } else if (head.call >= line.oldest) {
        reply_bare(line.who, head, Status::working, "");
    }
}

// ---- replies --------------------------------------------------------------------------------------------------------

Message Desk::make(Head head, Status status, std::string_view text) {
    head.status = status;
    head.flags = 0;
    head.oldest = head.timeout = head.argument = 0;
    Message message(zmq_, sizeof head + text.size());
    std::memcpy(message.data(), &head, sizeof head);
    if (!text.empty()) std::memcpy(message.data() + sizeof head, text.data(), text.size());
    return message;
}

void Desk::refuse_busy(Client& client, Line& line, const Head& head, const std::string& text) {
    keep(client, line, head.call, make(reply_head(client, head, 0), Status::busy, text));
}

void Desk::keep(Client& client, Line& line, std::uint64_t call, Message message) {
    if (call < line.oldest) return;
    // Mostly at the end: calls of a line end in their order, but for those refused while one before them waits.
    line.replies.emplace(place_of(line, call), call, message);
    ++client.kept;
    client.kept_bytes.fetch_add(message.size(), std::memory_order_relaxed);
    send(line.who, std::move(message));
}

void Desk::reply(Head head, Message message, double came, std::uint64_t bytes_in) {
    Client* client = find(head.session);
    if (!client) return;
    const Status status = head.status;
    const std::uint64_t bytes_out = message.size();
    head = reply_head(*client, head, head.argument);
    head.status = status;
    std::memcpy(message.data(), &head, sizeof head);
    client->open_calls.fetch_sub(1, std::memory_order_relaxed);
    client->times(static_cast<std::uint16_t>(head.verb)).note(monotonic_now() - came, bytes_in, bytes_out);
    keep(*client, client->lines[head.channel], head.call, std::move(message));
}

void Desk::reply_bare(const std::string& who, Head head, Status status, std::string_view text) {
    send(who, make(head, status, text));
}

void Desk::introduce(const std::string& who, const Head& head, std::span<const std::byte> body) {
    Message message(zmq_, body.size());
    std::memcpy(message.data(), body.data(), body.size());
    std::memcpy(message.data(), &head, sizeof head);
    send(who, std::move(message));
}

// A reply that finds no room is dropped: it is kept, and the client asks for it.
void Desk::send(const std::string& who, Message message) {
    Message to(zmq_, who.size());
    std::memcpy(to.data(), who.data(), who.size());
    if (!to.send(socket_, kDontWait | kSendMore) || !message.send(socket_, kDontWait)) count(kUnsent);
}

// ---- clients --------------------------------------------------------------------------------------------------------

Client& Desk::admit(std::uint64_t session, std::string user, std::uint16_t version, std::uint8_t roles) {
    auto& place = clients_[session];
    place = std::make_unique<Client>();
    place->session = session;
    place->user = std::move(user);
    place->version = version;
    place->roles = roles;
    place->seen = monotonic_now();
    return *place;
}

void Desk::part(std::uint64_t session) { clients_.erase(session); }

Client* Desk::find(std::uint64_t session) {
    const auto found = clients_.find(session);
    return found == clients_.end() ? nullptr : found->second.get();
}

// This process was stopped, or another thread had the interpreter: what clients sent meanwhile has not been read yet. A
// server that is late each time still finds its dead clients: each look takes `look_s` from what they have left.
void Desk::excuse(double now, double late) {
    for (const auto& [session, client] : clients_) client->seen = std::min(now, client->seen.load() + late);
}

// Barred clients count as long as they are there: their key was revoked, or the list is to be read once more.
bool Desk::has_to_part(double now, double timeout) const {
    return std::any_of(clients_.begin(), clients_.end(), [&](const auto& entry) {
        const Client& client = *entry.second;
        return client.is_barred || now - client.seen.load(std::memory_order_relaxed) > timeout;
    });
}

void Desk::hold(std::uint64_t session, std::uint32_t channel, std::uint64_t call) {
    if (Client* client = find(session)) client->lines[channel].held = call;
}

std::uint64_t Desk::oldest(std::uint64_t session, std::uint32_t channel) {
    Client* client = find(session);
    return client ? client->lines[channel].oldest : 0;
}

void Desk::drop_call(std::uint64_t session) {
    if (Client* client = find(session)) client->open_calls.fetch_sub(1, std::memory_order_relaxed);
}

void Desk::watch(std::string path, const FileState& state) {
    keys_path_ = std::move(path);
    keys_state_ = state;
}

bool Desk::are_keys_old() const {
    if (keys_path_.empty()) return false;
    struct stat found{};
    FileState now;
    if (lstat(keys_path_.c_str(), &found) == 0) {
#if defined(__APPLE__)
        const timespec modified = found.st_mtimespec, changed = found.st_ctimespec;
#else
        const timespec modified = found.st_mtim, changed = found.st_ctim;
#endif
        now = {found.st_dev, found.st_ino, static_cast<std::uint64_t>(found.st_size), nanoseconds(modified),
               nanoseconds(changed)};
    }
    return now != keys_state_;
}

}  // namespace sharpwave::wire
