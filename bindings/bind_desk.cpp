// The desk of a server, and what tables do at it.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "batches/batch_maker.h"
#include "bind.h"
#include "bound_writer.h"
#include "results.h"
#include "wire_types.h"

namespace wire = sharpwave::wire;
using sharpwave::Error;
using sharpwave::ErrorKind;
using wire::Desk;
using wire::Event;
using wire::Head;
using wire::Memory;
using wire::Message;

namespace {

constexpr std::size_t kAlignment = 64;

// Draws batches into replies. It holds the table weakly: a server does not keep open what its owner closes.
class HostedTable : public wire::Table {
public:
    // `blank`: a batch of one example, as the table makes it; `arrays`: its arrays in the order of a body.
    HostedTable(const BoundTable& bound, nb::handle blank, const nb::list& arrays)
        : table_(bound.table),
          batches_(bound.batches),
          pace_(bound.pace),
          has_pace_(bound.pace != nullptr),
          newest_(bound.newest),
          most_(bound.most),
          leaves_(bound.tree->leaves().size()) {
        Batch batch = check_out(*bound.tree, 1, blank);
        for (nb::handle one : arrays) {
            auto* array = reinterpret_cast<PyArrayObject*>(one.ptr());
            places_.push_back({static_cast<std::size_t>(PyArray_NBYTES(array)), find(batch, PyArray_DATA(array))});
        }
    }

    std::shared_ptr<Memory> sample(std::uint64_t count, bool tells_odds, std::uint64_t most_bytes) noexcept override {
        try {
            return draw(count, tells_odds, most_bytes);
        } catch (...) {  // the long way meets the same, and says it
            return nullptr;
        }
    }

private:
    // What an array of the body is: one of the leaves, or one of the extras.
    enum Extra {
        kIndices = 1 << 16,
        kTruncated,
        kDiscounts,
        kWeights,
        kProbabilities,
        kValid,
        kLearn,
        kFirst,
        kSerials
    };
    struct Place {
        std::size_t bytes;  // of one example
        std::size_t what;
    };

    static std::size_t find(const Batch& batch, const void* data) {
        const std::pair<const void*, Extra> extras[] = {
            {batch.indices, kIndices},   {batch.truncated, kTruncated},         {batch.discounts, kDiscounts},
            {batch.weights, kWeights},   {batch.probabilities, kProbabilities}, {batch.masks.valid, kValid},
            {batch.masks.learn, kLearn}, {batch.masks.first, kFirst},           {batch.masks.serials, kSerials}};
        for (const auto& [memory, extra] : extras) {
            if (memory == data) return extra;
        }
        Batch& leaves = const_cast<Batch&>(batch);
        for (std::size_t i = 0; i < leaves.flats.size(); ++i) {
            if (leaves.flats[i] == data) return i;
        }
        throw nb::value_error("HostedTable(): an array is not of the batch");
    }

    std::shared_ptr<Memory> draw(std::uint64_t count, bool tells_odds, std::uint64_t most_bytes) {
        const std::shared_ptr<sharpwave::Table> table = table_.lock();
        const std::shared_ptr<sharpwave::BatchMaker> batches = batches_.lock();
        const std::shared_ptr<sharpwave::Pace> pace = pace_.lock();
        if (!table || !batches || (has_pace_ && !pace)) return nullptr;
        table->check_open();
        const auto rows = static_cast<npy_intp>(count);
        if (count > most_bytes || rows < std::max<npy_intp>(newest_, 1) || rows > most_) return nullptr;
        if (!pace && table->size() == 0) return nullptr;
        std::size_t bytes = sizeof(Head) + (tells_odds ? 2 * sizeof(double) : 0);
        for (const Place& place : places_) {
            if (place.bytes && count > most_bytes / place.bytes) return nullptr;
            bytes += aligned(place.bytes * count);
        }
        if (bytes > most_bytes) return nullptr;
        const auto memory = std::make_shared<Memory>(bytes);
        const auto side = sharpwave::Pace::Side::sample;
        if (pace && !pace->try_reserve(side, count, sharpwave::Deadline::in(0))) return nullptr;
        bool done = false;
        try {
            fill(*batches, *memory, count, tells_odds);
            done = true;
        } catch (...) {  // settled below
        }
        if (pace) pace->settle(side, count, done);
        return done ? memory : nullptr;
    }

