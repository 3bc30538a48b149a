#include "net/remote_rows.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>

#include "base/error.h"
#include "buffer/item_types.h"
#include "buffer/remote.h"
#include "net/address.h"
#include "net/document.h"
#include "net/token.h"

namespace sharpwave {
namespace {

constexpr std::size_t kArrayAlignment = 64;  // of the arrays in an answer

using net::Document;
using net::Reply;
using net::Verb;

[[noreturn]] void refuse_answer(const std::string& address, const std::string& what) {
    throw Error(ErrorKind::storage, "'" + address + "': the server's answer is not one of this table: " + what);
}

const std::string& description_of(const json::Value& facts) { return facts.at("description", "OPEN").text("OPEN"); }

std::uint64_t capacity_of(const json::Value& facts) {
    return static_cast<std::uint64_t>(facts.at("capacity", "OPEN").whole("capacity", 1, std::int64_t{1} << 50));
}

// The rows from `first` on.
RowBatch part_of(const RowBatch& rows, std::size_t first, std::size_t count, std::vector<FieldInput>& inputs,
                 const RowLayout& layout) {
    inputs.clear();
    std::size_t next_count = 0;
    for (const Field& field : layout.fields()) next_count += field.gives_next;
    const auto shift = [&](FieldInput input) {
        if (input.starts) {
            input.starts += first;
        } else {
            input.flat += first * input.stride;
        }
        inputs.push_back(input);
    };
    const std::size_t fields = layout.fields().size();
    for (std::size_t i = 0; i < fields; ++i) shift(rows.fields[i]);
    for (std::size_t i = 0; i < next_count; ++i) shift(rows.next[i]);
    return {inputs.data(), count, rows.flags ? rows.flags + first : nullptr,
            next_count ? inputs.data() + fields : nullptr, rows.priorities ? rows.priorities + first : nullptr};
}

}  // namespace

// A channel for one call.
class RemoteRows::Borrowed {
public:
    explicit Borrowed(RemoteRows& rows) : rows_(rows), channel_(rows.take()) {}
    ~Borrowed() {
        if (channel_->has_abandoned()) channel_->give_up();
        const std::scoped_lock lock(rows_.idle_mutex_);
        rows_.idle_.push_back(std::move(channel_));
    }
    Borrowed(const Borrowed&) = delete;
    Borrowed& operator=(const Borrowed&) = delete;
    net::Channel* operator->() const { return channel_.get(); }

private:
    RemoteRows& rows_;
    std::unique_ptr<net::Channel> channel_;
};

std::shared_ptr<RemoteRows> RemoteRows::open(const std::string& address, const OpenOptions& options,
                                             Deadline deadline) {
    constexpr double kOpenTimeout = 5;
    const Deadline until = options.wait || deadline.left_s() < kOpenTimeout ? deadline : Deadline::in(kOpenTimeout);
    auto session = std::make_unique<net::Session>(net::read_address(address, options.keys));
    auto channel = std::make_unique<net::Channel>(*session);
    std::shared_ptr<RemoteRows> made;
    json::Value told;
    session->check = [&](const json::Value& facts) { told = facts; };
    session->renew(*channel, 0, until);
    const std::string where = "open(): '" + address + "'";
    if (told.at("kind", "OPEN").text("kind") != "rows") {
        throw Error(ErrorKind::storage, where + ": it is a buffer of " + told.at("kind", "OPEN").text("kind") +
                                            "; C++ opens a ReplayBuffer or a DistillationBuffer");
    }
    RowSpec spec = RowSpec::parse(description_of(told), capacity_of(told), where);
    return std::make_shared<RemoteRows>(address, std::move(spec), std::move(session), std::move(channel), told);
}

RemoteRows::RemoteRows(std::string address, RowSpec spec, std::unique_ptr<net::Session> session,
                       std::unique_ptr<net::Channel> channel, const json::Value& facts)
    : BufferRows(std::move(address), std::move(spec)),
      session_(std::move(session)),
      description_(description_of(facts)),
      layout_(this->spec()->fields),
      packer_(layout_),
      stream_token_(net::random_token()) {
    read_layout(facts);
    session_->check = [this](const json::Value& again) { check_same(again); };
    idle_.push_back(std::move(channel));
}

RemoteRows::~RemoteRows() {
    close();
    // What the parent's threads wait on cannot be destroyed in a forked child: it waits for them, which are not there.
    if (session_->is_foreign()) {
        [[maybe_unused]] const net::Session* left_to_parent = session_.release();
    }
}

void RemoteRows::check_same(const json::Value& facts) const {
    if (description_of(facts) != description_ || capacity_of(facts) != spec()->capacity) {
        throw Error(ErrorKind::storage, "'" + address() +
                                            "': the server was started again with another schema, sampler, view or "
                                            "capacity under this name; open it again");
    }
}

// Which array of an answer is which of a batch.
void RemoteRows::read_layout(const json::Value& facts) {
    const json::Value& arrays = facts.at("batch", "OPEN");
    if (arrays.is_null()) return;
    const Batch batch(spec(), 1);
    for (const json::Value& entry : arrays.list("batch")) {
        const std::vector<json::Value>& parts = entry.list("batch");
        if (parts.size() != 3) refuse_answer(address(), "an array of a batch has a path, a dtype and a shape");
        std::string name;
        for (const json::Value& key : parts[0].list("batch: path")) {
            name += (name.empty() ? "" : "/");
            name += key.is_text() ? key.text("batch: path") : std::to_string(key.whole("batch: path", 0, 1 << 20));
        }
        const Batch::Array* found = nullptr;
        for (const Batch::Array& array : batch.arrays()) {
            if (array.name == name) found = &array;
        }
        std::uint64_t bytes = dtype_bytes(parts[1].text("batch: dtype"));
        for (const json::Value& extent : parts[2].list("batch: shape")) {
            bytes *= static_cast<std::uint64_t>(extent.whole("batch: shape", 1, std::int64_t{1} << 40));
        }
        if (!found || found->bytes != bytes || found->dtype != parts[1].text("batch: dtype")) {
            refuse_answer(address(), "its batches have an array '" + name + "' of another form");
        }
        order_.push_back(static_cast<std::size_t>(found - batch.arrays().data()));
    }
    if (order_.size() != batch.arrays().size()) refuse_answer(address(), "its batches lack an array");
}

std::unique_ptr<net::Channel> RemoteRows::take() {
    session_->check_open();
    {
        const std::scoped_lock lock(idle_mutex_);
        if (!idle_.empty()) {
            std::unique_ptr<net::Channel> channel = std::move(idle_.back());
            idle_.pop_back();
            return channel;
        }
    }
    return std::make_unique<net::Channel>(*session_);
}

Reply RemoteRows::ask(std::string_view verb, Deadline deadline) {
    const Borrowed channel(*this);
    return channel->call_verb(verb, "{}", deadline);
}

// ---- adding ---------------------------------------------------------------------------------------------------------

void RemoteRows::add(const RowBatch& rows, Deadline deadline) {
    session_->check_open();
    std::unique_lock lock(adding_, std::defer_lock);
    while (!lock.try_lock_for(std::chrono::duration<double>(std::min(deadline.left_s(), kWaitSlice)))) {
        session_->check_open();
        check_interrupt();
        if (deadline.is_over())
            throw Error(ErrorKind::not_ready, "add(): another thread is adding; give a longer timeout_s");
    }
    if (!adder_) adder_ = std::make_unique<net::Channel>(*session_);
    // What an add before this one left open: its rows have been taken, or never will be.
    if (adder_->has_abandoned()) {
        const std::optional<Reply> settled = adder_->settle(deadline);
        if (settled && settled->head.status == net::Status::ok) acknowledged_ = settled->head.argument;
    }
    add_part(rows, deadline);
}

// Splits rows that make too large a message.
void RemoteRows::add_part(const RowBatch& rows, Deadline deadline) {
    packer_.clear();
    packer_.add(rows);
    const std::uint64_t bytes = packer_.bytes(), width = spec()->width();
    if (bytes + sizeof(net::Head) > session_->message_bytes()) {
        if (rows.rows <= width) {
            throw Error(ErrorKind::schema, "add(): a step has " + std::to_string(bytes) + " bytes, the server takes " +
                                               std::to_string(session_->message_bytes()) +
                                               "; give serve() larger limits={'message_bytes': ...}");
        }
        const std::size_t half = rows.rows / width / 2 * width;
        std::vector<FieldInput> inputs;
        add_part(part_of(rows, 0, half, inputs, layout_), deadline);
        add_part(part_of(rows, half, rows.rows - half, inputs, layout_), deadline);
        return;
    }
    body_.resize(bytes);
    packer_.write(body_.data());
    send_rows(body_, rows.rows, deadline);
}

std::uint64_t RemoteRows::open_stream(Deadline deadline) {
    const Reply reply = adder_->call_verb("open_stream", "{\"token\": \"" + stream_token_ + "\"}", deadline);
    const Document told(reply.body());
    stream_ = static_cast<std::uint32_t>(told.value().at("stream", "open_stream").whole("stream", 0, 0xffffffff));
    stream_generation_ = adder_->generation();
    return static_cast<std::uint64_t>(
        told.value().at("accepted", "open_stream").whole("accepted", 0, std::numeric_limits<std::int64_t>::max()));
}

void RemoteRows::send_rows(std::span<const std::byte> body, std::uint64_t rows, Deadline deadline) {
    bool is_sent = false;
    for (;;) {
        if (stream_generation_ == 0 || stream_generation_ != adder_->generation()) {
            const std::uint64_t accepted = open_stream(deadline);
            // Rows that are on their way keep their numbers: the server passes over those that it has. Otherwise what
            // it has more is of an add that was given up. What it has less is gone, with its memory or a file of
            // before.
            if (!is_sent || accepted < acknowledged_) acknowledged_ = accepted;
        }
        is_sent = true;
        std::optional<Reply> reply;
        try {
            reply = adder_->call({Verb::add, body, acknowledged_, stream_}, deadline);
        } catch (const Error& error) {
            if (error.kind() != ErrorKind::not_ready || !adder_->has_abandoned()) throw;
            throw Error(ErrorKind::not_ready,
                        std::string("add(): ") + error.what() + "; the rows of this call may still be taken");
        }
        if (!reply) continue;  // the session was made anew, and the stream has another number there
        if (reply->head.argument != acknowledged_ + rows) {
            refuse_answer(address(), "it has " + std::to_string(reply->head.argument) +
                                         " rows of this stream, expected " + std::to_string(acknowledged_ + rows));
        }
        acknowledged_ += rows;
        return;
    }
}

// ---- reading --------------------------------------------------------------------------------------------------------

void RemoteRows::read_arrays(std::span<const std::byte> body, Batch& batch) const {
    std::size_t place = 0;
    for (const std::size_t number : order_) {
        const Batch::Array& array = batch.arrays_[number];
        const std::size_t bytes = array.bytes * batch.size();
        place = (place + kArrayAlignment - 1) / kArrayAlignment * kArrayAlignment;
        if (place > body.size() || bytes > body.size() - place) refuse_answer(address(), "a batch is cut off");
        std::memcpy(array.data, body.data() + place, bytes);
        place += bytes;
    }
}

void RemoteRows::sample(Batch& batch, Deadline deadline) {
    const Borrowed channel(*this);
    const Reply reply = channel->call_until_answered({Verb::sample, {}, batch.size()}, deadline);
    if (reply.head.argument != batch.size()) refuse_answer(address(), "a batch of another size");
    if (order_.empty()) return read_document(reply.body(), batch);
    read_arrays(reply.body(), batch);
}

Updated RemoteRows::update_priorities(std::span<const std::int64_t> indices, std::span<const float> magnitudes,
                                      Deadline deadline) {
    std::vector<std::byte> body(indices.size_bytes() + magnitudes.size_bytes());
    if (!indices.empty()) {
        std::memcpy(body.data(), indices.data(), indices.size_bytes());
        std::memcpy(body.data() + indices.size_bytes(), magnitudes.data(), magnitudes.size_bytes());
    }
    const Borrowed channel(*this);
    const Reply reply = channel->call_until_answered({Verb::update, body, indices.size()}, deadline);
    std::uint64_t counts[2];
    if (reply.body().size() < sizeof counts) refuse_answer(address(), "two numbers of an update");
    std::memcpy(counts, reply.body().data(), sizeof counts);
    return {counts[0], counts[1]};
}

std::uint64_t RemoteRows::size() {
    const Reply reply = ask("len");
    return static_cast<std::uint64_t>(Document(reply.body()).value().whole("len", 0, std::int64_t{1} << 50));
}

std::map<std::string, double> RemoteRows::stats() {
    const Reply reply = ask("stats");
    const Document told(reply.body());
    std::map<std::string, double> numbers;
    for (const auto& [name, value] : told.value().object("stats")) {
        if (value.is_number() || value.find("$float")) numbers[name] = Document::number(value);
    }
    return numbers;
}

void RemoteRows::clear() { ask("clear"); }
void RemoteRows::flush() { ask("flush"); }

void RemoteRows::close() {
    if (session_->is_foreign() || session_->is_closed()) return;
    try {
        const Borrowed channel(*this);
        session_->say_bye(*channel.operator->());
    } catch (const Error&) {
        // The server finds out by itself, after its client_timeout.
    }
    session_->close();
}

}  // namespace sharpwave

extern "C" void sharpwave_net_open(const std::string& address, const sharpwave::OpenOptions& options,
                                   sharpwave::Deadline deadline, std::shared_ptr<sharpwave::BufferRows>& rows) {
    rows = sharpwave::RemoteRows::open(address, options, deadline);
}
