// Windows, orders and pace over the engine alone; the Threads ones also run under ThreadSanitizer.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <thread>

#include "base/error.h"
#include "rows.h"
#include "sampling/pace.h"

using namespace sharpwave;
using namespace sharpwave::test;

namespace {

TableConfig with_index(std::uint64_t capacity, bool numbers_steps, std::uint64_t writers = 64) {
    TableConfig made = config(capacity, 1, writers);
    made.index = {.has_index = true, .numbers_steps = numbers_steps};
    made.set_counters = Exponents{1, 0, 0, 0}.writer();
    return made;
}

RowIndexConfig in_order(Order order) {
    RowIndexConfig made;
    made.eps = 0;
    made.stratified = false;
    made.normalize = Normalize::none;
    made.new_rows = NewRows::constant;
    made.new_priority = order == Order::shuffle ? 0.0f : 1.0f;
    made.order = order;
    return made;
}

std::vector<std::uint64_t> sample(BatchMaker& batches, std::size_t count) {
    Rows rows(count);
    std::vector<std::uint64_t> serials(count);
    const auto flats = rows.flats();
    batches.sample(count, {flats.data()}, {serials.data()});
    return rows.id;
}

struct WindowBatch {
    WindowBatch(std::size_t count, std::size_t width)
        : rows(count * width), serials(count), valid(count * width), learn(count * width), first(count * width) {}
    Rows rows;
    std::vector<std::uint64_t> serials;
    std::vector<std::uint8_t> valid, learn, first;

    void draw(BatchMaker& batches) {
        const auto flats = rows.flats();
        batches.sample(serials.size(), {flats.data()},
                       {serials.data(), nullptr, nullptr, {valid.data(), learn.data(), first.data()}});
    }
};

}  // namespace

TEST(Order, FifoGivesEachRowOnceOldestFirst) {
    auto table = Table::create(with_index(100, false));
    RowIndexConfig index = in_order(Order::fifo);
    index.max_reads = 1;
    BatchMaker batches(table, {whole_rows(), index});
    auto writer = table->writer();
    append(*writer, 0, 130);  // 30..129 are left
    const auto first = sample(batches, 60), second = sample(batches, 40);
    for (std::uint64_t i = 0; i < 60; ++i) EXPECT_EQ(first[i], 30 + i);
    for (std::uint64_t i = 0; i < 40; ++i) EXPECT_EQ(second[i], 90 + i);
    EXPECT_THROW(sample(batches, 1), Error);
    append(*writer, 130, 5);
    EXPECT_EQ(sample(batches, 5).back(), 134u);
}

TEST(Order, ShuffleGivesEachRowOnceAnEpoch) {
    auto table = Table::create(with_index(1000, false));
    BatchMaker batches(table, {whole_rows(), in_order(Order::shuffle)});
    auto writer = table->writer();
    append(*writer, 0, 1000);
    for (int epoch = 0; epoch < 3; ++epoch) {
        std::vector<std::uint64_t> seen;
        for (std::size_t left = 1000; left > 0;) {
            const std::size_t size = std::min<std::size_t>(left, 96);
            const auto part = sample(batches, size);
            seen.insert(seen.end(), part.begin(), part.end());
            left -= size;
        }
        EXPECT_FALSE(std::is_sorted(seen.begin(), seen.end()));
        std::sort(seen.begin(), seen.end());
        for (std::uint64_t i = 0; i < 1000; ++i) ASSERT_EQ(seen[i], i);
    }
    EXPECT_EQ(table->stats().shuffle_epoch, 3u);
}

TEST(Windows, FitWholeAndNeverCrossTheSeam) {
    auto table = Table::create(with_index(64, true));
    RowIndexConfig index = in_order(Order::weighted);
    index.starts = {StartRule::Needs::rows, 5, 1, true, false};
    BatchMaker batches(table, {whole_rows(), index, WindowConfig{5, 2, 1, true}});
    auto writer = table->writer();
    WindowBatch batch(32, 8);
    for (std::uint64_t first = 0; first < 400; first += 7) {
        append(*writer, first, 7);
        batch.draw(batches);
        for (std::size_t i = 0; i < 32; ++i) {
            for (std::size_t k = 1; k < 8; ++k) {
                const std::size_t at = i * 8 + k;
                EXPECT_EQ(batch.rows.id[at], batch.rows.id[at - 1] + batch.valid[at]);
                EXPECT_LE(batch.learn[at], batch.valid[at]);
            }
            EXPECT_EQ(std::accumulate(&batch.learn[i * 8], &batch.learn[i * 8] + 8, 0), 5);
        }
    }
}