    void fill(sharpwave::BatchMaker& batches, Memory& memory, std::uint64_t count, bool tells_odds) const {
        Few<std::byte*> flats(leaves_);
        sharpwave::Outputs out{flats.data()};
        sharpwave::BatchExtras drawn{nullptr};
        std::byte* at = memory.data() + sizeof(Head);
        for (const Place& place : places_) {
            point(place.what, at, flats, out, drawn);
            const std::size_t end = place.bytes * count;
            std::memset(at + end, 0, aligned(end) - end);  // no bytes of former replies
            at += aligned(end);
        }
        sharpwave::DrawOdds odds;
        if (tells_odds) drawn.odds = &odds;
        batches.sample(count, out, drawn, sharpwave::Deadline::in(0));
        if (!tells_odds) return;
        const double told[2] = {odds.rows, odds.scale};
        std::memcpy(at, told, sizeof told);
    }

    static void point(std::size_t what, std::byte* at, Few<std::byte*>& flats, sharpwave::Outputs& out,
                      sharpwave::BatchExtras& drawn) {
        const auto truths = reinterpret_cast<std::uint8_t*>(at);
        switch (what) {
            case kIndices:
                drawn.serials = reinterpret_cast<std::uint64_t*>(at);
                return;
            case kTruncated:
                out.truncated = truths;
                return;
            case kDiscounts:
                out.discounts = reinterpret_cast<float*>(at);
                return;
            case kWeights:
                drawn.weights = reinterpret_cast<float*>(at);
                return;
            case kProbabilities:
                drawn.probabilities = reinterpret_cast<double*>(at);
                return;
            case kValid:
                drawn.masks.valid = truths;
                return;
            case kLearn:
                drawn.masks.learn = truths;
                return;
            case kFirst:
                drawn.masks.first = truths;
                return;
            case kSerials:
                drawn.masks.serials = reinterpret_cast<std::int64_t*>(at);
                return;
            default:
                flats[what] = at;
        }
    }

    static std::size_t aligned(std::size_t at) { return (at + kAlignment - 1) / kAlignment * kAlignment; }

    const std::weak_ptr<sharpwave::Table> table_;
    const std::weak_ptr<sharpwave::BatchMaker> batches_;
    const std::weak_ptr<sharpwave::Pace> pace_;
    const bool has_pace_;
    const npy_intp newest_, most_;
    const std::size_t leaves_;
    std::vector<Place> places_;
};

// Adds rows of a client. It holds the writer weakly, as a HostedTable its table.
class HostedStream : public wire::Stream {
public:
    explicit HostedStream(const BoundWriter& bound)
        : writer_(bound.writer), pace_(bound.pace), has_pace_(bound.pace != nullptr), tree_(bound.tree) {}

    bool add(std::span<const std::byte> body, std::uint64_t first_row, std::uint64_t& accepted) noexcept override {
        try {
            const std::shared_ptr<sharpwave::Writer> writer = writer_.lock();
            const std::shared_ptr<sharpwave::Pace> pace = pace_.lock();
            if (!writer || (has_pace_ && !pace)) return false;
            const std::byte* data = body.data();
            if (reinterpret_cast<std::uintptr_t>(data) % 8) {  // small frames begin anywhere in ZeroMQ's memory
                copy_.resize(body.size() / 8 + 1);
                std::memcpy(copy_.data(), data, body.size());
                data = reinterpret_cast<const std::byte*>(copy_.data());
            }
            return append_at_once(*writer, *tree_, pace.get(), data, body.size(), first_row, accepted);
        } catch (...) {  // the long way meets the same, and says it
            return false;
        }
    }

private:
    const std::weak_ptr<sharpwave::Writer> writer_;
    const std::weak_ptr<sharpwave::Pace> pace_;
    const bool has_pace_;
    const std::shared_ptr<Tree> tree_;
    std::vector<std::uint64_t> copy_;
};

class BoundDesk {
public:
    BoundDesk(const wire::Zmq& zmq, std::uintptr_t socket, const nb::dict& limits)
        : desk(zmq, to_pointer(socket), read_limits(limits)) {}

