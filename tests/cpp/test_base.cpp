#include <gtest/gtest.h>

#include <atomic>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/crc32c.h"
#include "base/error.h"
#include "base/random.h"
#include "base/workers.h"
#include "schema/schema.h"

using namespace sharpwave;

TEST(Crc32c, GivesThePublishedCheckValue) {
    EXPECT_EQ(crc32c(0, "123456789", 9), 0xe3069283u);
    const std::string zeros(32, '\0');
    EXPECT_EQ(crc32c(0, zeros.data(), zeros.size()), 0x8a9136aau);
}

TEST(Crc32c, ContinuesOverPieces) {
    const std::string text = "the quick brown fox jumps over the lazy dog";
    for (std::size_t cut = 0; cut <= text.size(); ++cut) {
        EXPECT_EQ(crc32c(crc32c(0, text.data(), cut), text.data() + cut, text.size() - cut),
                  crc32c(0, text.data(), text.size()));
    }
}

TEST(Crc32c, CombinesTheChecksumsOfTwoRuns) {
    const std::string text = "the quick brown fox jumps over the lazy dog";
    for (std::size_t cut = 0; cut <= text.size(); ++cut) {
        const std::uint32_t first = crc32c(0, text.data(), cut);
        const std::uint32_t second = crc32c(0, text.data() + cut, text.size() - cut);
        EXPECT_EQ(crc32c_combine(first, second, text.size() - cut), crc32c(0, text.data(), text.size()));
    }
    const std::string large(5'000'011, 'x');
    const std::uint32_t second = crc32c(0, large.data(), large.size());
    EXPECT_EQ(crc32c_combine(crc32c(0, "ab", 2), second, large.size()),
              crc32c(crc32c(0, "ab", 2), large.data(), large.size()));
}

TEST(Random, StaysBelowItsRangeAndReachesEveryValue) {
    const Substream stream(1, 2);
    for (std::uint64_t range : {1u, 2u, 3u, 7u, 10u}) {
        std::set<std::uint64_t> seen;
        for (std::uint64_t i = 0; i < 1000; ++i) seen.insert(stream.below(range, i));
        EXPECT_EQ(seen.size(), range);
        EXPECT_LT(*seen.rbegin(), range);
    }
}

TEST(Random, IsAFunctionOfSeedCallPositionAndAttempt) {
    EXPECT_EQ(Substream(5, 9).bits(3, 1), Substream(5, 9).bits(3, 1));
    std::set<std::uint64_t> seen;
    for (std::uint64_t seed = 0; seed < 5; ++seed)
        for (std::uint64_t call = 0; call < 5; ++call)
            for (std::uint64_t i = 0; i < 5; ++i)
                for (std::uint64_t attempt = 0; attempt < 5; ++attempt)
                    seen.insert(Substream(seed, call).bits(i, attempt));
    EXPECT_EQ(seen.size(), 625u);
}

TEST(Workers, CoverEveryPieceOnce) {
    for (std::size_t count : {1u, 7u, 1000u}) {
        std::vector<std::atomic<int>> touched(count);
        in_parallel(count, [&](std::size_t begin, std::size_t end) {
            for (std::size_t i = begin; i < end; ++i) ++touched[i];
        });
        for (auto& times : touched) EXPECT_EQ(times, 1);
    }
}

TEST(Workers, ServeSeveralCallersAtOnce) {
    std::vector<std::thread> callers;
    std::atomic<std::size_t> total{0};
    for (int c = 0; c < 4; ++c) {
        callers.emplace_back([&] {
            for (int round = 0; round < 200; ++round) {
                in_parallel(64, [&](std::size_t begin, std::size_t end) { total += end - begin; });
            }
        });
    }
    for (auto& caller : callers) caller.join();
    EXPECT_EQ(total, 4u * 200 * 64);
}

TEST(RowLayout, AlignsEveryFieldToItsItem) {
    const RowLayout layout(
        {{"flag", "|u1", 1, {3}}, {"real", "<f8", 8, {2}}, {"half", "<f2", 2, {}}, {"x", "<f4", 4, {5}}});
    for (const Field& field : layout.fields()) EXPECT_EQ(field.offset % field.item_bytes, 0u) << field.name;
    EXPECT_EQ(layout.stride() % 8, 0u);
    EXPECT_EQ(layout.payload_bytes(), 3u + 16 + 2 + 20);
    EXPECT_TRUE(layout.word_is_embedded());
}

TEST(RowLayout, KeepsWordsOfLargeRowsApart) {
    const RowLayout layout({{"image", "|u1", 1, {84, 84}}});
    EXPECT_FALSE(layout.word_is_embedded());
    EXPECT_EQ(layout.stride(), 7056u);
}

TEST(RowLayout, RefusesWhatIsNoRow) {
    EXPECT_THROW(RowLayout({}), Error);
    EXPECT_THROW(RowLayout({{"a", "<f4", 4, {0}}}), Error);
    EXPECT_THROW(RowLayout({{"a", "<f4", 4, {1 << 30, 1 << 30}}}), Error);
}
