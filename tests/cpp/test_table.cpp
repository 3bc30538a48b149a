#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include <algorithm>
#include <map>
#include <numeric>

#include "base/error.h"
#include "rows.h"

using namespace sharpwave;
using namespace sharpwave::test;

namespace {

std::vector<std::uint64_t> numbers(std::uint64_t first, std::uint64_t last) {
    std::vector<std::uint64_t> result(last - first);
    std::iota(result.begin(), result.end(), first);
    return result;
}

ErrorKind kind_of(const std::function<void()>& call) {
    try {
        call();
    } catch (const Error& error) {
        return error.kind();
    }
    ADD_FAILURE() << "no error";
    return ErrorKind::schema;
}

}  // namespace

TEST(Table, IsAnExactRingForOneWriter) {
    for (std::uint64_t capacity : {1u, 2u, 5u, 16u, 257u, 1000u}) {
        auto table = Table::create(config(capacity));
        auto writer = table->writer();
        std::uint64_t added = 0;
        for (int step = 0; step < 200; ++step) {
            const std::size_t count = std::min<std::size_t>(1 + static_cast<std::size_t>(step * 7) % 40, capacity);
            append(*writer, added, count);
            added += count;
            const std::uint64_t first = added > capacity ? added - capacity : 0;
            ASSERT_EQ(table->size(), added - first);
            ASSERT_EQ(contents(table), numbers(first, added)) << "capacity " << capacity << " step " << step;
        }
    }
}

TEST(Table, KeepsStepsOfSeveralEnvironmentsTogether) {
    auto table = Table::create(config(8 * 13, 8));
    auto writer = table->writer();
    for (std::uint64_t step = 0; step < 50; ++step) append(*writer, step * 8, 8);
    EXPECT_EQ(contents(table), numbers(50 * 8 - 8 * 13, 50 * 8));
}

TEST(Table, GivesSerialsThatNeverComeBack) {
    auto table = Table::create(config(10));
    auto writer = table->writer();
    append(*writer, 0, 10);
    const auto before = table->live_serials();
    append(*writer, 10, 10);
    const auto after = table->live_serials();
    EXPECT_LT(before.back(), after.front());
    table->clear();
    append(*writer, 20, 3);
    EXPECT_LT(after.back(), table->live_serials().front());
}

TEST(Table, ReportsRowsThatAreGone) {
    auto table = Table::create(config(10));
    auto writer = table->writer();
    append(*writer, 0, 10);
    std::vector<std::uint64_t> serials = table->live_serials(), words(1);
    append(*writer, 10, 1);
    Rows rows(1);
    const auto flats = rows.flats();
    const BatchMaker batches(table, {whole_rows()});
    for (std::uint64_t gone : {serials.front(), serials.back() + 5, std::uint64_t{1} << 60}) {
        EXPECT_EQ(kind_of([&] { batches.read(&gone, 1, {flats.data()}, words.data()); }), ErrorKind::stale_handle);
    }
    std::size_t skipped = 0;
    std::vector<std::uint64_t> wanted = serials;
    Rows many(10);
    words.resize(10);
    const auto places = many.flats();
    batches.read(wanted.data(), 10, {places.data()}, words.data(), &skipped);
    EXPECT_EQ(skipped, 1u);
    EXPECT_EQ(std::vector(many.id.begin(), many.id.begin() + 9), numbers(1, 10));
}

TEST(Table, LeavesVoidRowsOutAndKeepsTheirPlace) {
    auto table = Table::create(config(40, 4));
    auto writer = table->writer();
    const std::uint8_t flags[] = {0, kRowVoid, kRowTerminated, kRowVoid};
    for (std::uint64_t step = 0; step < 25; ++step) append(*writer, step * 4, 4, flags);
    EXPECT_EQ(table->size(), 20u);
    for (std::uint64_t number : contents(table)) EXPECT_EQ(number % 2, 0u);
    for (std::uint64_t number : draw(table, 500)) EXPECT_EQ(number % 2, 0u);
    EXPECT_EQ(table->stats().rows_voided, 50u);
    EXPECT_EQ(table->stats().episodes, 25u);
}

