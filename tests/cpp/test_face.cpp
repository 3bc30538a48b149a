#include <gtest/gtest.h>
#include <sharpwave/replay_buffer.h>

#include <array>
#include <thread>

using namespace sharpwave;

namespace {

using Observation = std::array<float, 5>;
using Ring = ReplayBuffer<Observation, int>;

Ring::TransitionType transition(int step) {
    const float now = static_cast<float>(step);
    return {
        {now, now, now, now, now}, step % 3, now * 0.5f, {now + 1, now + 1, now + 1, now + 1, now + 1}, step % 10 == 9};
}

}  // namespace

TEST(Face, KeepsTheNewestTransitions) {
    Ring buffer({.capacity = 100});
    EXPECT_EQ(buffer.size(), 0u);
    EXPECT_FALSE(buffer.is_full());
    for (int step = 0; step < 250; ++step) buffer.add(transition(step));
    EXPECT_EQ(buffer.size(), 100u);
    EXPECT_EQ(buffer.capacity(), 100u);
    EXPECT_TRUE(buffer.is_full());
    std::vector<std::size_t> indices;
    for (const auto& row : buffer.sample(500, &indices)) {
        const int step = static_cast<int>(row.observation[0]);
        const auto expected = transition(step);
        EXPECT_GE(step, 150);
        EXPECT_EQ(row.observation, expected.observation);
        EXPECT_EQ(row.next_observation, expected.next_observation);
        EXPECT_EQ(row.action, expected.action);
        EXPECT_EQ(row.reward, expected.reward);
        EXPECT_EQ(row.done, expected.done);
    }
    for (std::size_t index : indices) EXPECT_GE(index, 150u);
}

TEST(Face, AddsAndDrawsThroughSpans) {
    Ring buffer({.capacity = 64});
    std::vector<Ring::TransitionType> rows, batch(16);
    for (int step = 0; step < 40; ++step) rows.push_back(transition(step));
    buffer.add(std::span<const Ring::TransitionType>(rows));
    EXPECT_EQ(buffer.size(), 40u);
    buffer.sample_into(batch);
    for (const auto& row : batch) EXPECT_EQ(row.next_observation[0], row.observation[0] + 1);
}

TEST(Face, SaysWhatItCannotDo) {
    EXPECT_THROW(Ring({.capacity = 0}), Error);
    EXPECT_THROW(Ring({.capacity = 10, .strategy = SamplingStrategy::Prioritized, .alpha = 2}), std::invalid_argument);
    Ring buffer({.capacity = 10});
    EXPECT_THROW(buffer.sample(1), Error);
    EXPECT_THROW(buffer.update_priorities({0}, {1.0f}), std::logic_error);
}

TEST(Face, DrawsByPriority) {
    Ring buffer({.capacity = 100, .strategy = SamplingStrategy::Prioritized, .alpha = 1, .beta = 1, .seed = 3});
    for (int step = 0; step < 10; ++step) buffer.add(transition(step));
    std::vector<std::size_t> indices;
    std::vector<float> weights;
    buffer.sample(10, &indices);
    buffer.update_priorities({0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, {0, 0, 0, -90, 0, 0, 0, 10, 0, 0});
    int often = 0;
    for (const auto& row : buffer.sample(1000, &indices, &weights)) often += row.observation[0] == 3;
    EXPECT_NEAR(often, 900, 2);
    for (std::size_t i = 0; i < indices.size(); ++i) {
        if (indices[i] == 3) {
            EXPECT_NEAR(weights[i], 1.0 / 9, 1e-5);
        }
    }
    EXPECT_THROW(buffer.update_priorities({0}, {std::nanf("")}), std::invalid_argument);
    EXPECT_THROW(buffer.update_priorities({0}, {1.0f, 2.0f}), std::invalid_argument);
}

TEST(Face, CompressesRows) {
    if (!has_codecs()) GTEST_SKIP() << "built without Blosc2";
    Ring buffer({.capacity = 100, .enable_compression = true});
    for (int step = 0; step < 250; ++step) buffer.add(transition(step));
    for (const auto& row : buffer.sample(64)) EXPECT_EQ(row.next_observation[0], row.observation[0] + 1);
}

TEST(Face, IsSafeForThreads) {
    Ring buffer({.capacity = 128});
    buffer.add(transition(0));
    std::vector<std::thread> threads;
    for (int t = 0; t < 2; ++t) {
        threads.emplace_back([&] {
            for (int step = 0; step < 3000; ++step) buffer.add(transition(step));
        });
        threads.emplace_back([&] {
            for (int round = 0; round < 300; ++round) {
                for (const auto& row : buffer.sample(32)) {
                    EXPECT_EQ(row.next_observation[4], row.observation[0] + 1);
                }
            }
        });
    }
    for (auto& thread : threads) thread.join();
    EXPECT_TRUE(buffer.is_full());
}
