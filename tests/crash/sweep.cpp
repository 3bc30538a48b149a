// Processes die, others go on: children are killed at every labelled place of the engine (base/fault.h) and at random
// instants, while they write, draw, update, save, open and clean up after each other. After each death a survivor, or
// whoever opens the table next, is held to what is promised: docs/how-to/share-a-buffer.md.
//
//     sharpwave_crash ROUNDS SEED FOLDER
//
// A round that fails prints itself and what was wrong; the same seed gives the same rounds (random instants apart).
// SWEEP_KIND=mutable takes only the tables whose names have the word.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/fault.h"
#include "batches/batch_maker.h"
#include "sampling/pace.h"
#include "table/client_rows.h"
#include "table/codec.h"
#include "table/table.h"
#include "table/write_back.h"
#include "table/writer.h"

using namespace sharpwave;
using namespace sharpwave::format;

namespace {

// ---- what kind of table ---------------------------------------------------------------------------------------------

struct Setup {
    const char* name;
    std::uint64_t capacity, width, block_rows;
    bool by_priority = false, derived = false, packed = false, windows = false, checksums = false;
    std::uint32_t stack = 1;
    bool mutables = false;
};

constexpr std::uint64_t kItems = 23, kStates = 37;

const Setup kSetups[] = {
    {"one env", 600, 1, 40},
    {"four envs", 800, 4, 40},
    {"one block", 50, 1, 50},
    {"by priority", 640, 1, 32, true},
    {"by priority, four envs, checksums", 800, 4, 40, true, false, false, false, true},
    {"derived", 600, 1, 40, false, true},
    {"derived, two envs, by priority", 600, 2, 40, true, true},
    {"packed", 600, 1, 40, false, false, true},
    {"packed, derived, stacked", 600, 2, 40, true, true, true, false, true, 3},
    {"stacked", 600, 2, 40, false, false, false, false, false, 3},
    {"windows", 640, 2, 32, false, false, false, true},
    {"wide", 64 * 20, 64, 64, false, false, false, false, true},
    {"wide, derived", 40 * 30, 20, 40, false, true, false, false, true},
    {"stacked, checksums", 600, 2, 40, false, false, false, false, true, 3},
    {"mutable", 600, 1, 40, false, false, false, false, false, 1, true},
    {"mutable, two envs, by priority, checksums", 600, 2, 40, true, false, false, false, true, 1, true},
    {"mutable, packed, derived, checksums", 600, 2, 40, false, true, true, false, true, 1, true},
};

TableConfig config_of(const Setup& kind) {
    TableConfig config;
    config.capacity = kind.capacity;
    config.width = kind.width;
    config.block_rows = kind.block_rows;
    config.max_writers = 4;
    config.seed = 7;
    config.checksums = kind.checksums;
    config.fields = {{"id", "<u8", 8, {}}, {"obs", "<u4", 4, {static_cast<std::int64_t>(kItems)}}};
    config.fields[1].gives_next = kind.derived;
    config.fields[1].stack = kind.stack;
    if (kind.packed && has_codecs()) config.fields[1].codec = Codec::lz4;
    if (kind.mutables) {
        config.fields.push_back({"state", "<u4", 4, {static_cast<std::int64_t>(kStates)}});
        config.fields.push_back({"mark", "<u8", 8, {}});
        config.fields[2].is_mutable = config.fields[3].is_mutable = true;
    }
    config.index.is_by_priority = kind.by_priority;
    config.index.has_index = kind.by_priority || kind.windows;
    config.index.numbers_steps = kind.windows;
    config.description = "{}";
    return config;
}

BatchConfig sampler_of(const Setup& kind) {
    BatchConfig config;
    config.view.leaves = {{0, Role::own}, {1, Role::own}};
    // The last two outputs of Sample, whatever stands between.
    if (kind.derived) config.view.leaves.push_back({1, Role::next});
    if (kind.mutables) {
        config.view.leaves.push_back({2, Role::own});
        config.view.leaves.push_back({3, Role::own});
    }
    if (kind.by_priority || kind.windows) config.index.emplace();
    if (kind.windows) {
        config.index->starts.needs = StartRule::Needs::rows;
        config.index->starts.length = 5;
    }
    return config;
}

// ---- what a row holds -----------------------------------------------------------------------------------------------

// Everything about a row follows from who wrote it and the how manieth of its rows it is.
std::uint64_t id_of(std::uint64_t tag, std::uint64_t number) { return tag << 32 | number; }
std::uint32_t item_of(std::uint64_t id, std::uint64_t i) {
    return static_cast<std::uint32_t>((id * 2654435761u >> 7) + i / 4);
}
// What is written back: the row's name and the number of the write; 0 is its add.
std::uint64_t mark_of(std::uint64_t id, std::uint64_t version) { return (id * 2654435761u >> 9) << 32 | version; }
std::uint32_t state_of_mark(std::uint64_t mark, std::uint64_t k) {
    return static_cast<std::uint32_t>((mark ^ mark >> 32) * 2654435761u + k);
}

struct Marks {
    explicit Marks(std::size_t count) : states(count * kStates), marks(count) {}
    void set(const std::vector<std::uint64_t>& ids, std::uint64_t version) {
        for (std::size_t i = 0; i < ids.size(); ++i) {
            marks[i] = mark_of(ids[i], version);
            for (std::uint64_t k = 0; k < kStates; ++k) states[i * kStates + k] = state_of_mark(marks[i], k);
        }
    }
    bool is_whole(std::size_t i) const {
        for (std::uint64_t k = 0; k < kStates; ++k) {
            if (states[i * kStates + k] != state_of_mark(marks[i], k)) return false;
        }
        return true;
    }
    std::vector<std::uint32_t> states;
    std::vector<std::uint64_t> marks;
};

bool is_end(std::uint64_t id) { return id * 40503 % 29 == 0; }
bool is_masked(std::uint64_t id, std::uint64_t width) { return width > 1 && id * 30011 % 17 == 0; }

struct Batch {
    Batch(const Setup& kind, std::uint64_t tag, std::uint64_t first_step, std::uint64_t steps)
        : ids(steps * kind.width),
          obs(ids.size() * kItems),
          next(ids.size() * kItems),
          flags(ids.size()),
          back(ids.size()) {
        for (std::size_t i = 0; i < ids.size(); ++i) {
            const std::uint64_t number = first_step * kind.width + i;
            ids[i] = id_of(tag, number);
            flags[i] = is_masked(ids[i], kind.width) ? kRowVoid : is_end(ids[i]) ? kRowTerminated : 0;
            std::uint64_t after = number + kind.width;
            while (is_masked(id_of(tag, after), kind.width)) after += kind.width;
            for (std::uint64_t k = 0; k < kItems; ++k) {
                obs[i * kItems + k] = item_of(ids[i], k);
                next[i * kItems + k] = item_of(id_of(tag, after), k);
            }
        }
        back.set(ids, 0);
    }
    void append(Writer& writer) const {
        with_rows([&](const RowBatch& batch) { writer.append(batch); });
    }
    void append_once(Writer& writer, std::uint64_t first_row) const {
        with_rows([&](const RowBatch& batch) { writer.append_once(batch, first_row); });
    }
    void with_rows(auto&& use) const {
        const FieldInput fields[] = {{reinterpret_cast<const std::byte*>(ids.data()), 8},
                                     {reinterpret_cast<const std::byte*>(obs.data()), kItems * 4},
                                     {reinterpret_cast<const std::byte*>(back.states.data()), kStates * 4},
                                     {reinterpret_cast<const std::byte*>(back.marks.data()), 8}};
        const FieldInput after[] = {{reinterpret_cast<const std::byte*>(next.data()), kItems * 4}};
        use(RowBatch{fields, ids.size(), flags.data(), after});
    }
    std::vector<std::uint64_t> ids;
    std::vector<std::uint32_t> obs, next;
    std::vector<std::uint8_t> flags;
    Marks back;
};

// ---- what children do -----------------------------------------------------------------------------------------------

struct Told {
    std::atomic<std::uint64_t> begun{0}, acked{0};       // steps
    std::atomic<std::uint64_t> cleared{0}, clearing{0};  // steps that are cleared, and that may be
    std::atomic<std::uint64_t> version{0}, covered{0};   // the last write that returned, and the steps that it covered
    std::atomic<bool> started{false};
    std::atomic<pid_t> heir{0};  // a child that the dead one left
};
Told* told = nullptr;

// A child that outlives its parent: it must keep nothing alive that was its parent's.
void leave_an_heir() {
    if (fork() == 0) {
        told->heir = getpid();  // by now it has closed what it must not keep
        alarm(10);              // in case the round fails and nobody ends it
        for (;;) pause();
    }
    while (told->heir == 0) usleep(50);
}

// The client whose rows have this tag.
ClientToken token_of(std::uint64_t tag) { return {tag * 0x9e3779b97f4a7c15u, tag}; }

// send: rows of a client, which are sent again after its death.
enum class Job { write, send, learn, pace, save, open, create, close, clear, amend };

struct Place {
    Fault fault;
    Job role;
    bool first_in = false;    // nobody else may have the table open
    bool needs_dead = false;  // a writer must have died before
};

const Place kPlaces[] = {
    {Fault::create_before_name, Job::create},
    {Fault::attach_at_door, Job::open},
    {Fault::attach_half_recovered, Job::open, true, true},
    {Fault::attach_before_settled, Job::open, true, true},
    {Fault::writer_taken, Job::write},
    {Fault::claim_ticket, Job::write},
    {Fault::claim_owner, Job::write},
    {Fault::claim_linked, Job::write},
    {Fault::claim_block_ticket, Job::write},
    {Fault::claim_record_ticket, Job::write},
    {Fault::row_writing, Job::write},
    {Fault::row_copied, Job::write},
    {Fault::row_half_committed, Job::write},
    {Fault::row_committed, Job::write},
    {Fault::row_half_counted, Job::write},
    {Fault::row_counted, Job::write},
    {Fault::head_moved, Job::write},
    {Fault::heap_placed, Job::write},
    {Fault::next_waiting, Job::write},
    {Fault::final_kept, Job::write},
    {Fault::close_ended, Job::close},
    {Fault::reclaim_begun, Job::write, false, true},
    {Fault::reclaim_settled, Job::write, false, true},
    {Fault::reclaim_half_counted, Job::write, false, true},
    {Fault::reclaim_counted, Job::write, false, true},
    {Fault::reclaim_freed, Job::write, false, true},
    {Fault::index_locked, Job::learn},
    {Fault::index_half_taken_in, Job::learn},
    {Fault::index_taken_in, Job::learn},
    {Fault::index_half_rebuilt, Job::learn, true},
    {Fault::index_half_updated, Job::learn},
    {Fault::index_updated, Job::learn},
    {Fault::index_drawn, Job::learn},
    {Fault::pace_reserved, Job::pace},
    {Fault::save_rows_copied, Job::save},
    {Fault::save_index_locked, Job::save},
    {Fault::save_before_name, Job::save},
    {Fault::leave_at_door, Job::open, true},
    {Fault::leave_flushed, Job::open, true},
    {Fault::clear_origin, Job::clear},
    {Fault::clear_ticket, Job::clear},
    {Fault::claim_space, Job::write},
    {Fault::publish_renaming, Job::save},
    {Fault::claim_unlinked, Job::write},
    {Fault::settle_void, Job::write, false, true},
    {Fault::retired_uncounted, Job::write},
    {Fault::count_stored, Job::write},
    {Fault::mutable_begun, Job::write},
    {Fault::write_locked, Job::amend},
    {Fault::write_half_copied, Job::amend},
    {Fault::write_copied, Job::amend},
    {Fault::write_published, Job::amend},
    {Fault::write_marked, Job::amend},
    {Fault::client_named, Job::send},
    {Fault::piece_begun, Job::send},
    {Fault::piece_written, Job::send},
    {Fault::piece_accepted, Job::send},
    {Fault::client_settled, Job::write, false, true},
};
static_assert(std::size(kPlaces) == static_cast<std::size_t>(Fault::count));

bool suits(const Setup& kind, Fault fault) {
    switch (fault) {
        case Fault::heap_placed:
            return kind.packed && has_codecs();
        case Fault::client_named:
        case Fault::piece_begun:
        case Fault::piece_written:
        case Fault::piece_accepted:
        case Fault::client_settled:
            return kind.block_rows != kind.capacity;
        case Fault::retired_uncounted:
            return kind.stack > 1;
        case Fault::settle_void:
            return kind.width > 1;
        case Fault::claim_space:
            return kind.derived || (kind.packed && has_codecs());
        case Fault::next_waiting:
        case Fault::final_kept:
            return kind.derived;
        case Fault::mutable_begun:
        case Fault::write_locked:
        case Fault::write_half_copied:
        case Fault::write_copied:
        case Fault::write_published:
        case Fault::write_marked:
            return kind.mutables;
        case Fault::index_half_updated:
        case Fault::index_updated:
            return kind.by_priority;
        case Fault::index_locked:
        case Fault::index_half_taken_in:
        case Fault::index_taken_in:
        case Fault::index_half_rebuilt:
        case Fault::index_drawn:
        case Fault::save_index_locked:
            return kind.by_priority || kind.windows;
        default:
            return true;
    }
}

struct Sample {
    explicit Sample(std::size_t count)
        : ids(count), obs(count * kItems * 8), next(count * kItems * 8), serials(count), back(count) {}
    Sample(const Setup& kind, std::size_t count) : Sample(count) {
        if (!kind.derived) flats.pop_back();
        flats.push_back(reinterpret_cast<std::byte*>(back.states.data()));
        flats.push_back(reinterpret_cast<std::byte*>(back.marks.data()));
    }
    std::vector<std::uint64_t> ids;
    std::vector<std::uint32_t> obs, next;
    std::vector<std::uint64_t> serials;
    Marks back;
    std::vector<float> weights = std::vector<float>(ids.size());
    std::vector<double> probabilities = std::vector<double>(ids.size());
    std::vector<std::byte*> flats = {reinterpret_cast<std::byte*>(ids.data()), reinterpret_cast<std::byte*>(obs.data()),
                                     reinterpret_cast<std::byte*>(next.data())};
    void draw(BatchMaker& batches) {
        try {
            batches.sample(ids.size(), {flats.data()}, {serials.data(), weights.data(), probabilities.data()});
        } catch (const Error& error) {
            if (error.kind() != ErrorKind::not_ready) throw;  // no window fits, or nothing is there
            ids.clear();
        }
    }
};

[[noreturn]] void live(const Setup& kind, const std::string& path, Job role, std::uint64_t tag, std::uint64_t steps,
                       std::uint64_t seed, Told& told) {
    std::mt19937_64 random(seed);
    const auto forever = [&](auto&& work) {
        for (;;) work();
    };
    try {
        if (role == Job::open) {
            told.started = true;
            forever([&] { Table::attach(path); });
        }
        if (role == Job::create) {
            told.started = true;
            forever([&] {
                const std::string other = path + "-other";
                Table::create(config_of(kind), other, true);
                std::filesystem::remove(other);
            });
        }
        auto table = Table::attach(path);
        const auto write = [&](Writer& writer) {
            const std::uint64_t step = told.begun.load(), count = std::min(random() % 5 + 1, steps - step);
            const Batch batch(kind, tag, step, count);
            told.begun = step + count;
            if (writer.has_client()) {
                batch.append_once(writer, step * kind.width);
            } else {
                batch.append(writer);
            }
            told.acked = step + count;
            told.started = true;
        };
        if (role == Job::clear) {
            auto writer = table->writer();
            forever([&] {
                for (int i = 0; i < 3 && told.begun < steps; ++i) write(*writer);
                told.clearing = told.begun.load();
                table->clear();
                told.cleared = told.clearing.load();
                told.started = true;
            });
        }
        if (role == Job::write || role == Job::send || role == Job::close) {
            auto writer = role == Job::send ? table->writer(token_of(tag)) : table->writer();
            while (told.begun < steps) write(*writer);
            if (role == Job::close) writer.reset();
            told.started = true;
            for (;;) pause();
        }
        auto batches = std::make_shared<BatchMaker>(table, sampler_of(kind));
        if (role == Job::learn) {
            Sample sample(kind, 16);
            std::vector<float> priorities(16);
            auto writer = table->writer();
            forever([&] {
                if (told.begun < steps) write(*writer);
                sample.ids.resize(16);
                sample.draw(*batches);
                told.started = true;
                if (sample.ids.empty() || !kind.by_priority) return;
                for (float& priority : priorities) priority = static_cast<float>(random() % 1000);
                batches->index()->update(sample.serials.data(), priorities.data(), 16);
            });
        }
        if (role == Job::pace) {
            Pace pace(table, batches->shared_index(), {1, 1, -1e9, 1e9});
            auto writer = table->writer();
            while (told.begun < steps) {
                pace.try_reserve(Pace::Side::add, 5 * kind.width);
                write(*writer);
                pace.settle(Pace::Side::add, 5 * kind.width, true);
            }
            for (;;) ::pause();
        }
        if (role == Job::amend) {
            auto writer = table->writer();
            forever([&] {
                if (told.begun < steps) write(*writer);
                std::vector<std::uint64_t> serials = table->live_serials(), words(serials.size());
                Sample rows(kind, serials.size());
                batches->read(serials.data(), serials.size(), {rows.flats.data()}, words.data());
                const std::uint64_t covered = told.acked.load(), version = told.version.load() + 1;
                rows.back.set(rows.ids, version);
                write_back(*table, serials.data(), serials.size(),
                           {{2, reinterpret_cast<const std::byte*>(rows.back.states.data())},
                            {3, reinterpret_cast<const std::byte*>(rows.back.marks.data())}},
                           false);
                told.covered = covered;
                told.version = version;
                told.started = true;
            });
        }
        // save
        told.started = true;
        forever([&] { table->save(path + ".snapshot"); });
    } catch (const std::exception& error) {
        std::fprintf(stderr, "child: %s\n", error.what());
    }
    _exit(3);
}

// ---- what must hold -------------------------------------------------------------------------------------------------

struct Round {
    std::string text;
    [[noreturn]] void fail(const std::string& what) const {
        std::fprintf(stderr, "FAILED: %s\n  %s\n", text.c_str(), what.c_str());
        std::exit(1);
    }
    void check(bool holds, const std::string& what) const {
        if (!holds) fail(what);
    }
};

struct Dead {
    std::uint64_t tag, begun, acked, cleared, clearing;
    std::uint64_t version = 0, covered = 0, own_steps = 0;  // what it wrote back, and the survivor's steps before it
    bool is_client = false;
};

// Of values that are written back each row has those of one write, of no earlier one than was told.
void check_marks(const Round& round, const Setup& kind, const Sample& rows, const std::vector<Dead>& dead,
                 std::uint64_t newest) {
    for (std::size_t i = 0; kind.mutables && i < rows.ids.size(); ++i) {
        const std::uint64_t id = rows.ids[i], tag = id >> 32, step = (id & 0xffffffff) / kind.width;
        const std::uint64_t version = rows.back.marks[i] & 0xffffffff;
        const std::string name = "row " + std::to_string(id & 0xffffffff) + " of writer " + std::to_string(tag);
        round.check(rows.back.is_whole(i), name + " has half a written value");
        round.check(rows.back.marks[i] == mark_of(id, version), name + " has another row's value");
        round.check(version <= newest + 1, name + " has a value that nobody wrote");
        for (const Dead& one : dead) {
            const bool is_covered = tag == one.tag ? step < one.covered
                                    : tag == 0     ? step < one.own_steps
                                                   : tag < one.tag;
            if (is_covered) round.check(version >= one.version, name + " has lost a write that had returned");
        }
    }
}

void check_table(const Round& round, const Setup& kind, const std::shared_ptr<Table>& table, BatchMaker& batches,
                 const std::vector<Dead>& dead) {
    std::vector<std::uint64_t> serials = table->live_serials(), words(serials.size());
    Sample rows(kind, serials.size());
    try {
        batches.read(serials.data(), serials.size(), {rows.flats.data()}, words.data());
    } catch (const Error& error) {
        // Who it is, for whoever looks into it.
        std::string what = error.what();
        for (std::uint64_t serial : serials) {
            Sample one(kind, 1);
            std::size_t skipped = 0;
            std::uint64_t name = serial, word = table->word(table->slot_of(serial)), row = 0;
            batches.read(&name, 1, {one.flats.data()}, &row, &skipped);
            if (!skipped) continue;
            std::memcpy(&one.ids[0], table->view().rows + table->slot_of(serial) * table->header().row_bytes + 8, 8);
            what += "; row " + std::to_string(one.ids[0] & 0xffffffff) + " of writer " +
                    std::to_string(one.ids[0] >> 32) + ", flags and state " + std::to_string(word & 1023);
        }
        round.fail(what);
    }
    check_marks(round, kind, rows, dead, told->version.load());
    // Every row is whole, and a writer's rows stand in their order.
    std::map<std::uint64_t, std::uint64_t> words_of, newest_of;
    for (std::size_t i = 0; i < serials.size(); ++i) {
        const std::uint64_t id = rows.ids[i], tag = id >> 32;
        const std::string name = "row " + std::to_string(id & 0xffffffff) + " of writer " + std::to_string(tag);
        const std::uint32_t* newest = &rows.obs[(i * kind.stack + kind.stack - 1) * kItems];
        for (std::uint64_t k = 0; k < kItems; ++k) round.check(newest[k] == item_of(id, k), name + " is torn");
        if (kind.derived && tag != 0) {
            std::uint64_t after = id + kind.width;
            while (is_masked(after, kind.width)) after += kind.width;
            const std::uint32_t* next = &rows.next[(i * kind.stack + kind.stack - 1) * kItems];
            for (std::uint64_t k = 0; k < kItems; ++k) {
                round.check(next[k] == item_of(after, k), name + " has another row's next observation");
            }
        }
        round.check(words_of.emplace(id, words[i]).second, name + " is there twice");
        std::uint64_t& before = newest_of[tag];
        round.check(tag == 0 || before <= id, name + " stands behind a later one");  // 0: many writers
        before = id;
    }
    for (const Dead& one : dead) {
        // Every acknowledged row is there; of the running add there may be some.
        // What was cleared is gone; a clear that was running took all of it or nothing.
        std::uint64_t kept = 0, gone = 0;
        for (std::uint64_t number = 0; number < one.clearing * kind.width; ++number) {
            const std::uint64_t id = id_of(one.tag, number);
            if (is_masked(id, kind.width)) continue;
            const bool is_there = words_of.count(id) != 0;
            if (number < one.cleared * kind.width) {
                round.check(!is_there, "row " + std::to_string(number) + " was cleared and is there");
            } else {
                ++(is_there ? kept : gone);
            }
        }
        round.check(kept == 0 || gone == 0, std::to_string(gone) + " rows were cleared, " + std::to_string(kept) +
                                                " of the same clear were not");
        for (std::uint64_t number = one.clearing * kind.width; number < one.acked * kind.width; ++number) {
            const std::uint64_t id = id_of(one.tag, number);
            if (is_masked(id, kind.width)) continue;
            if (!words_of.count(id) && std::getenv("SWEEP_LOG")) {
                for (std::uint64_t slot = 0; slot < table->header().slots; ++slot) {
                    std::uint64_t found;
                    std::memcpy(&found, table->view().rows + slot * table->header().row_bytes + 8, 8);
                    if (found == id)
                        std::fprintf(stderr, "  its slot is %lu, flags and state %lu, serial %lu\n", slot,
                                     table->word(slot) & 1023, serial_of(table->word(slot)));
                }
            }
            round.check(words_of.count(id), "acknowledged row " + std::to_string(number) + " of " +
                                                std::to_string(one.acked * kind.width) + " is gone");
        }
        // Its open episodes are over.
        for (std::uint64_t env = 0; env < kind.width; ++env) {
            for (std::uint64_t step = one.begun; step-- > 0;) {
                const auto found = words_of.find(id_of(one.tag, step * kind.width + env));
                if (found == words_of.end()) continue;
                round.check(found->second & kEndMask, "the last episode of env " + std::to_string(env) + " is open");
                break;
            }
        }
    }
    round.check(words_of.lower_bound(id_of(dead.back().tag, dead.back().begun * kind.width)) == words_of.end(),
                "there are rows that nobody wrote");
    round.check(serials.size() <= table->capacity(), "there are more rows than capacity");
    round.check(table->size() == serials.size(), "size() says " + std::to_string(table->size()) + ", there are " +
                                                     std::to_string(serials.size()) + " rows");
    if (RowIndex* index = batches.index()) {
        const double total = index->total(), sum = index->recomputed_total();
        round.check(std::fabs(total - sum) <= 1e-9 * std::max(1.0, sum), "the tree's sum is not that of the leaves");
        // Rows that another writer retired leave the index when a draw meets them.
        const std::uint64_t rows = index->rows(), more = kind.derived || kind.packed || kind.stack > 1 ? 64 : 0;
        if (!kind.windows) {
            round.check(rows >= serials.size() && rows <= serials.size() + more,
                        "the index has " + std::to_string(rows) + " rows, the table " + std::to_string(serials.size()));
        }
    }
}

// A client returns and sends again what it has no answer for, and rows before that: each is there once.
void send_again(const Round& round, const Setup& kind, const std::shared_ptr<Table>& table, Dead& one,
                std::mt19937_64& random) {
    const std::optional<std::uint64_t> known = table->accepted(token_of(one.tag));
    round.check(known || one.acked == 0, "the client's rows were accepted and its token is not known");
    const std::uint64_t accepted = known.value_or(0);
    const std::string count = std::to_string(accepted) + " rows, " + std::to_string(one.acked * kind.width) +
                              " acknowledged, " + std::to_string(one.begun * kind.width) + " begun";
    round.check(accepted % kind.width == 0 && accepted >= one.acked * kind.width && accepted <= one.begun * kind.width,
                "the client's count is " + count);
    auto writer = table->writer(token_of(one.tag));
    round.check(writer->accepted() == accepted, "a second look finds another count than " + count);
    for (std::uint64_t step = one.acked - std::min<std::uint64_t>(one.acked, random() % 3); step < one.begun;) {
        const std::uint64_t steps = std::min(random() % 7 + 1, one.begun - step);
        Batch(kind, one.tag, step, steps).append_once(*writer, step * kind.width);
        step += steps;
    }
    round.check(writer->accepted() == one.begun * kind.width, "rows that were sent again are not accepted");
    one.acked = one.begun;
    if (one.clearing) one.clearing = accepted / kind.width;  // another child's clear took no rows that came after it
}

}  // namespace

