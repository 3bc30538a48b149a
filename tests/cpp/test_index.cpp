// The tree and the index over it: sums, draws, priorities of new rows, staleness.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <thread>

#include "rows.h"
#include "sampling/row_index.h"
#include "sampling/sum_tree.h"

using namespace sharpwave;
using namespace sharpwave::test;

namespace {

TableConfig by_priority(std::uint64_t capacity, double alpha = 1, std::uint64_t writers = 64) {
    TableConfig made = config(capacity, 1, writers);
    made.index = {.is_by_priority = true};
    made.set_counters = Exponents{alpha, 1, 1, 0}.writer();
    return made;
}

RowIndexConfig exact() {
    RowIndexConfig made;
    made.eps = 0;
    return made;
}

struct Memory {
    explicit Memory(std::uint64_t leaves)
        : leaf_memory(format::groups_of_16(leaves)),
          node_memory(format::tree_bytes(leaves) / sizeof(SumGroup)),
          tree(reinterpret_cast<std::byte*>(leaf_memory.data()), reinterpret_cast<std::byte*>(node_memory.data()),
               leaves) {}
    std::vector<MassGroup> leaf_memory;
    std::vector<SumGroup> node_memory;
    SumTree tree;
};

std::size_t many_updates() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return 1'000'000;
#else
    return 100'000'000;
#endif
}

}  // namespace