TEST(Threads, WindowsAreWholeWhileRowsAreWritten) {
    auto table = Table::create(with_index(96, true, 8));
    RowIndexConfig index = in_order(Order::weighted);
    index.starts = {StartRule::Needs::rows, 6, 2, true, false};
    const BatchConfig settings{whole_rows(), index, WindowConfig{6, 2, 0, true}};
    append(*table->writer(), 0, 96);
    std::atomic<bool> stop{false};
    std::atomic<std::uint64_t> torn{0};
    std::vector<std::thread> threads;
    threads.emplace_back([&] {
        auto writer = table->writer();
        for (std::uint64_t i = 1000; !stop; i += 3) {
            append(*writer, i, 3);
            std::this_thread::yield();
        }
    });
    for (int r = 0; r < 2; ++r) {
        threads.emplace_back([&] {
            BatchMaker batches(table, settings);
            WindowBatch batch(8, 8);
            for (int i = 0; i < 500; ++i) {
                try {
                    batch.draw(batches);
                } catch (const Error&) {
                    continue;  // the writer was faster
                }
                for (std::size_t at = 0; at < 64; ++at) {
                    torn += !batch.rows.whole(at);
                    const bool follows = at % 8 == 0 || batch.rows.id[at] == batch.rows.id[at - 1] + batch.valid[at] ||
                                         batch.rows.id[at] == 1000;
                    torn += !follows;
                }
            }
            stop = true;
        });
    }
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(torn, 0u);
}

TEST(Threads, NoStartIsMissedWhileAWriterLaps) {
    for (int round = 0; round < 300; ++round) {
        auto table = Table::create(with_index(96, true, 8));
        RowIndexConfig settings = in_order(Order::weighted);
        settings.starts = {StartRule::Needs::rows, 6, 1, false, false};
        RowIndex index(*table, settings);
        const auto forget = [&] { table->counters().index_origin.value.store(format::kNone); };
        std::atomic<bool> stop{false};
        std::thread reader([&] {
            while (!stop) {
                forget();  // as after a death under the lock: all blocks are looked at, while the writer goes on
                index.rows();
            }
        });
        {
            auto writer = table->writer();
            for (std::uint64_t i = 0; i < 210; i += 3) append(*writer, i, 3);
            stop = true;
        }
        reader.join();
        const std::uint64_t known = index.rows();
        forget();
        EXPECT_EQ(known, index.rows());
        EXPECT_EQ(known, table->size() - 5);
    }
}

TEST(Threads, PaceKeepsBothSidesTogether) {
    auto table = Table::create(config(10'000));
    auto batches = std::make_shared<BatchMaker>(table, BatchConfig{whole_rows()});
    Pace pace(table, batches->shared_index(), {10, 2, 10, 60});
    std::atomic<bool> stop{false};
    std::atomic<std::uint64_t> bad{0}, sampled{0};
    const auto in_turn = [&](Pace::Side side, std::uint64_t rows, const auto& work) {
        for (;;) {
            const std::uint32_t mark = pace.mark();
            if (pace.try_reserve(side, rows)) break;
            if (stop) return;
            pace.wait(mark, 0.05);
        }
        work();
        pace.settle(side, rows, true);
    };
    std::vector<std::thread> threads;
    for (std::uint64_t w = 0; w < 2; ++w) {
        threads.emplace_back([&, w] {
            auto writer = table->writer();
            for (std::uint64_t i = 0; !stop; ++i)
                in_turn(Pace::Side::add, 3, [&] { append(*writer, w << 40 | i * 3, 3); });
        });
    }
    for (int r = 0; r < 2; ++r) {
        threads.emplace_back([&] {
            while (sampled < 4000) {
                in_turn(Pace::Side::sample, 4, [&] {
                    for (std::uint64_t id : draw(table, 4)) bad += id >> 40 > 1;
                });
                sampled += 4;
                const Pace::Counts counts = pace.counts();
                // Samples are read after inserts: what came between only makes the difference smaller.
                const double ahead = 2.0 * static_cast<double>(counts.inserts) - static_cast<double>(counts.samples);
                bad += ahead > 60 + 8 && counts.inserts > 10;
            }
            stop = true;
            pace.ring();
        });
    }
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(bad, 0u);
    EXPECT_GE(2 * pace.counts().inserts + 60, pace.counts().samples);
}

TEST(Pace, RefusesWhatNobodyCouldLetThrough) {
    auto table = Table::create(config(100));
    auto batches = std::make_shared<BatchMaker>(table, BatchConfig{whole_rows()});
    Pace pace(table, batches->shared_index(), {1, 1, 0, 8});
    EXPECT_TRUE(pace.try_reserve(Pace::Side::add, 8));
    append(*table->writer(), 0, 8);
    pace.settle(Pace::Side::add, 8, true);
    EXPECT_FALSE(pace.try_reserve(Pace::Side::add, 1));
    EXPECT_THROW(pace.try_reserve(Pace::Side::add, 9), Error);
    EXPECT_THROW(pace.try_reserve(Pace::Side::sample, 9), Error);
    EXPECT_TRUE(pace.try_reserve(Pace::Side::sample, 8));
    EXPECT_FALSE(pace.try_reserve(Pace::Side::sample, 1));  // reserved by the first
    EXPECT_FALSE(pace.try_reserve(Pace::Side::add, 1));     // and not delivered yet
    pace.settle(Pace::Side::sample, 8, false);
    EXPECT_TRUE(pace.try_reserve(Pace::Side::sample, 8));
    pace.settle(Pace::Side::sample, 8, true);
    EXPECT_TRUE(pace.try_reserve(Pace::Side::add, 1));
    EXPECT_NE(pace.reason(Pace::Side::sample, 4).find("8 inserts x 1 - 8 samples - 4 < min_diff 0"), std::string::npos);
}
