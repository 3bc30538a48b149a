// The C++ client of a server, against servers that answer wrongly. tests/service/test_cpp_client.py has the real one.
#ifdef SHARPWAVE_HAS_NET

#include <gtest/gtest.h>
#include <sharpwave/buffer.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zmq.h>

#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "net/address.h"
#include "net/document.h"
#include "wire/message.h"

using namespace sharpwave;

namespace {

using net::Head;
using net::Verb;
using Bytes = std::vector<std::byte>;
using Answers = std::vector<Bytes>;

const std::string kServedRows =
    R"({\"face\": \"ReplayBuffer\", \"schema\": {\"fields\": {\"obs\": [[3], \"<f4\", {}], \"reward\": [[], \"<f4\", {}]},
        \"derives_next\": false}, \"num_envs\": null, \"sampler\": {\"kind\": \"Uniform\", \"max_reads\": null, \"newest\": 0},
        \"view\": {\"kind\": \"Transitions\", \"n_step\": 1, \"gamma\": 0.99, \"truncated\": false, \"hindsight\": null},
        \"pace\": null})";

std::string without_breaks(std::string text) {
    std::erase(text, '\n');
    return text;
}

Bytes reply_to(const Head& request, const Bytes& body, net::Status status = net::Status::ok,
               std::uint64_t argument = 0) {
    Head head = request;
    head.status = status;
    head.argument = argument;
    if (request.verb == Verb::hello) head.session = 77;
    Bytes frame(sizeof head + body.size());
    std::memcpy(frame.data(), &head, sizeof head);
    if (!body.empty()) std::memcpy(frame.data() + sizeof head, body.data(), body.size());
    return frame;
}

// What a right server says to these verbs.
Bytes right_answer(const Head& request) {
    switch (request.verb) {
        case Verb::hello:
            return reply_to(request, net::write_document(R"({"version": 1, "server": "00", "client_timeout": 5,
                                                             "limits": {"message_bytes": 1000000, "calls": 10}})"));
        case Verb::open:
            return reply_to(request,
                            net::write_document(R"({"table": 3, "face": "ReplayBuffer", "kind": "rows", "capacity": 100,
                "batch": [[["obs"], "<f4", [3]], [["reward"], "<f4", []], [["indices"], "<i8", []]], "description": ")" +
                                                without_breaks(kServedRows) + "\"}"));
        case Verb::sample: {
            Bytes body(192);
            const float obs[] = {1, 2, 3, 4, 5, 6}, rewards[] = {7, 8};
            const std::int64_t indices[] = {9, 10};
            std::memcpy(body.data(), obs, sizeof obs);
            std::memcpy(body.data() + 64, rewards, sizeof rewards);
            std::memcpy(body.data() + 128, indices, sizeof indices);
            return reply_to(request, body, net::Status::ok, request.argument);
        }
        case Verb::call:
            return reply_to(request, net::write_document(R"({"stream": 5, "accepted": 0})"));
        case Verb::add:
            return reply_to(request, {}, net::Status::ok, request.argument + 1);
        default:
            return reply_to(request, {});
    }
}

// A ROUTER socket in a thread. `answer` makes the frames that go back.
class FakeServer {
public:
    using Answer = std::function<Answers(const Head& request)>;
    explicit FakeServer(Answer answer) : answer_(std::move(answer)) {
        static int number = 0;
        endpoint = "ipc:///tmp/sharpwave-test-net-" + std::to_string(getpid()) + "-" + std::to_string(number++);
        context_ = zmq_ctx_new();
        socket_ = zmq_socket(context_, ZMQ_ROUTER);
        const int none = 0;
        zmq_setsockopt(socket_, ZMQ_LINGER, &none, sizeof none);
        EXPECT_EQ(zmq_bind(socket_, endpoint.c_str()), 0);
        thread_ = std::thread([this] { serve(); });
    }
    ~FakeServer() {
        stops_ = true;
        thread_.join();
        zmq_close(socket_);
        zmq_ctx_term(context_);
    }
    std::string endpoint;

private:
    void serve() {
        while (!stops_) {
            zmq_pollitem_t item{socket_, 0, ZMQ_POLLIN, 0};
            if (zmq_poll(&item, 1, 10) <= 0) continue;
            char peer[256];
            const int size = zmq_recv(socket_, peer, sizeof peer, 0);
            Bytes frame(1 << 20);
            const int got = zmq_recv(socket_, frame.data(), frame.size(), 0);
            Head request;
            if (size < 0 || got < 0 || !net::read_head({frame.data(), static_cast<std::size_t>(got)}, request))
                continue;
            for (const Bytes& reply : answer_(request)) {
                zmq_send(socket_, peer, static_cast<std::size_t>(size), ZMQ_SNDMORE);
                zmq_send(socket_, reply.data(), reply.size(), 0);
            }
        }
    }
    Answer answer_;
    void* context_;
    void* socket_;
    std::atomic<bool> stops_{false};
    std::thread thread_;
};

void use(const std::string& address, double timeout_s) {
    Buffer buffer = sharpwave::open(address, {.timeout_s = timeout_s});
    const std::array<float, 3> obs{};
    buffer.add({{"obs", obs}, {"reward", 1.0f}}, timeout_s);
    const Batch batch = buffer.sample(2, timeout_s);
    batch.get<float>("obs");
}

}  // namespace

