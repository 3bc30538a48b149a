// The desk of a server: numbers of calls, replies that are kept, limits, and what it hands over.
#ifdef SHARPWAVE_HAS_NET

#include <gtest/gtest.h>
#include <zmq.h>

#include <unistd.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "wire/desk.h"

// Of its own: in a unity build other files have classes of the same names.
namespace desk_test {

namespace wire = sharpwave::wire;
using wire::Event;
using wire::Head;
using wire::Status;
using wire::Verb;

constexpr double kNever = std::numeric_limits<double>::infinity();

template <class To, class From>
To as(From function) {
    To to;
    static_assert(sizeof to == sizeof function);
    std::memcpy(&to, &function, sizeof to);
    return to;
}

wire::Zmq functions() {
    wire::Zmq zmq;
    zmq.msg_init = as<decltype(zmq.msg_init)>(&zmq_msg_init);
    zmq.msg_init_size = as<decltype(zmq.msg_init_size)>(&zmq_msg_init_size);
    zmq.msg_init_data = as<decltype(zmq.msg_init_data)>(&zmq_msg_init_data);
    zmq.msg_close = as<decltype(zmq.msg_close)>(&zmq_msg_close);
    zmq.msg_copy = as<decltype(zmq.msg_copy)>(&zmq_msg_copy);
    zmq.msg_move = as<decltype(zmq.msg_move)>(&zmq_msg_move);
    zmq.msg_data = as<decltype(zmq.msg_data)>(&zmq_msg_data);
    zmq.msg_size = as<decltype(zmq.msg_size)>(&zmq_msg_size);
    zmq.msg_more = as<decltype(zmq.msg_more)>(&zmq_msg_more);
    zmq.msg_gets = as<decltype(zmq.msg_gets)>(&zmq_msg_gets);
    zmq.msg_recv = as<decltype(zmq.msg_recv)>(&zmq_msg_recv);
    zmq.msg_send = as<decltype(zmq.msg_send)>(&zmq_msg_send);
    zmq.error = as<decltype(zmq.error)>(&zmq_errno);
    return zmq;
}

// Batches of bytes that count the draws; it refuses sizes of 100 and more.
class Draws : public wire::Table {
public:
    std::shared_ptr<wire::Memory> sample(std::uint64_t count, bool, std::uint64_t) noexcept override {
        if (count >= 100) return nullptr;
        auto memory = std::make_shared<wire::Memory>(sizeof(Head) + count);
        std::memset(memory->data() + sizeof(Head), ++drawn, count);
        return memory;
    }
    int drawn = 0;
};

// Takes rows of one byte, and none while it is closed.
class Rows : public wire::Stream {
public:
    bool add(std::span<const std::byte> body, std::uint64_t first_row, std::uint64_t& accepted) noexcept override {
        if (is_closed) return false;
        taken = first_row + body.size();
        accepted = taken;
        return true;
    }
    bool is_closed = false;
    std::uint64_t taken = 0;
};

struct Answer {
    Head head;
    std::string body;
};

class DeskTest : public testing::Test {
protected:
    static constexpr std::uint64_t kSession = 7, kSilent = 9;

    DeskTest() : zmq_(functions()) {
        context_ = zmq_ctx_new();
        router_ = zmq_socket(context_, ZMQ_ROUTER);
        dealer_ = zmq_socket(context_, ZMQ_DEALER);
        const int soon = 20, none = 0;
        for (void* socket : {router_, dealer_}) {
            zmq_setsockopt(socket, ZMQ_RCVTIMEO, &soon, sizeof soon);
            zmq_setsockopt(socket, ZMQ_LINGER, &none, sizeof none);
        }
        EXPECT_EQ(zmq_bind(router_, "inproc://desk"), 0);
        EXPECT_EQ(zmq_connect(dealer_, "inproc://desk"), 0);
        desk_ = std::make_unique<wire::Desk>(zmq_, router_, wire::DeskLimits{1 << 20, 4, 1000, 2, 1000});
        desk_->host(1, draws_);
        desk_->admit(kSession, "", 1, wire::kRead | wire::kWrite).streams[wire::stream_key(1, 3)] = rows_;
        // It sends nothing: to a server with a timeout of less than its silence every look around tells of it.
        desk_->admit(kSilent, "", 1, 0);
    }
    ~DeskTest() override {
        desk_.reset();
        zmq_close(dealer_);
        zmq_close(router_);
        zmq_ctx_term(context_);
    }