    Desk desk;

private:
    static void* to_pointer(std::uintptr_t address) {
        void* pointer;
        std::memcpy(&pointer, &address, sizeof pointer);
        return pointer;
    }
    static wire::DeskLimits read_limits(const nb::dict& limits) {
        const auto read = [&](const char* name) { return nb::cast<std::uint64_t>(limits[name]); };
        return {read("message_bytes"), read("calls"), read("kept_bytes"), read("channels"), read("waiting_bytes")};
    }
};

Event serve(BoundDesk& self, double look_s, double timeout) {
    const PatientRelease release;
    return self.desk.serve(look_s, timeout);
}

Head head_of(std::uint16_t version, std::uint16_t verb, std::uint32_t table, std::uint64_t session,
             std::uint32_t channel, std::uint32_t stream, std::uint64_t call) {
    Head head;
    head.version = version;
    head.verb = static_cast<wire::Verb>(verb);
    head.table = table;
    head.session = session;
    head.channel = channel;
    head.stream = stream;
    head.call = call;
    return head;
}

void reply(BoundDesk& self, const Event& request, nb::handle memory, std::uint16_t status, std::uint64_t argument) {
    Head head = request.head;
    head.status = static_cast<wire::Status>(status);
    head.argument = argument;
    self.desk.reply(head, message_of(self.desk.zmq(), memory), request.came, request.body().size());
}

void reply_bare(BoundDesk& self, const Event& request, std::uint16_t status, const std::string& text) {
    self.desk.reply_bare(request.who, request.head, static_cast<wire::Status>(status), text);
}

void greet(BoundDesk& self, const Event& request, std::uint64_t session, std::uint16_t version, nb::handle memory) {
    const Head head =
        head_of(version, static_cast<std::uint16_t>(wire::Verb::hello), 0, session, request.head.channel, 0, 0);
    const HeldBuffer held(memory, PyBUF_SIMPLE);
    self.desk.introduce(request.who, head, {held.data(), held.size()});
}

void open_stream(BoundDesk& self, std::uint64_t session, std::uint32_t table, std::uint32_t number,
                 const BoundWriter& writer) {
    wire::Client* client = self.desk.find(session);
    if (!client || !writer.writer || !flags_without_python(*writer.tree)) return;
    client->streams[wire::stream_key(table, number)] = std::make_shared<HostedStream>(writer);
}

void close_stream(BoundDesk& self, std::uint64_t session, std::uint32_t table, std::uint32_t number) {
    if (wire::Client* client = self.desk.find(session)) client->streams.erase(wire::stream_key(table, number));
}

nb::dict verb_stats(const wire::VerbTimes& times) {
    const std::uint64_t count = times.count.load(std::memory_order_relaxed);
    std::vector<float> newest(std::min<std::uint64_t>(count, wire::VerbTimes::kNewest));
    for (std::size_t i = 0; i < newest.size(); ++i) newest[i] = times.newest[i].load(std::memory_order_relaxed);
    std::sort(newest.begin(), newest.end());
    const auto at = [&](std::size_t percent) {
        return newest.empty() ? 0.0 : 1e6 * static_cast<double>(newest[newest.size() * percent / 100]);
    };
    nb::dict result;
    result["count"] = count;
    result["bytes_in"] = times.bytes_in.load(std::memory_order_relaxed);
    result["bytes_out"] = times.bytes_out.load(std::memory_order_relaxed);
    result["p50_us"] = at(50);
    result["p99_us"] = at(99);
    return result;
}

// Of a client: what was counted of it. `names`: of the verbs, by number.
nb::dict client_stats(BoundDesk& self, std::uint64_t session, const nb::dict& names) {
    nb::dict result, verbs;
    const wire::Client* client = self.desk.find(session);
    if (!client) return result;
    result["silent_s"] = wire::monotonic_now() - client->seen.load(std::memory_order_relaxed);
    result["open_calls"] = client->open_calls.load(std::memory_order_relaxed);
    result["kept_bytes"] = client->kept_bytes.load(std::memory_order_relaxed);
    for (int verb = 0; verb < wire::kVerbs; ++verb) {
        const wire::VerbTimes* times = client->find_times(static_cast<std::uint16_t>(verb));
        if (times) verbs[names[nb::int_(verb)]] = verb_stats(*times);
    }
    result["verbs"] = verbs;
    return result;
}

nb::dict refused(const BoundDesk& self) {
    nb::dict result;
    for (int reason = 0; reason < Desk::kReasons; ++reason) {
        if (const std::uint64_t count = self.desk.refused(reason)) result[Desk::reason_name(reason)] = count;
    }
    return result;
}

}  // namespace