TEST(SumTree, PowersAreThoseOfTheMathLibrary) {
    std::mt19937_64 random(1);
    std::uniform_real_distribution<double> unit(-100, 100);
    for (double exponent : {0.0, 0.1, 0.5, 0.6, 1.0, -0.4, -1.0}) {
        std::vector<double> x(1001), y(1001);
        for (double& value : x) value = std::exp(unit(random));
        sum_tree_kernels().powers(x.data(), y.data(), x.size(), exponent);
        for (std::size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(y[i] / std::pow(x[i], exponent), 1, 2e-14);
    }
    const double zero = 0;
    double out = 5;
    sum_tree_kernels().powers(&zero, &out, 1, 0.5);
    EXPECT_EQ(out, 0);
}

TEST(SumTree, EveryLeafOfAnyTreeIsFoundByItsMass) {
    std::mt19937_64 random(2);
    for (std::uint64_t leaves : {1, 2, 15, 16, 17, 255, 256, 257, 5000}) {
        Memory memory(leaves);
        SumTree& tree = memory.tree;
        for (std::uint64_t i = 0; i < leaves; ++i) {
            tree.stored(i) = -1;
            tree.mass(i) = random() % 3 == 0 ? 0.0f : std::ldexp(1.0f, static_cast<int>(random() % 60) - 30);
        }
        tree.mass(leaves - 1) = 1;
        sum_tree_kernels().refresh_range(tree, 0, leaves);
        std::vector<double> targets(4096);
        std::vector<std::uint64_t> found(targets.size());
        std::uniform_real_distribution<double> unit(0, 1);
        for (double& target : targets) target = unit(random) * tree.total();
        targets[0] = 0;
        targets[1] = tree.total();
        for (const bool ascending : {false, true}) {
            if (ascending) std::sort(targets.begin(), targets.end());
            std::vector<double> spent = targets;
            sum_tree_kernels().descend(tree, spent.data(), found.data(), targets.size(), ascending);
            for (std::uint64_t leaf : found) {
                ASSERT_LT(leaf, leaves);
                ASSERT_GT(tree.mass(leaf), 0.0f) << "a leaf without mass was drawn";
            }
        }
    }
}

TEST(SumTree, KeepsItsRootThroughManyUpdates) {
    constexpr std::uint64_t kLeaves = 100'000;
    Memory memory(kLeaves);
    SumTree& tree = memory.tree;
    std::mt19937_64 random(3);
    std::uint64_t slots[256];
    for (std::size_t done = 0; done < many_updates(); done += 256) {
        for (std::uint64_t& slot : slots) {
            slot = random() % kLeaves;
            // Masses that span sums of very different size.
            tree.mass(slot) =
                std::ldexp(1.0f + static_cast<float>(random() % 1024) / 1024, static_cast<int>(random() % 80) - 40);
            tree.stored(slot) = -tree.mass(slot);
        }
        sum_tree_kernels().refresh(tree, slots, 256);
    }
    long double total = 0;
    float largest = 0;
    for (std::uint64_t i = 0; i < kLeaves; ++i) {
        total += tree.mass(i);
        largest = std::max(largest, tree.mass(i));
    }
    EXPECT_NEAR(static_cast<double>(tree.total() / total), 1, 1e-12);
    EXPECT_EQ(tree.largest_priority(), largest);
}

TEST(Index, GivesTheProbabilitiesOfPriorities) {
    auto table = Table::create(by_priority(100));
    BatchMaker batches(table, {whole_rows(), exact()});
    append(*table->writer(), 0, 3);
    const std::uint64_t serials[] = {0, 1, 2};
    const float priorities[] = {1, -2, 4};
    const auto updated = batches.index()->update(serials, priorities, 3);
    EXPECT_EQ(updated.applied, 3u);
    Rows rows(7000);
    std::vector<std::uint64_t> drawn(7000);
    std::vector<float> weights(7000);
    std::vector<double> probabilities(7000);
    const auto flats = rows.flats();
    batches.sample(7000, {flats.data()}, {drawn.data(), weights.data(), probabilities.data()});
    std::map<std::uint64_t, int> counts;
    for (std::size_t i = 0; i < 7000; ++i) {
        ++counts[drawn[i]];
        EXPECT_EQ(rows.id[i], drawn[i]);
        EXPECT_DOUBLE_EQ(probabilities[i], static_cast<double>(1 << drawn[i]) / 7);
        EXPECT_FLOAT_EQ(weights[i], 1.0f / static_cast<float>(1 << drawn[i]));
    }
    EXPECT_EQ(counts[0], 1000) << "strata are exact";
    EXPECT_EQ(counts[1], 2000);
    EXPECT_EQ(counts[2], 4000);
}

TEST(Index, StaleSerialsAreCountedAndChangeNothing) {
    auto table = Table::create(by_priority(10));
    BatchMaker batches(table, {whole_rows(), exact()});
    auto writer = table->writer();
    append(*writer, 0, 10);
    append(*writer, 10, 25);
    std::vector<std::uint64_t> serials{0, 24, 25, 34, 35, std::uint64_t{1} << 62};
    std::vector<float> priorities(6, 5);
    const auto updated = batches.index()->update(serials.data(), priorities.data(), 6);
    EXPECT_EQ(updated.applied, 2u);
    EXPECT_EQ(updated.stale, 4u);
    EXPECT_DOUBLE_EQ(batches.index()->total(), 8 + 2 * 5);
}

TEST(Threads, DrawAndUpdateWhileOthersWrite) {
    auto table = Table::create(by_priority(200, 0.6, 8));
    BatchMaker batches(table, {whole_rows(), RowIndexConfig{}});
    append(*table->writer(), 0, 200);
    std::atomic<bool> stop{false};
    std::atomic<std::uint64_t> torn{0};
    std::vector<std::thread> threads;
    for (std::uint64_t w = 0; w < 2; ++w) {
        threads.emplace_back([&, w] {
            auto writer = table->writer();
            for (std::uint64_t i = 0; !stop; ++i) append(*writer, (w + 1) << 40 | i, 1 + i % 5);
        });
    }
    for (int r = 0; r < 2; ++r) {
        threads.emplace_back([&] {
            Rows rows(32);
            std::vector<std::uint64_t> serials(32);
            std::vector<float> weights(32);
            const auto flats = rows.flats();
            for (int batch = 0; batch < 2000; ++batch) {
                batches.sample(32, {flats.data()}, {serials.data(), weights.data()});
                for (std::size_t i = 0; i < 32; ++i) torn += !rows.whole(i);
                batches.index()->update(serials.data(), weights.data(), 32);
            }
            stop = true;
        });
    }
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(torn, 0u);
    EXPECT_NEAR(batches.index()->total() / batches.index()->recomputed_total(), 1, 1e-12);
}