TEST(Net, SpeaksTheProtocol) {
    const FakeServer server([](const Head& request) { return Answers{right_answer(request)}; });
    Buffer buffer = sharpwave::open(server.endpoint + "/replay", {.timeout_s = 10});
    EXPECT_EQ(buffer.capacity(), 100u);
    const std::array<float, 3> obs{};
    for (int i = 0; i < 3; ++i) buffer.add({{"obs", obs}, {"reward", 1.0f}});
    const Batch batch = buffer.sample(2);
    EXPECT_EQ(batch.get<float>("obs", 1)[2], 6);
    EXPECT_EQ(batch.get<float>("reward")[1], 8);
    EXPECT_EQ(batch.indices()[1], 10);
}

TEST(Net, PassesOverRepliesThatAreNotItsOwn) {
    const FakeServer server([](const Head& request) {
        Head other = request;
        other.call = request.call + 5;
        Head elsewhere = request;
        elsewhere.channel = request.channel + 1000;
        return Answers{reply_to(other, {}, net::Status::failure),
                       Bytes(10),
                       Bytes(64),
                       reply_to(elsewhere, {}, net::Status::unknown_session),
                       right_answer(request),
                       right_answer(request)};
    });
    use(server.endpoint + "/replay", 10);
}

TEST(Net, SendsAgainWhatWasLost) {
    std::atomic<int> adds{0}, draws{0};
    const FakeServer server([&](const Head& request) {
        if (request.verb == Verb::probe) return Answers{reply_to(request, {}, net::Status::unknown_call)};
        const bool is_lost =
            (request.verb == Verb::add && ++adds == 1) || (request.verb == Verb::sample && ++draws == 1);
        return is_lost ? Answers{} : Answers{right_answer(request)};
    });
    use(server.endpoint + "/replay", 30);
    EXPECT_EQ(adds, 2);
    EXPECT_EQ(draws, 2);
}

TEST(Net, MakesTheSessionAnewAndKeepsItsRowNumbers) {
    std::atomic<int> hellos{0};
    std::vector<std::uint64_t> first_rows;
    {
        const FakeServer server([&](const Head& request) {
            if (request.verb == Verb::hello) ++hellos;
            if (request.verb == Verb::add) {
                first_rows.push_back(request.argument);
                // The second add reaches a server that was started again, and has the first row.
                if (first_rows.size() == 2) return Answers{reply_to(request, {}, net::Status::unknown_session)};
            }
            if (request.verb == Verb::call && hellos == 2) {
                return Answers{reply_to(request, net::write_document(R"({"stream": 6, "accepted": 1})"))};
            }
            return Answers{right_answer(request)};
        });
        Buffer buffer = sharpwave::open(server.endpoint + "/replay", {.timeout_s = 10});
        const std::array<float, 3> obs{};
        for (int i = 0; i < 3; ++i) buffer.add({{"obs", obs}, {"reward", 1.0f}});
        buffer.close();
    }
    EXPECT_EQ(hellos, 2);
    EXPECT_EQ(first_rows, (std::vector<std::uint64_t>{0, 1, 1, 2}));
}

TEST(Net, GoesOnWithAServerThatHasLostItsRows) {
    std::atomic<int> hellos{0};
    std::vector<std::uint64_t> first_rows;
    {
        const FakeServer server([&](const Head& request) {
            if (request.verb == Verb::hello) ++hellos;
            if (request.verb == Verb::add) {
                first_rows.push_back(request.argument);
                if (first_rows.size() == 3) return Answers{reply_to(request, {}, net::Status::unknown_session)};
            }
            return Answers{right_answer(request)};  // a stream has no rows when it is opened
        });
        Buffer buffer = sharpwave::open(server.endpoint + "/replay", {.timeout_s = 10});
        const std::array<float, 3> obs{};
        for (int i = 0; i < 4; ++i) buffer.add({{"obs", obs}, {"reward", 1.0f}});
    }
    EXPECT_EQ(first_rows, (std::vector<std::uint64_t>{0, 1, 2, 0, 1}));
}