void bind_desk(nb::module_& m) {
    nb::class_<wire::Table>(m, "HostedTable", "Draws batches into the replies of a server.");
    m.def(
        "hosted_table",
        [](const BoundTable& table, nb::handle blank, const nb::list& arrays) -> std::shared_ptr<wire::Table> {
            return std::make_shared<HostedTable>(table, blank, arrays);
        },
        nb::arg("table"), nb::arg("blank"), nb::arg("arrays"),
        nb::sig("def hosted_table(table: Table, blank: object, arrays: list[typing.Any]) -> HostedTable"));
    nb::class_<Event> event(m, "Event", "What the desk of a server hands over.");
    nb::enum_<Event::Kind>(event, "Kind")
        .value("QUIET", Event::Kind::quiet)
        .value("BELL", Event::Kind::bell)
        .value("HELLO", Event::Kind::hello)
        .value("BYE", Event::Kind::bye)
        .value("CALL", Event::Kind::call)
        .value("BARRED", Event::Kind::barred)
        .value("GIVEN_UP", Event::Kind::given_up)
        .value("BROKEN", Event::Kind::broken)
        .value("KEYS", Event::Kind::keys);
    event.def_ro("kind", &Event::kind)
        .def_ro("came", &Event::came, "When it came, by the monotonic clock.")
        .def_prop_ro("version", [](const Event& self) { return self.head.version; })
        .def_prop_ro("verb", [](const Event& self) { return static_cast<int>(self.head.verb); })
        .def_prop_ro("flags", [](const Event& self) { return self.head.flags; })
        .def_prop_ro("table", [](const Event& self) { return self.head.table; })
        .def_prop_ro("session", [](const Event& self) { return self.head.session; })
        .def_prop_ro("channel", [](const Event& self) { return self.head.channel; })
        .def_prop_ro("stream", [](const Event& self) { return self.head.stream; })
        .def_prop_ro("call", [](const Event& self) { return self.head.call; })
        .def_prop_ro("argument", [](const Event& self) { return self.head.argument; })
        .def_prop_ro(
            "timeout",
            [](const Event& self) -> nb::object {
                if (self.head.timeout == wire::kForever) return nb::none();
                return nb::float_(static_cast<double>(self.head.timeout) / 1e6);
            },
            nb::sig("def timeout(self) -> float | None"), "Seconds that the call may wait.")
        .def_prop_ro(
            "user",
            [](const Event& self) {
                const char* user = self.frame ? self.frame->property("User-Id") : nullptr;
                return std::string(user ? user : "");
            },
            "The public key that its sender has proved.")
        .def_prop_ro(
            "body",
            [](const Event& self) -> nb::object {
                const nb::object frame = nb::cast(Frame{self.frame, self.head, true});
                return frame.attr("body");
            },
            nb::sig("def body(self) -> memoryview"));
    nb::class_<BoundDesk>(m, "Desk",
                          "Takes the messages of a server, and answers at once what can be answered at once.")
        .def(nb::init<const wire::Zmq&, std::uintptr_t, const nb::dict&>(), nb::arg("zmq"), nb::arg("socket"),
             nb::arg("limits"), nb::sig("def __init__(self, zmq: Zmq, socket: int, limits: dict[str, int]) -> None"))
        .def("serve", &serve, nb::arg("look_s"), nb::arg("timeout"),
             "Until something comes that it hands over, or a client was silent for longer than the timeout.")
        .def(
            "host",
            [](BoundDesk& self, std::uint32_t number, std::shared_ptr<wire::Table> table) {
                self.desk.host(number, std::move(table));
            },
            nb::arg("number"), nb::arg("table"))
        .def(
            "admit",
            [](BoundDesk& self, std::uint64_t session, const std::string& user, std::uint16_t version,
               std::uint8_t roles) { self.desk.admit(session, user, version, roles); },
            nb::arg("session"), nb::arg("user"), nb::arg("version"), nb::arg("roles"))
        .def(
            "set_roles",
            [](BoundDesk& self, std::uint64_t session, std::uint8_t roles, bool is_barred) {
                if (wire::Client* client = self.desk.find(session)) {
                    client->roles = roles;
                    client->is_barred = is_barred;
                }
            },
            nb::arg("session"), nb::arg("roles"), nb::arg("is_barred"))
        .def(
            "touch",
            [](BoundDesk& self, std::uint64_t session) {
                if (wire::Client* client = self.desk.find(session)) client->seen = wire::monotonic_now();
            },
            nb::arg("session"))
        .def(
            "seen",
            [](BoundDesk& self, std::uint64_t session) {
                const wire::Client* client = self.desk.find(session);
                return client ? client->seen.load(std::memory_order_relaxed) : 0.0;
            },
            nb::arg("session"), "When the client was heard last, by the monotonic clock.")
        .def(
            "part", [](BoundDesk& self, std::uint64_t session) { self.desk.part(session); }, nb::arg("session"))
        .def(
            "watch",
            [](BoundDesk& self, const nb::bytes& path, std::uint64_t device, std::uint64_t inode, std::uint64_t bytes,
               std::uint64_t modified_ns, std::uint64_t changed_ns) {
                self.desk.watch({path.c_str(), path.size()}, {device, inode, bytes, modified_ns, changed_ns});
            },
            nb::arg("path"), nb::arg("device"), nb::arg("inode"), nb::arg("bytes"), nb::arg("modified_ns"),
            nb::arg("changed_ns"))
        .def(
            "hold",
            [](BoundDesk& self, std::uint64_t session, std::uint32_t channel, std::uint64_t call) {
                self.desk.hold(session, channel, call);
            },
            nb::arg("session"), nb::arg("channel"), nb::arg("call"), "A call waits elsewhere; 0: none any more.")
        .def(
            "oldest",
            [](BoundDesk& self, std::uint64_t session, std::uint32_t channel) {
                return self.desk.oldest(session, channel);
            },
            nb::arg("session"), nb::arg("channel"))
        .def(
            "drop_call", [](BoundDesk& self, std::uint64_t session) { self.desk.drop_call(session); },
            nb::arg("session"))
        .def("reply", &reply, nb::arg("request"), nb::arg("memory"), nb::arg("status"), nb::arg("argument"),
             nb::sig("def reply(self, request: Event, memory: object, status: int, argument: int) -> None"))
        .def("reply_bare", &reply_bare, nb::arg("request"), nb::arg("status"), nb::arg("text"))
        .def("greet", &greet, nb::arg("request"), nb::arg("session"), nb::arg("version"), nb::arg("memory"),
             nb::sig("def greet(self, request: Event, session: int, version: int, memory: object) -> None"))
        .def("open_stream", &open_stream, nb::arg("session"), nb::arg("table"), nb::arg("number"), nb::arg("writer"))
        .def("close_stream", &close_stream, nb::arg("session"), nb::arg("table"), nb::arg("number"))
        .def("client_stats", &client_stats, nb::arg("session"), nb::arg("names"),
             nb::sig("def client_stats(self, session: int, names: dict[int, str]) -> dict[str, typing.Any]"))
        .def("refused", &refused, nb::sig("def refused(self) -> dict[str, int]"))
        .def_prop_rw(
            "waiting_bytes", [](const BoundDesk& self) { return self.desk.waiting_bytes; },
            [](BoundDesk& self, std::uint64_t bytes) { self.desk.waiting_bytes = bytes; });
}