    static Head head(Verb verb, std::uint64_t call, std::uint64_t argument = 0, std::uint64_t oldest = 0) {
        Head head;
        head.verb = verb;
        head.table = 1;
        head.session = kSession;
        head.channel = 5;
        head.stream = 3;
        head.call = call;
        head.oldest = oldest ? oldest : call;
        head.argument = argument;
        return head;
    }
    void send(const Head& head, const std::string& body = "") {
        std::string frame(reinterpret_cast<const char*>(&head), sizeof head);
        frame += body;
        ASSERT_GE(zmq_send(dealer_, frame.data(), frame.size(), 0), 0);
    }
    // What the desk hands over, or `quiet` once everything that was sent is handled: it looks around only then.
    Event serve() { return desk_->serve(kNever, -1); }
    // What it hands over before this message, which ends the wait.
    Event serve_until_bell(double look_s, double timeout) {
        EXPECT_EQ(zmq_send(dealer_, "", 0, 0), 0);
        return desk_->serve(look_s, timeout);
    }
    std::optional<Answer> answer() {
        char frame[1000];
        const int size = zmq_recv(dealer_, frame, sizeof frame, 0);
        if (size < 0) return std::nullopt;
        EXPECT_GE(size, 64);
        Answer found;
        std::memcpy(&found.head, frame, sizeof found.head);
        found.body.assign(frame + 64, frame + size);
        return found;
    }
    Answer ask(const Head& head, const std::string& body = "") {
        send(head, body);
        EXPECT_EQ(serve().kind, Event::Kind::quiet);
        const std::optional<Answer> found = answer();
        EXPECT_TRUE(found);
        return found.value_or(Answer{});
    }