TEST(Table, TellsTheSerialsOfAnAdd) {
    auto table = Table::create(config(40, 4));
    auto writer = table->writer(), other = table->writer();
    const std::uint8_t flags[] = {0, kRowVoid, 0, 0, kRowVoid, 0, 0, 0};
    for (std::uint64_t turn = 0; turn < 20; ++turn) {  // over the ends of blocks, and round the ring
        Rows rows(8);
        for (std::size_t i = 0; i < 8; ++i) rows.set(i, 8 * turn + i);
        const auto fields = rows.inputs();
        std::uint64_t serials[8];
        ASSERT_TRUE((turn % 3 ? writer : other)->try_append({fields.data(), 8, flags}, serials));
        for (std::size_t i = 0; i < 8; ++i) {
            if (flags[i]) {
                EXPECT_EQ(serials[i], format::kNone);
                continue;
            }
            Rows read(1);
            const auto flats = read.flats();
            std::uint64_t word;
            BatchMaker(table, {whole_rows()}).read(&serials[i], 1, {flats.data()}, &word);
            EXPECT_EQ(read.id[0], 8 * turn + i);
        }
    }
}

TEST(Table, MarksEpisodesWhereTheyStartAndEnd) {
    auto table = Table::create(config(100));
    {
        auto writer = table->writer();
        const std::uint8_t flags[] = {0, kRowTerminated, 0, kRowTruncated, 0, 0};
        append(*writer, 0, 6, flags);
    }
    using namespace format;
    const std::uint64_t expected[] = {kEpisodeStart, kTerminated,   kEpisodeStart,
                                      kTruncated,    kEpisodeStart, kTruncated | kClosedByEngine};
    for (std::uint64_t slot = 0; slot < 6; ++slot) {
        EXPECT_EQ(table->word(slot) & kFlagMask, expected[slot]) << "row " << slot;
    }
}

TEST(Table, ForgetsEverythingAtOnce) {
    auto table = Table::create(config(1000));
    auto writer = table->writer();
    for (std::uint64_t filled : {0u, 10u, 999u, 1000u, 2345u}) {
        for (std::uint64_t i = 0; i < filled; i += 5) append(*writer, i, 5);
        table->clear();
        EXPECT_EQ(table->size(), 0u);
        EXPECT_TRUE(contents(table).empty());
        EXPECT_EQ(kind_of([&] { draw(table, 1); }), ErrorKind::not_ready);
        append(*writer, 7000, 3);
        EXPECT_EQ(contents(table), numbers(7000, 7003));
        for (std::uint64_t number : draw(table, 50)) EXPECT_GE(number, 7000u);
    }
}

TEST(Table, NeverDividesCapacityBetweenWriters) {
    auto table = Table::create(config(4096, 1, 8));
    std::vector<std::unique_ptr<Writer>> writers;
    for (int i = 0; i < 8; ++i) writers.push_back(table->writer());
    EXPECT_EQ(kind_of([&] { table->writer(); }), ErrorKind::buffer_full);
    for (std::uint64_t round = 0; round < 1000; ++round) {
        for (std::uint64_t w = 0; w < 8; ++w) append(*writers[w], w * 1'000'000 + round, 1);
    }
    EXPECT_EQ(table->size(), 4096u);
    std::map<std::uint64_t, std::vector<std::uint64_t>> by_writer;
    for (std::uint64_t number : contents(table)) by_writer[number / 1'000'000].push_back(number % 1'000'000);
    EXPECT_EQ(by_writer.size(), 8u);
    for (const auto& [writer, rounds] : by_writer) {
        EXPECT_TRUE(std::is_sorted(rounds.begin(), rounds.end()));
        EXPECT_EQ(rounds.back(), 999u) << "the newest row of writer " << writer << " is there";
    }
}