int main(int count, char** arguments) {
    if (count != 4) return std::fprintf(stderr, "sharpwave_crash ROUNDS SEED FOLDER\n"), 2;
    const long rounds = std::atol(arguments[1]);
    const std::uint64_t seed = std::strtoull(arguments[2], nullptr, 10);
    const std::string folder = arguments[3], path = folder + "/table";
    std::filesystem::create_directories(folder);
    told = static_cast<Told*>(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    std::mt19937_64 random(seed);
    std::vector<const Setup*> kinds;
    const char* only = std::getenv("SWEEP_KIND");
    for (const Setup& one : kSetups) {
        if (!only || std::strstr(one.name, only)) kinds.push_back(&one);
    }
    std::map<Fault, int> reached;
    int at_random = 0, reopened = 0;
    double slowest = 0;
    using Clock = std::chrono::steady_clock;

    std::shared_ptr<Table> table;
    std::shared_ptr<BatchMaker> batches;
    std::unique_ptr<Writer> writer;
    const Setup* kind = nullptr;
    std::uint64_t tag = 0, own_step = 0;
    const auto let_go = [&] {
        writer.reset();
        batches.reset();
        table.reset();
    };
    const auto remove_all = [&] {
        for (const char* table : {"", ".snapshot", "-other"}) {
            for (const char* end : {"", ".next"}) std::filesystem::remove(path + table + end);
        }
        if (!std::filesystem::is_empty(folder)) {
            std::fprintf(stderr, "FAILED: '%s' was left behind\n",
                         std::filesystem::directory_iterator(folder)->path().c_str());
            std::exit(1);
        }
    };

    for (long number = 0; number < rounds; ++number) {
        if (number % 25 == 0) {
            let_go();
            if (kind) remove_all();
            kind = kinds[(static_cast<std::size_t>(number / 25) + seed) % kinds.size()];
            table = Table::create(config_of(*kind), path);
            told->version = 0;
            own_step = 0;
            writer = table->writer();
            Batch(*kind, 0, 0, 20).append(*writer);
            own_step = 20;
        }
        const bool is_random = random() % 4 == 0;
        Place place = kPlaces[random() % std::size(kPlaces)];
        while (!suits(*kind, place.fault)) place = kPlaces[random() % std::size(kPlaces)];
        // Few tables have mutable fields: their places come often enough only if they are preferred there.
        constexpr auto kFirst = static_cast<std::size_t>(Fault::mutable_begun);
        constexpr std::size_t kOfMutables = static_cast<std::size_t>(Fault::write_marked) - kFirst + 1;
        if (kind->mutables && random() % 2) place = kPlaces[kFirst + random() % kOfMutables];
        // The next writer does not go on in a client's half-full block: a ring of one block would lose the rows there.
        const bool has_clients = kind->block_rows != kind->capacity;
        if (has_clients && place.role == Job::write && random() % 2) place.role = Job::send;
        const bool survives = !place.first_in && random() % 3 != 0;
        const std::uint64_t steps = std::max<std::uint64_t>(1, kind->capacity / kind->width / 5);
        std::vector<Dead> dead;
        std::vector<pid_t> heirs;
        Round round;
        const auto run_child = [&](Job role, int fault, int turn) {
            told->begun = told->acked = told->cleared = told->clearing = 0;
            told->heir = 0;
            told->covered = 0;
            const std::uint64_t version = told->version.load();
            const bool has_heir = random() % 2;
            told->started = false;
            ++tag;
            const std::uint64_t child_seed = random(), wait_us = random() % 3000;
            const pid_t pid = fork();
            if (pid == 0) {
                if (fault >= 0) arm(static_cast<Fault>(fault), turn, has_heir ? &leave_an_heir : nullptr);
                live(*kind, path, role, tag, steps, child_seed, *told);
            }
            int status = 0;
            const auto begin = Clock::now();
            if (fault < 0) {
                while (!told->started && waitpid(pid, &status, WNOHANG) == 0) usleep(50);
                usleep(static_cast<useconds_t>(wait_us));
                kill(pid, SIGKILL);
            } else {
                // A place that this round does not come to: killed after a while.
                while (waitpid(pid, &status, WNOHANG) == 0) {
                    if (Clock::now() - begin > std::chrono::milliseconds(300)) kill(pid, SIGKILL), status = -1;
                    usleep(50);
                }
            }
            if (fault < 0) waitpid(pid, &status, 0);
            if (status != -1 && WIFEXITED(status)) round.fail("the child ended by itself");
            const bool by_itself = status != -1 && Clock::now() - begin < std::chrono::milliseconds(300);
            if (fault >= 0 && by_itself) ++reached[static_cast<Fault>(fault)];
            if (told->heir) heirs.push_back(told->heir);
            if (told->clearing) {
                for (Dead& earlier : dead) earlier.clearing = earlier.begun;  // theirs went too
            }
            dead.push_back({tag, told->begun.load(), told->acked.load(), told->cleared.load(), told->clearing.load()});
            dead.back().is_client = role == Job::send;
            if (told->version.load() != version) {
                dead.back().version = told->version.load();
                dead.back().covered = told->covered.load();
                dead.back().own_steps = own_step;
            }
            ++told->version;  // the one that was running, if there was one, has this number
            if (std::getenv("SWEEP_LOG")) {
                std::fprintf(stderr, "  writer %lu began %lu steps, %lu acknowledged\n", tag, dead.back().begun,
                             dead.back().acked);
            }
        };
        round.text = "round " + std::to_string(number) + " of seed " + std::to_string(seed) + ", " + kind->name + ", " +
                     (is_random ? std::string("at a random instant") : std::string("at ") + fault_name(place.fault)) +
                     (survives ? ", with a survivor" : ", nobody survives");
        if (std::getenv("SWEEP_LOG")) std::fprintf(stderr, "%s\n", round.text.c_str());
        if (!survives) let_go(), ++reopened;
        if (kind->block_rows == kind->capacity) writer.reset();  // a ring of one block has room for one writer
        const Job sends = has_clients ? Job::send : Job::write;
        const Job roles[] = {Job::write, sends,      sends,      Job::learn, Job::save,
                             Job::pace,  Job::close, Job::clear, Job::amend};
        const bool needs_client = place.fault == Fault::client_settled;
        if (place.needs_dead) {
            run_child(needs_client || random() % 2 ? sends : Job::write,
                      static_cast<int>(needs_client && random() % 2 ? Fault::row_half_committed : Fault::row_copied),
                      1 + random() % (needs_client ? 8 : 30));
        }
        if (is_random) {
            run_child(roles[random() % (std::size(roles) - !kind->mutables)], -1, 0);
            ++at_random;
        } else {
            const bool is_rare = place.fault == Fault::writer_taken || place.fault == Fault::client_named ||
                                 place.needs_dead || place.role == Job::save ||
                                 place.fault == Fault::index_half_rebuilt;
            run_child(place.role, static_cast<int>(place.fault), is_rare ? 1 : 1 + static_cast<int>(random() % 8));
        }

        const auto begin = Clock::now();
        try {
            if (!survives) table = Table::attach(path);
            if (!batches) batches = std::make_shared<BatchMaker>(table, sampler_of(*kind));
            if (survives && random() % 2) writer.reset();
            for (Dead& one : dead) {
                if (one.is_client) send_again(round, *kind, table, one, random);
            }
            if (!writer) writer = table->writer();
            Batch(*kind, 0, own_step, 1).append(*writer);
            own_step += 1;
            Sample sample(*kind, 8);
            sample.draw(*batches);
            const double ms = std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
            slowest = std::max(slowest, ms);
            auto another = table->writer();  // looks after the dead even where the survivor had its writer
            another.reset();
            round.check(table->stats().writers_taken == 1, "a writer was leaked");
            check_table(round, *kind, table, *batches, dead);
        } catch (const Error& error) {
            round.fail(error.what());
        }
        for (const pid_t heir : heirs) kill(heir, SIGKILL);
    }
    let_go();
    remove_all();
    std::printf("%ld rounds: %d kills at random instants, %d times nobody survived; slowest first calls %.1f ms\n",
                rounds, at_random, reopened, slowest);
    int missing = 0;
    for (int i = 0; i < static_cast<int>(Fault::count); ++i) {
        if (rounds >= 1000)
            std::printf("  %-24s %d\n", fault_name(static_cast<Fault>(i)), reached[static_cast<Fault>(i)]);
        missing += reached[static_cast<Fault>(i)] == 0;
    }
    if (missing && rounds >= 1000 && !only)
        return std::fprintf(stderr, "FAILED: %d places were never reached\n", missing), 1;
    return 0;
}