    wire::Zmq zmq_;
    void *context_, *router_, *dealer_;
    std::shared_ptr<Draws> draws_ = std::make_shared<Draws>();
    std::shared_ptr<Rows> rows_ = std::make_shared<Rows>();
    std::unique_ptr<wire::Desk> desk_;
};

TEST_F(DeskTest, BatchesAndRowsAreAnsweredAtOnce) {
    const Answer batch = ask(head(Verb::sample, 1, 3));
    EXPECT_EQ(batch.head.status, Status::ok);
    EXPECT_EQ(batch.head.argument, 3u);
    EXPECT_EQ(batch.body, "\1\1\1");
    const Answer added = ask(head(Verb::add, 2, 10), "ab");
    EXPECT_EQ(added.head.argument, 12u);
    EXPECT_EQ(rows_->taken, 12u);
    EXPECT_EQ(desk_->find(kSession)->find_times(static_cast<std::uint16_t>(Verb::add))->count, 1u);
}

TEST_F(DeskTest, ARequestThatComesAgainGetsTheSameReply) {
    EXPECT_EQ(ask(head(Verb::sample, 1, 2)).body, "\1\1");
    EXPECT_EQ(ask(head(Verb::sample, 1, 2)).body, "\1\1");
    EXPECT_EQ(ask(head(Verb::probe, 1)).body, "\1\1");
    EXPECT_EQ(draws_->drawn, 1);
    EXPECT_EQ(ask(head(Verb::sample, 2, 2)).body, "\2\2");
    send(head(Verb::sample, 1, 2, 1));  // its client had moved on: the reply is forgotten
    EXPECT_EQ(serve().kind, Event::Kind::quiet);
    EXPECT_FALSE(answer());
    EXPECT_EQ(desk_->find(kSession)->kept_bytes, 66u);
}

TEST_F(DeskTest, ACallThatWasLostIsWaitedFor) {
    send(head(Verb::sample, 2, 1, 1));
    EXPECT_EQ(serve().kind, Event::Kind::quiet);
    EXPECT_FALSE(answer());
    EXPECT_EQ(desk_->refused(wire::Desk::kOrder), 1u);
    EXPECT_EQ(ask(head(Verb::probe, 2, 0, 1)).head.status, Status::unknown_call);
    EXPECT_EQ(ask(head(Verb::sample, 1, 1)).head.status, Status::ok);
    EXPECT_EQ(ask(head(Verb::sample, 2, 1)).head.status, Status::ok);
}

TEST_F(DeskTest, WhatCannotBeDoneAtOnceIsHandedOverAndHoldsItsLine) {
    rows_->is_closed = true;
    send(head(Verb::add, 1, 0), "a");
    const Event waits = serve();
    ASSERT_EQ(waits.kind, Event::Kind::call);
    EXPECT_EQ(waits.body().size(), 1u);
    desk_->hold(kSession, 5, 1);
    EXPECT_EQ(ask(head(Verb::probe, 1)).head.status, Status::working);
    send(head(Verb::sample, 2, 1, 1));
    EXPECT_EQ(serve().kind, Event::Kind::call) << "a call behind one that waits";
    desk_->release(kSession, 5);
    Head done = waits.head;
    done.argument = 1;
    desk_->reply(done, wire::Message(zmq_, sizeof(Head)), waits.came, 1);
    EXPECT_EQ(answer()->head.call, 1u);
    EXPECT_EQ(desk_->find(kSession)->open_calls, 1u);
}

TEST_F(DeskTest, ACallThatHoldsItsLineAndIsGivenUpIsToldOf) {
    send(head(Verb::call, 1));
    EXPECT_EQ(serve().kind, Event::Kind::call);
    desk_->hold(kSession, 5, 1);
    send(head(Verb::sample, 2, 1));
    const Event given_up = serve();
    EXPECT_EQ(given_up.kind, Event::Kind::given_up);
    EXPECT_EQ(given_up.head.channel, 5u);
    EXPECT_EQ(serve().kind, Event::Kind::call) << "the message behind it comes next";
}

TEST_F(DeskTest, LimitsAreTold) {
    send(head(Verb::sample, 1, 100));  // larger than the table gives
    EXPECT_EQ(serve().kind, Event::Kind::call);
    for (std::uint64_t call = 2; call <= 4; ++call) {
        send(head(Verb::call, call, 0, 1));
        EXPECT_EQ(serve().kind, Event::Kind::call);
    }
    const Answer refused = ask(head(Verb::call, 5, 0, 1));
    EXPECT_EQ(refused.head.status, Status::busy);
    EXPECT_EQ(refused.body, "at most 4 open calls");
    Head other = head(Verb::probe, 1);
    other.channel = 6;
    EXPECT_EQ(ask(other).head.status, Status::unknown_call);
    other.channel = 7;
    EXPECT_EQ(ask(other).head.status, Status::busy);
}

TEST_F(DeskTest, AClientThatTakesNoReplyIsPartedFrom) {
    Event event;
    std::uint64_t call = 1;
    while (event.kind != Event::Kind::broken && call < 1 << 18) {
        for (int i = 0; i < 500; ++i) send(head(Verb::call, call++, 0, 1));
        do event = serve();
        while (event.kind == Event::Kind::call);
    }
    EXPECT_EQ(event.kind, Event::Kind::broken);
    EXPECT_EQ(desk_->find(kSession)->kept, std::uint64_t{1} << 16);
}

TEST_F(DeskTest, StrangersAndWrongMessagesChangeNothing) {
    Head stranger = head(Verb::sample, 1, 1);
    stranger.session = 8;
    EXPECT_EQ(ask(stranger).head.status, Status::unknown_session);
    EXPECT_GE(zmq_send(dealer_, "abc", 3, 0), 0);
    EXPECT_GE(zmq_send(dealer_, "abc", 3, ZMQ_SNDMORE), 0);
    EXPECT_GE(zmq_send(dealer_, "abc", 3, 0), 0);
    Head other_protocol = head(Verb::sample, 1, 1);
    other_protocol.magic = 1;
    send(other_protocol);
    EXPECT_EQ(serve().kind, Event::Kind::quiet);
    EXPECT_EQ(desk_->refused(wire::Desk::kShort), 1u);
    EXPECT_EQ(desk_->refused(wire::Desk::kFrames), 1u);
    EXPECT_EQ(desk_->refused(wire::Desk::kMagic), 1u);
    send(head(static_cast<Verb>(99), 1));
    EXPECT_EQ(serve().kind, Event::Kind::broken);
    EXPECT_EQ(answer()->head.status, Status::bad_message);
    desk_->part(kSession);
    EXPECT_EQ(ask(head(Verb::sample, 1, 1)).head.status, Status::unknown_session);
}

TEST_F(DeskTest, ABeatForgetsReplies) {
    ask(head(Verb::sample, 1, 2));
    EXPECT_EQ(desk_->find(kSession)->kept_bytes, 66u);
    const std::uint64_t pair[2] = {5, 2};
    send(head(Verb::beat, 0), std::string(reinterpret_cast<const char*>(pair), sizeof pair));
    send(head(Verb::beat, 0), "odd");
    EXPECT_EQ(serve().kind, Event::Kind::quiet);
    EXPECT_EQ(desk_->find(kSession)->kept_bytes, 0u);
    EXPECT_EQ(desk_->refused(wire::Desk::kBeat), 1u);
}

TEST_F(DeskTest, RolesAreAsked) {
    desk_->find(kSession)->roles = wire::kRead;
    send(head(Verb::add, 1, 0), "a");
    EXPECT_EQ(serve().kind, Event::Kind::call) << "the long way says which role is missing";
    EXPECT_EQ(rows_->taken, 0u);
}

TEST_F(DeskTest, AReplyBehindRefusedCallsIsForgottenWhenItWasTaken) {
    for (std::uint64_t call = 1; call <= 4; ++call) {
        send(head(Verb::call, call, 0, 1));
        EXPECT_EQ(serve().kind, Event::Kind::call);
    }
    EXPECT_EQ(ask(head(Verb::call, 5, 0, 1)).head.status, Status::busy);
    const std::uint64_t refused = desk_->find(kSession)->kept_bytes;
    desk_->reply(head(Verb::call, 1), wire::Message(zmq_, 200), 0, 0);
    EXPECT_EQ(answer()->head.call, 1u);
    EXPECT_EQ(ask(head(Verb::probe, 1, 0, 1)).head.call, 1u);
    EXPECT_EQ(ask(head(Verb::probe, 5, 0, 1)).head.status, Status::busy);
    EXPECT_EQ(ask(head(Verb::probe, 3, 0, 2)).head.status, Status::working);
    EXPECT_EQ(desk_->find(kSession)->kept_bytes, refused);
}

TEST_F(DeskTest, EveryMessageOfAClientWithoutAKeyIsHandedOverAsSuch) {
    desk_->watch("/nowhere/clients.list", {});
    desk_->find(kSession)->is_barred = true;
    for (const Verb verb : {Verb::beat, Verb::probe, Verb::sample, Verb::bye, static_cast<Verb>(999)}) {
        send(head(verb, 1, 1));
        EXPECT_EQ(serve().kind, Event::Kind::barred);
    }
    desk_->find(kSession)->is_barred = false;
    EXPECT_EQ(ask(head(Verb::sample, 1, 2)).body, "\1\1") << "nothing of it was counted as a call";
    EXPECT_EQ(desk_->find(kSession)->open_calls, 0u);
}

TEST_F(DeskTest, TheServerLooksAroundWhileFramesAreDropped) {
    for (int i = 0; i < 2; ++i) {
        EXPECT_GE(zmq_send(dealer_, "abc", 3, ZMQ_SNDMORE), 0);
        EXPECT_GE(zmq_send(dealer_, "abc", 3, 0), 0);
    }
    EXPECT_EQ(desk_->serve(0, -1).kind, Event::Kind::quiet);
    EXPECT_EQ(desk_->refused(wire::Desk::kFrames), 1u);
}

TEST_F(DeskTest, WhileAllClientsLiveOnlyMessagesEndTheWait) {
    EXPECT_EQ(serve_until_bell(0, 1000).kind, Event::Kind::bell) << "a look around is due";
    // Several receive timeouts pass before the bell: each of them is a look around.
    const double begun = wire::monotonic_now();
    std::thread bell([this] {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        EXPECT_EQ(zmq_send(dealer_, "", 0, 0), 0);
    });
    EXPECT_EQ(desk_->serve(0.01, 1000).kind, Event::Kind::bell);
    bell.join();
    EXPECT_GE(wire::monotonic_now() - begun, 0.1);
}

TEST_F(DeskTest, ADeadClientIsToldOfWhileNothingComes) {
    desk_->find(kSilent)->seen = wire::monotonic_now() - 1001;
    EXPECT_EQ(desk_->serve(kNever, 1000).kind, Event::Kind::quiet);
    desk_->part(kSilent);
    EXPECT_EQ(serve_until_bell(0, 1000).kind, Event::Kind::bell);
}

TEST_F(DeskTest, ADeadClientIsToldOfAmongMessagesOfOthersAndOnceALook) {
    desk_->find(kSilent)->seen = wire::monotonic_now() - 1001;
    send(head(Verb::sample, 1, 1));
    const double look_s = wire::monotonic_now() / 2;  // the first look is due, the second one is not
    EXPECT_EQ(desk_->serve(look_s, 1000).kind, Event::Kind::quiet);
    EXPECT_FALSE(answer()) << "the message waits meanwhile";
    EXPECT_EQ(serve_until_bell(look_s, 1000).kind, Event::Kind::bell);
    EXPECT_EQ(answer()->head.call, 1u);
}

TEST_F(DeskTest, AStandstillOfTheServerIsNoSilenceOfItsClients) {
    EXPECT_EQ(serve_until_bell(0, 1000).kind, Event::Kind::bell);
    // A client that was silent for so long when the server stood still for 100 ms.
    const auto look_after = [this](double silent_s, double timeout) {
        const double looked = wire::monotonic_now();
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        for (const auto& [session, client] : desk_->clients()) client->seen = looked - silent_s;
        return serve_until_bell(0, timeout).kind;
    };
    EXPECT_EQ(look_after(0.01, 0.06), Event::Kind::bell);
    EXPECT_EQ(look_after(1, 0.06), Event::Kind::quiet);
    EXPECT_EQ(look_after(0.01, 1000), Event::Kind::bell);
    EXPECT_LT(desk_->find(kSilent)->seen, wire::monotonic_now() - 0.1) << "one that looks a little late excuses nobody";
}

TEST_F(DeskTest, AServerThatIsAlwaysLateFindsItsDeadClients) {
    const double look_s = 0.02, timeout = 0.05;
    EXPECT_EQ(serve_until_bell(0, 1000).kind, Event::Kind::bell);
    desk_->find(kSilent)->seen = wire::monotonic_now();
    int looks = 0;
    for (; looks < 100; ++looks) {
        std::this_thread::sleep_for(std::chrono::milliseconds(60));
        desk_->find(kSession)->seen = wire::monotonic_now();
        if (serve_until_bell(look_s, timeout).kind == Event::Kind::quiet) break;
    }
    EXPECT_GE(looks, 1) << "60 ms are more than the timeout";
    EXPECT_LE(looks, 3);
}

TEST_F(DeskTest, AClientWithoutAKeyIsToldOfWhileNothingComes) {
    desk_->find(kSilent)->is_barred = true;
    EXPECT_EQ(desk_->serve(kNever, 1000).kind, Event::Kind::quiet);
}

TEST_F(DeskTest, AChangedListOfKeysIsToldOfWhileNothingComes) {
    const auto path = std::filesystem::temp_directory_path() / ("sharpwave-keys-" + std::to_string(getpid()));
    desk_->watch(path.string(), {});
    EXPECT_EQ(serve_until_bell(0, 1000).kind, Event::Kind::bell) << "there is no list, as before";
    std::ofstream(path) << "a list";
    EXPECT_EQ(desk_->serve(kNever, 1000).kind, Event::Kind::quiet);
    std::filesystem::remove(path);
}

TEST_F(DeskTest, AnEventOutlivesItsDesk) {
    send(head(Verb::call, 1), "abc");
    const Event event = serve();
    ASSERT_EQ(event.kind, Event::Kind::call);
    desk_.reset();
    EXPECT_EQ(event.body().size(), 3u);
}

bool has_memory = true;

TEST_F(DeskTest, ACallForWhichThereWasNoMemoryIsTakenAgain) {
    zmq_.msg_init_size = [](void* message, std::size_t bytes) {
        return has_memory ? zmq_msg_init_size(static_cast<zmq_msg_t*>(message), bytes) : -1;
    };
    has_memory = false;
    send(head(Verb::add, 1, 10), "ab");
    EXPECT_THROW(serve(), std::bad_alloc);
    has_memory = true;
    EXPECT_EQ(ask(head(Verb::probe, 1)).head.status, Status::unknown_call) << "the client sends it again";
    EXPECT_EQ(ask(head(Verb::add, 1, 10), "ab").head.argument, 12u);
    has_memory = false;
    send(head(Verb::sample, 2, 3));  // its reply is kept, and only the way out fails
    EXPECT_THROW(serve(), std::bad_alloc);
    has_memory = true;
    EXPECT_EQ(ask(head(Verb::probe, 2)).body, "\1\1\1");
}

}  // namespace desk_test

#endif
