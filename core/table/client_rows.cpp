#include "table/client_rows.h"

#include <algorithm>
#include <string>

#include "base/error.h"
#include "base/fault.h"
#include "table/dead_writers.h"
#include "table/writer.h"

namespace sharpwave {

using namespace format;

ClientToken ClientRows::token() const {
    return {record_.client_token[0].load(std::memory_order_relaxed),
            record_.client_token[1].load(std::memory_order_relaxed)};
}

void ClientRows::begin(const ClientToken& token, std::uint64_t stamp) {
    forget();
    record_.client_sequence.store(0, std::memory_order_release);
    record_.pending_sequence.store(0, std::memory_order_release);
    record_.pending_position.store(kNone, std::memory_order_release);
    for (const std::size_t half : {0, 1}) record_.client_token[half].store(token[half], std::memory_order_release);
    SHARPWAVE_FAULT(client_named);
    record_.client_used.store(stamp);
}

// Each store releases those before it: a process that dies between two of them leaves a record that makes sense.
void ClientRows::begin_piece(std::uint64_t position, std::uint64_t rows) {
    record_.pending_position.store(position, std::memory_order_release);
    record_.pending_sequence.store(accepted() + rows, std::memory_order_release);
    fence(std::memory_order_release);  // no row changes before this is said
    SHARPWAVE_FAULT(piece_begun);
}

void ClientRows::end_piece(std::uint64_t rows) {
    const std::uint64_t now = accepted() + rows;
    record_.pending_sequence.store(now, std::memory_order_release);  // less than was said, where an error cut it short
    SHARPWAVE_FAULT(piece_written);
    record_.client_sequence.store(now, std::memory_order_release);
    SHARPWAVE_FAULT(piece_accepted);
}

namespace {

bool is_step_finished(const Table& table, std::uint64_t slot, std::uint64_t serial) {
    for (std::uint64_t env = 0; env < table.width(); ++env) {
        const std::uint64_t seen = table.load_word(slot + env);
        const bool is_done = state_of(seen) == kCommitted || state_of(seen) == kVoid;
        if (serial_of(seen) != serial + env || !is_done) return false;
    }
    return true;
}

}  // namespace

void ClientRows::settle(Table& table, std::uint64_t writer) {
    WriterRecord& record = table.writer_record(writer);
    ClientRows client(record);
    const std::uint64_t accepted = client.accepted(), pending = record.pending_sequence.load();
    if (!client.has_client() || pending == accepted) return;
    const Position at = table.position(writer), begin = table.unpacked(record.pending_position.load());
    std::uint64_t finished = 0;
    if (pending > accepted && at.ticket != kNone && at.ticket == begin.ticket) {
        const std::uint64_t block = at.ticket % table.blocks(), width = table.width();
        const std::uint64_t length = table.block_length(block);
        const std::uint64_t first = std::min(begin.head, length) / width * width;
        const std::uint64_t end = first + std::min(pending - accepted, length - first);
        // Rows below the head are done, whatever became of them since: a full block may have another writer by now.
        std::uint64_t head = std::max(first, std::min(at.head, end) / width * width);
        const bool is_its_own = table.block_record(block).ticket.load() == at.ticket;
        const std::uint64_t base = block * table.block_rows(), serial = at.ticket * table.block_rows();
        while (is_its_own && head + width <= end && is_step_finished(table, base + head, serial + head)) head += width;
        finished = head - first;
    }
    // The smaller bound first: a second settling, of rows that the first one made VOID, comes to the same count.
    record.pending_sequence.store(accepted + finished);
    SHARPWAVE_FAULT(client_settled);
    record.client_sequence.store(accepted + finished);
}

std::uint64_t ClientRows::next_stamp(const Table& table) {
    std::uint64_t newest = 0;
    for (std::uint64_t i = 0; i < table.max_writers(); ++i)
        newest = std::max(newest, table.writer_record(i).client_used.load(std::memory_order_relaxed));
    return newest + 1;
}

// ---- the table's part -----------------------------------------------------------------------------------------------

std::optional<std::uint64_t> Table::accepted(const ClientToken& token) {
    check_open();
    DeadWriters(*this).reclaim();
    for (std::uint64_t i = 0; i < header_->max_writers; ++i) {
        const ClientRows client(writers_[i]);
        if (client.is_of(token)) return client.accepted();
    }
    return {};
}

std::vector<std::pair<ClientToken, std::uint64_t>> Table::clients() {
    check_open();
    DeadWriters(*this).reclaim();
    std::vector<std::pair<ClientToken, std::uint64_t>> clients;
    for (std::uint64_t i = 0; i < header_->max_writers; ++i) {
        const ClientRows client(writers_[i]);
        if (client.has_client()) clients.emplace_back(client.token(), client.accepted());
    }
    return clients;
}

std::unique_ptr<Writer> Table::writer(const ClientToken& token) {
    check_open();
    DeadWriters(*this).reclaim();
    const auto refuse = [](const char* why) {
        throw Error(ErrorKind::not_ready, std::string("writer(): this client's token is held by ") + why);
    };
    const std::uint64_t me = owner_word(seat(), tag());
    for (std::uint64_t i = 0; i < header_->max_writers; ++i) {
        if (!ClientRows(writers_[i]).is_of(token)) continue;
        std::uint64_t owner = 0;
        if (!writers_[i].owner.compare_exchange_strong(owner, me, std::memory_order_acq_rel)) {
            refuse(owner == kParked ? "a closed writer whose last observations need disk or shared-memory space; free "
                                      "some"
                                    : "a live writer; close that one first, or wait until its process has ended");
        }
        if (ClientRows(writers_[i]).is_of(token)) return make_writer(i, &token);
        writers_[i].owner.store(0, std::memory_order_release);  // another writer had the record in between
        break;
    }
    const std::uint64_t mine = take_record(me);
    ClientRows(writers_[mine]).begin(token, ClientRows::next_stamp(*this));
    for (std::uint64_t i = 0; i < header_->max_writers; ++i) {
        if (i == mine || !ClientRows(writers_[i]).is_of(token)) continue;
        // Two began at once: at least one of them sees the other here.
        ClientRows(writers_[mine]).forget();
        writers_[mine].owner.store(0, std::memory_order_release);
        refuse("a live writer that was opened at the same time; try again");
    }
    return make_writer(mine, &token);
}

// ---- the writer's part ----------------------------------------------------------------------------------------------

namespace {

// A batch without its first rows.
class LaterRows {
public:
    LaterRows(const RowBatch& batch, const RowLayout& layout, std::size_t skipped) : batch_(batch) {
        if (skipped == 0) return;
        std::size_t next = 0;
        for (const Field& field : layout.fields()) next += field.gives_next;
        const auto shift = [&](const FieldInput* inputs, std::size_t count, std::vector<FieldInput>& to) {
            to.assign(inputs, inputs + count);
            for (FieldInput& input : to) {
                if (input.starts) {
                    input.starts += skipped;
                } else {
                    input.flat += skipped * input.stride;
                }
            }
            return to.data();
        };
        batch_.fields = shift(batch.fields, layout.fields().size(), fields_);
        if (batch.next) batch_.next = shift(batch.next, next, next_);
        if (batch.flags) batch_.flags += skipped;
        if (batch.priorities) batch_.priorities += skipped;
        batch_.rows -= skipped;
    }
    const RowBatch& batch() const { return batch_; }

private:
    RowBatch batch_;
    std::vector<FieldInput> fields_, next_;
};

}  // namespace

void Writer::check_once(const RowBatch& batch, std::uint64_t first_row) const {
    const auto refuse = [](const std::string& what) { throw Error(ErrorKind::schema, "append_once(): " + what); };
    if (!has_client_) refuse("expected a writer that was made with a client's token");
    const std::uint64_t width = at_.table.width();
    if (first_row % width != 0 || batch.rows % width != 0) {
        refuse("expected whole steps of " + std::to_string(width) + " rows, got rows " + std::to_string(first_row) +
               " to " + std::to_string(first_row + batch.rows));
    }
    const std::uint64_t accepted = this->accepted();
    if (first_row > accepted) {
        refuse("expected row " + std::to_string(accepted) + " or an earlier one, got first_row=" +
               std::to_string(first_row) + "; the rows between were not sent or not accepted: send them first");
    }
}

// Of a piece at the head. Where space may be lacking, it is one group: what an error leaves unwritten is whole steps.
std::size_t Writer::piece_rows() const {
    const std::size_t width = at_.open_rows.size(), left = at_.length - at_.head;
    if (is_plain_) return left;
    return std::min<std::size_t>(left, width < kGroupRows ? kGroupRows / width * width : width);
}

// Space for all groups of a step, before the first of them.
void Writer::ensure_step() {
    const std::size_t width = at_.open_rows.size();
    if (at_.table.layout().uses_heap()) at_.heap.ensure(width * at_.table.layout().heap_row_bytes());
    if (derives_) next_.ensure_space(width);
}

// From `done` on as many rows of the batch as a piece has, and said in the record before and after.
void Writer::append_piece(const RowBatch& batch, std::uint64_t* serials, std::size_t& done, bool waits) {
    if (!hold_block(waits)) return;
    const std::size_t begin = done, end = begin + std::min(piece_rows(), batch.rows - begin);
    if (!is_plain_ && at_.open_rows.size() > 1) ensure_step();
    ClientRows client(at_.record);
    client.begin_piece(at_.table.packed(at_.ticket, at_.head), end - begin);
    const auto finish = [&] {
        client.end_piece(done - begin);
        accepted_.store(client.accepted(), std::memory_order_release);
    };
    try {
        append_held(batch, serials, done, end, waits);
    } catch (...) {
        finish();
        throw;
    }
    finish();
}

// The rows that were not accepted before.
std::uint64_t Writer::append_later(const RowBatch& batch, std::uint64_t first_row, std::uint64_t* serials, bool waits) {
    check_once(batch, first_row);
    const std::uint64_t skipped = std::min<std::uint64_t>(accepted() - first_row, batch.rows);
    if (serials) std::fill(serials, serials + batch.rows, kNone);
    if (skipped == batch.rows) return accepted();
    const LaterRows later(batch, at_.table.layout(), skipped);
    const std::size_t rows = later.batch().rows;
    if (stacks_) history_.check(later.batch());
    std::size_t done = 0;
    try {
        while (done < rows) append_piece(later.batch(), serials ? serials + skipped : nullptr, done, waits);
    } catch (const Error& error) {
        if (done == 0) throw;
        throw Error(error.kind(), std::string(error.what()) + "; rows " + std::to_string(accepted() - done) + " to " +
                                      std::to_string(accepted()) + " of this client were added, the " +
                                      std::to_string(rows - done) + " behind them were not");
    }
    return accepted();
}

}  // namespace sharpwave
