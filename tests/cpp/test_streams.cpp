#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <thread>

#include "rows.h"
#include "table/streams.h"

using namespace sharpwave;
using namespace sharpwave::test;

namespace {

// One row after the other; '.' goes on, 'T' and 'U' end the episode, 'M' is masked out.
void add(Writer& writer, std::uint64_t first, const std::string& codes) {
    std::vector<std::uint8_t> flags;
    for (const char code : codes)
        flags.push_back(code == 'T' ? kRowTerminated : code == 'U' ? kRowTruncated : code == 'M' ? kRowVoid : 0);
    append(writer, first, codes.size(), flags.data());
}

std::vector<std::vector<std::uint64_t>> whole_episodes(const Table& table) {
    std::vector<std::vector<std::uint64_t>> found;
    for (const Episode& episode : list_episodes(table)) {
        if (episode.is_whole && episode.is_finished) found.push_back(rows_of(table, episode));
    }
    return found;
}

TEST(Streams, FindEpisodesBetweenMaskedRows) {
    const auto table = Table::create(config(40, 2));
    const auto writer = table->writer();
    add(*writer, 0, "...TM..M.U");  // env 0: rows 0 2 6 8, env 1: 1 3 | 5 9
    const auto episodes = list_episodes(*table);
    ASSERT_EQ(episodes.size(), 3u);
    EXPECT_EQ(rows_of(*table, episodes[0]), (std::vector<std::uint64_t>{0, 2, 6, 8}));
    EXPECT_FALSE(episodes[0].is_finished);
    EXPECT_EQ(rows_of(*table, episodes[1]), (std::vector<std::uint64_t>{1, 3}));
    EXPECT_EQ(rows_of(*table, episodes[2]), (std::vector<std::uint64_t>{5, 9}));
    EXPECT_EQ(episodes[2].stream, 1);
}

TEST(Streams, TellIncompleteEpisodesFromWholeOnes) {
    const auto table = Table::create(config(8, 1, 1));
    const auto writer = table->writer();
    add(*writer, 0, "...T...T..");  // the first two rows are gone
    const auto episodes = list_episodes(*table);
    ASSERT_EQ(episodes.size(), 3u);
    EXPECT_EQ(episodes[0].first, 2u);
    EXPECT_FALSE(episodes[0].is_whole);
    EXPECT_TRUE(episodes[1].is_whole && episodes[1].is_finished);
    EXPECT_FALSE(episodes[2].is_finished);
    add(*writer, 10, "...");  // and now rows of the second one
    EXPECT_TRUE(rows_of(*table, episodes[1]).empty());
}

TEST(Streams, KeepWritersApart) {
    const auto table = Table::create(config(64, 1, 4));
    const auto one = table->writer(), other = table->writer();
    for (int i = 0; i < 6; ++i) {
        add(*one, 0, "..T");
        add(*other, 100, ".T");
    }
    std::vector<std::uint64_t> serials = table->live_serials(), words;
    for (const std::uint64_t serial : serials) words.push_back(table->load_word(table->slot_of(serial)));
    std::vector<std::int64_t> streams(serials.size()), episodes(serials.size());
    Streams(*table).follow(serials.data(), words.data(), serials.size(), streams.data(), episodes.data());
    EXPECT_EQ(std::count(streams.begin(), streams.end(), 0), 18);
    EXPECT_EQ(std::count(streams.begin(), streams.end(), 1), 12);
    EXPECT_EQ(whole_episodes(*table).size(), 12u);
}

TEST(Streams, GiveWholeEpisodesWhileWritersGoRound) {
    const auto table = Table::create(config(256, 1, 2));
    std::atomic<bool> stop{false};
    std::vector<std::thread> threads;
    for (int i = 0; i < 2; ++i) {
        threads.emplace_back([&] {
            const auto writer = table->writer();
            while (!stop.load()) {
                add(*writer, 0, "...T");
                std::this_thread::yield();
            }
        });
    }
    for (std::size_t found = 0; found < 500;) {
        for (const auto& rows : whole_episodes(*table)) {
            if (rows.empty()) continue;  // overwritten meanwhile
            EXPECT_EQ(rows.size(), 4u);
            ++found;
        }
    }
    stop.store(true);
    for (std::thread& thread : threads) thread.join();
}

}  // namespace
