// Readers and writers at once. Under ThreadSanitizer these run on one mapping, which is what it can follow.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "rows.h"

using namespace sharpwave;
using namespace sharpwave::test;

// The thread sanitizer sees a race at its first chance, and takes a hundred times as long; `make soak` repeats it.
#if defined(SHARPWAVE_TSAN)
constexpr int kBatches = 300, kRounds = 5;
#else
constexpr int kBatches = 3000, kRounds = 30;
#endif

TEST(Threads, NeverReadATornRow) {
    auto table = Table::create(config(96, 1, 8));  // small: writers run over the rows being read all the time
    {
        append(*table->writer(), 0, 96);
    }
    std::atomic<bool> stop{false};
    std::atomic<std::uint64_t> torn{0}, read{0};
    std::vector<std::thread> threads;
    for (std::uint64_t w = 0; w < 2; ++w) {
        threads.emplace_back([&, w] {
            auto writer = table->writer();
            for (std::uint64_t i = 0; !stop; ++i) append(*writer, (w + 1) << 40 | i, 1 + i % 5);
        });
    }
    for (int r = 0; r < 2; ++r) {
        threads.emplace_back([&] {
            Rows rows(64);
            std::vector<std::uint64_t> serials(64);
            const auto flats = rows.flats();
            BatchMaker batches(table, {whole_rows()});
            for (int batch = 0; batch < kBatches; ++batch) {
                batches.sample(64, {flats.data()}, {serials.data()});
                for (std::size_t i = 0; i < 64; ++i) torn += !rows.whole(i);
                read += 64;
            }
            stop = true;
        });
    }
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(torn, 0u);
    EXPECT_GE(read, kBatches * 64u);
    EXPECT_LE(table->size(), 96u);
}

TEST(Threads, ShareOneWriterByTurns) {
    auto table = Table::create(config(100'000));
    auto writer = table->writer();
    std::vector<std::thread> threads;
    for (std::uint64_t t = 0; t < 4; ++t) {
        threads.emplace_back([&, t] {
            for (std::uint64_t i = 0; i < 2000; ++i) append(*writer, t * 10'000 + i, 1);
        });
    }
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(table->size(), 8000u);
    auto rows = contents(table);
    std::sort(rows.begin(), rows.end());
    for (std::uint64_t t = 0; t < 4; ++t) EXPECT_EQ(rows[t * 2000 + 1999], t * 10'000 + 1999);
}

TEST(Threads, ClearAndSaveWhileOthersWrite) {
    auto table = Table::create(config(4096, 1, 8));
    std::atomic<bool> stop{false};
    std::vector<std::thread> threads;
    for (std::uint64_t w = 0; w < 2; ++w) {
        threads.emplace_back([&, w] {
            auto writer = table->writer();
            for (std::uint64_t i = 0; !stop; ++i) append(*writer, w << 40 | i, 3);
        });
    }
    const std::string path = testing::TempDir() + "/under_fire.sw";
    for (int round = 0; round < kRounds; ++round) {
        table->save(path);
        auto copy = Table::load(path);
        for (std::uint64_t serial : copy->live_serials()) EXPECT_LE(serial, format::kMaxSerial);
        contents(copy);  // every row is read with its checksum verified
        table->clear();
    }
    stop = true;
    for (auto& thread : threads) thread.join();
    EXPECT_LE(table->size(), 4096u);
    EXPECT_EQ(contents(table).size(), table->size());
}