TEST(Net, IsTheParentsAfterAFork) {
    const FakeServer server([](const Head& request) { return Answers{right_answer(request)}; });
    auto buffer = std::make_unique<Buffer>(sharpwave::open(server.endpoint + "/replay", {.timeout_s = 10}));
    const std::array<float, 3> obs{};
    buffer->add({{"obs", obs}, {"reward", 1.0f}});
    const pid_t child = fork();
    if (child == 0) {
        try {
            buffer->sample(2);
        } catch (const Error& error) {
            buffer.reset();
            _exit(error.kind() == ErrorKind::closed ? 0 : 1);
        }
        _exit(2);
    }
    int status = -1;
    waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
    EXPECT_EQ(buffer->sample(2).size(), 2u);
}

TEST(Net, AddsWhileADrawWaits) {
    std::atomic<int> draws{0}, adds{0};
    const FakeServer server([&](const Head& request) {
        if (request.verb == Verb::sample) {
            ++draws;
            return Answers{};
        }
        if (request.verb == Verb::probe) {
            // The draw has its batch once a row is there.
            Head draw = request;
            draw.verb = Verb::sample;
            draw.argument = 2;
            return adds ? Answers{right_answer(draw)} : Answers{reply_to(request, {}, net::Status::working)};
        }
        if (request.verb == Verb::add) ++adds;
        return Answers{right_answer(request)};
    });
    Buffer buffer = sharpwave::open(server.endpoint + "/replay", {.timeout_s = 10});
    std::thread learner([buffer]() mutable { EXPECT_EQ(buffer.sample(2).indices()[1], 10); });
    while (!draws) std::this_thread::yield();
    const std::array<float, 3> obs{};
    buffer.add({{"obs", obs}, {"reward", 1.0f}});
    learner.join();
}

TEST(Net, SurvivesDamagedAnswers) {
    std::mt19937 random(1);
    int errors = 0;
    for (int round = 0; round < 60; ++round) {
        const auto seed = random();
        std::mt19937 choices(seed);
        const FakeServer server([&choices](const Head& request) {
            Bytes answer = right_answer(request);
            const int changes = static_cast<int>(choices() % 4);
            for (int i = 0; i < changes; ++i) {
                // The first numbers of a document, and any other byte.
                const std::size_t at = choices() % 2 ? 64 + choices() % 16 : 56 + choices() % (answer.size() - 56);
                if (at < answer.size()) answer[at] = static_cast<std::byte>(choices());
            }
            if (choices() % 8 == 0) answer.resize(choices() % (answer.size() + 1));
            return Answers{answer};
        });
        try {
            use(server.endpoint + "/replay", 0.02);
        } catch (const Error& error) {
            ++errors;
        }
    }
    EXPECT_GT(errors, 10);
}

TEST(Net, ReadsDocumentsWithCare) {
    const auto refused = [](const std::string& json, std::size_t more) {
        Bytes body = net::write_document(json);
        body.resize(body.size() + more);
        try {
            const net::Document document(body);
            document.array(document.value());
        } catch (const Error& error) {
            return error.kind() == ErrorKind::storage;
        }
        return false;
    };
    EXPECT_FALSE(refused(R"({"$": ["<f4", [2, 2], 32]})", 64));
    for (const char* const bad :
         {R"({"$": ["<f4", [2, 2], 1000]})", R"({"$": ["<f4", [2, -2], 32]})", R"({"$": ["<f4", [1000], 32]})",
          R"({"$": ["<f4", [90, 90, 90, 90, 90, 90, 90, 90, 90, 90, 90, 90], 32]})", R"({"$": ["f", [1], 32]})",
          R"({"$": ["<f4", [1], -1]})", R"({"$": ["<f4", [1]]})", R"({"$": 1})", R"({})", R"(1)"}) {
        EXPECT_TRUE(refused(bad, 64)) << bad;
    }
    EXPECT_EQ(net::Document::number(json::parse(R"({"$float": "inf"})")), INFINITY);
    EXPECT_THROW(net::Document(Bytes(4)), Error);
    EXPECT_THROW(net::Document(Bytes(8, std::byte{9})), Error);
}

TEST(Net, RefusesAddressesThatNameNoTable) {
    for (const char* const bad : {"tcp://", "tcp://host", "tcp://host:1", "tcp://host:1/", "tcp://host/name",
                                  "tcp://:1/name", "tcp://host:123456/name", "tcp://host:1/a/b", "ipc://name",
                                  "ipc:///name", "ipc:///a/b c", "tcp://host:x/name"}) {
        EXPECT_THROW(net::read_address(bad, ""), Error) << bad;
    }
    EXPECT_EQ(net::read_address("tcp://host:7001/replay", "").endpoint, "tcp://host:7001");
    EXPECT_EQ(net::read_address("ipc:///tmp/socket/replay", "").endpoint, "ipc:///tmp/socket");
    EXPECT_EQ(net::read_address("ipc:///tmp/socket/replay", "").table, "replay");
    EXPECT_THROW(net::read_address("tcp://host:7001/replay", "/none.key"), Error);
}

#endif