TEST(Table, LetsOneWriterUseTheWholeRingPastAnIdleOne) {
    auto table = Table::create(config(1024, 1, 4));
    auto idle = table->writer();
    auto busy = table->writer();
    append(*idle, 5'000'000, 1);
    for (std::uint64_t i = 0; i < 10'000; ++i) append(*busy, i, 1);
    const auto rows = contents(table);
    EXPECT_EQ(std::count(rows.begin(), rows.end(), 5'000'000u), 1);
    EXPECT_GE(table->size(), 1024u - 2 * table->block_rows());
    EXPECT_EQ(*std::max_element(rows.begin(), rows.end() - 1) <= 5'000'000u, true);
}

TEST(Table, ReusesHalfFullBlocksOfClosedWriters) {
    auto table = Table::create(config(10'000, 1, 8));
    std::uint64_t number = 0;
    for (int life = 0; life < 400; ++life) {
        auto writer = table->writer();
        append(*writer, number, 7);
        number += 7;
    }
    EXPECT_EQ(table->size(), 2800u);
    EXPECT_EQ(contents(table), numbers(0, 2800));
    EXPECT_LE(table->visible_slots(), 2800u + table->block_rows());
}

TEST(Table, RefusesImpossibleSizes) {
    EXPECT_EQ(kind_of([] { Table::create(config(0)); }), ErrorKind::schema);
    EXPECT_EQ(kind_of([] { Table::create(config(10, 4)); }), ErrorKind::schema);
    EXPECT_EQ(kind_of([] { Table::create(config(10, 1, 0)); }), ErrorKind::schema);
    EXPECT_EQ(kind_of([] { Table::create(config(std::uint64_t{1} << 60)); }), ErrorKind::storage);
    EXPECT_EQ(kind_of([] { Table::create(config(std::uint64_t{1} << 50)); }), ErrorKind::storage);
}

TEST(Table, RefusesEveryCallAfterClose) {
    auto table = Table::create(config(10));
    auto writer = table->writer();
    append(*writer, 0, 1);
    table->close();
    EXPECT_EQ(kind_of([&] { append(*writer, 1, 1); }), ErrorKind::closed);
    EXPECT_EQ(kind_of([&] { draw(table, 1); }), ErrorKind::closed);
    EXPECT_EQ(kind_of([&] { table->writer(); }), ErrorKind::closed);
    EXPECT_EQ(kind_of([&] { table->clear(); }), ErrorKind::closed);
}

TEST(Tables, AreClearedOrNotWhereAProcessDiesInClear) {
    auto table = Table::create(config(1000));
    auto writer = table->writer();
    append(*writer, 0, 100);
    // What a process leaves that dies between the two steps of clear().
    const std::uint64_t blocks = table->blocks(), next = table->counters().next_ticket.value;
    table->counters().origin_ticket.value = (next + blocks - 1) / blocks * blocks;
    EXPECT_EQ(table->size(), 0u);
    EXPECT_TRUE(table->live_serials().empty());
    EXPECT_EQ(table->visible_slots(), 0u);
    append(*writer, 100, 50);
    EXPECT_EQ(table->size(), 50u);
    EXPECT_EQ(table->live_serials().size(), 50u);
    append(*writer, 150, 1000);
    append(*writer, 1150, 1000);
    EXPECT_EQ(table->size(), 1000u);
    EXPECT_EQ(table->live_serials().size(), 1000u);
}

TEST(Tables, AreNeverClearedBackwards) {
    auto table = Table::create(config(64));
    auto writer = table->writer();
    std::atomic<bool> stop{false}, went_back{false};
    std::thread watcher([&] {
        std::uint64_t last = 0;
        while (!stop) {
            const std::uint64_t now = table->counters().origin_ticket.value;
            if (now < last) went_back = true;
            last = now;
        }
    });
    std::vector<std::thread> clearers;
    for (int i = 0; i < 2; ++i) {
        clearers.emplace_back([&] {
            for (int k = 0; k < 2000; ++k) table->clear();
        });
    }
    for (int k = 0; k < 2000; ++k) append(*writer, static_cast<std::uint64_t>(k), 1);
    for (std::thread& thread : clearers) thread.join();
    stop = true;
    watcher.join();
    EXPECT_FALSE(went_back);
    EXPECT_EQ(table->size(), table->live_serials().size());
}
