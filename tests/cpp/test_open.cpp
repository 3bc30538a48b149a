// sharpwave::open() and the Buffer behind it. tests/unit/test_cpp_face.py compares with Python itself.
#include <sharpwave/buffer.h>
#include <sharpwave/replay_buffer.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <thread>

#include "described_table.h"

using namespace sharpwave;
using namespace sharpwave::test;

TEST(Open, AddsAndDrawsByName) {
    const Shared made;
    Buffer buffer = sharpwave::open(made.address);
    EXPECT_EQ(buffer.capacity(), 100u);
    EXPECT_EQ(buffer.size(), 0u);
    EXPECT_EQ(buffer.fields().size(), 5u);
    EXPECT_EQ(buffer.fields()[0].name, "obs");
    EXPECT_EQ(buffer.fields()[1].dtype, "<i8");
    for (int step = 0; step < 150; ++step) add_step(buffer, step, step % 10 == 9);
    EXPECT_EQ(buffer.size(), 100u);
    EXPECT_EQ(made.table->size(), 100u);  // the one table, through two openings
    const Batch batch = buffer.sample(64);
    const auto obs = batch.get<float>("obs"), next = batch.get<float>("next_obs"), rewards = batch.get<float>("reward");
    const auto actions = batch.get<std::int64_t>("action");
    const auto dones = batch.get<bool>("done");
    ASSERT_EQ(obs.size(), 64u * 3);
    EXPECT_EQ(std::vector(batch.shape("obs").begin(), batch.shape("obs").end()), (std::vector<std::size_t>{64, 3}));
    for (std::size_t i = 0; i < 64; ++i) {
        EXPECT_EQ(actions[i], batch.indices()[i]);
        EXPECT_GE(actions[i], 50);
        EXPECT_EQ(obs[i * 3], static_cast<float>(actions[i]));
        EXPECT_EQ(batch.get<float>("obs", i)[2], obs[i * 3]);
        EXPECT_EQ(next[i * 3 + 2], obs[i * 3] + 1);
        EXPECT_EQ(rewards[i], obs[i * 3] / 2);
        EXPECT_EQ(dones[i], actions[i] % 10 == 9);
    }
    EXPECT_TRUE(batch.weights().empty());
    EXPECT_EQ(buffer.stats().at("rows_added"), 150);
    EXPECT_EQ(buffer.stats().at("episodes"), 15);
}

TEST(Open, AddsSeveralRowsAtOnce) {
    const Shared made;
    Buffer buffer = sharpwave::open(made.address);
    std::vector<float> obs(12), rewards(4);
    std::iota(obs.begin(), obs.end(), 0.0f);
    const std::vector<std::int64_t> actions{1, 2, 3, 4};
    const std::array<bool, 4> dones{false, true, false, false}, truncated{false, false, true, false},
        mask{true, true, true, false};
    buffer.add({{"action", actions},
                {"obs", obs},
                {"reward", rewards},
                {"next_obs", obs},
                {"terminated", dones},
                {"truncated", truncated},
                {"mask", mask}});
    EXPECT_EQ(buffer.size(), 3u);
    EXPECT_EQ(buffer.stats().at("episodes"), 2);
    EXPECT_EQ(buffer.stats().at("rows_voided"), 1);
    std::vector<Given> values{
        {"obs", obs}, {"action", actions}, {"reward", rewards}, {"next_obs", obs}, {"done", dones}};
    buffer.add(values);
    EXPECT_EQ(buffer.size(), 7u);
}

TEST(Open, DrawsByPriorityAndUpdates) {
    const Shared made({.sampler = kPrioritized});
    Buffer buffer = sharpwave::open(made.address);
    for (int step = 0; step < 20; ++step) add_step(buffer, step);
    buffer.sample(1);  // gives the rows so far their priority, 1
    const Observed obs{};
    buffer.add({{"obs", obs}, {"action", 20}, {"reward", 0}, {"next_obs", obs}, {"done", false}, {"priority", -1e6}});
    Batch batch = buffer.sample(100);
    ASSERT_EQ(batch.weights().size(), 100u);
    EXPECT_GT(std::count(batch.indices().begin(), batch.indices().end(), 20), 90);
    const std::vector<std::int64_t> rows{20, 3, 999};
    const std::vector<float> errors{0.0f, -1e6f, 1.0f};
    const Updated done = buffer.update_priorities(rows, errors);
    EXPECT_EQ(done.applied, 2u);
    EXPECT_EQ(done.stale, 1u);
    buffer.sample_into(batch);
    EXPECT_GT(std::count(batch.indices().begin(), batch.indices().end(), 3), 90);
    const std::vector<float> bad{1, INFINITY, 2};
    EXPECT_EQ(message_of(ErrorKind::schema, [&] { buffer.update_priorities(rows, bad); }),
              "update_priorities(): priorities: expected finite numbers, got inf at position 1; nothing was changed");
    EXPECT_EQ(message_of(ErrorKind::schema, [&] { buffer.update_priorities(rows, {}); }),
              "update_priorities(): expected 3 priorities, one per index, got 0");
}

TEST(Open, KeepsRaggedValuesOfAnyLength) {
    const Shared made({.fields = R"({"obs": [[5, 2], "<i2", {"ragged": true}], "reward": [[], "<f4", {}]})"});
    Buffer buffer = sharpwave::open(made.address);
    const std::vector<std::int16_t> one{1, 2, 3, 4}, three{10, 11, 20, 21, 22, 23};
    buffer.add({{"obs", one}, {"reward", 0.0f}});
    const std::vector<std::size_t> lengths{1, 0, 2};
    const std::array<float, 3> rewards{1, 2, 3};
    buffer.add({{"obs", Value(three, lengths)}, {"reward", rewards}});
    const Batch batch = buffer.sample(50);
    const std::vector<std::vector<std::int16_t>> expected{{1, 2, 3, 4}, {10, 11}, {}, {20, 21, 22, 23}};
    for (std::size_t i = 0; i < batch.size(); ++i) {
        const auto items = batch.get<std::int16_t>("obs", i);
        EXPECT_EQ(std::vector(items.begin(), items.end()), expected[static_cast<std::size_t>(batch.indices()[i])]);
    }
    const std::vector<std::int16_t> odd{1, 2, 3}, long_one(12);
    const std::vector<std::size_t> too_few{3};
    EXPECT_EQ(message_of(ErrorKind::schema, [&] { buffer.add({{"obs", odd}, {"reward", 0}}); }),
              "add(): field 'obs': expected shape (0 to 5, 2), got 3 items in row 0 of 1");
    EXPECT_EQ(message_of(ErrorKind::schema, [&] { buffer.add({{"obs", long_one}, {"reward", 0}}); }),
              "add(): field 'obs': expected shape (0 to 5, 2), got 12 items in row 0 of 1");
    EXPECT_EQ(message_of(ErrorKind::schema, [&] { buffer.add({{"obs", three}, {"reward", rewards}}); }),
              "add(): field 'obs': expected the length of each of 3 rows, got none; give Value(items, lengths)");
    EXPECT_EQ(message_of(ErrorKind::schema, [&] { buffer.add({{"obs", Value(three, too_few)}, {"reward", rewards}}); }),
              "add(): field 'obs': expected 3 lengths, got 1");
    EXPECT_EQ(buffer.size(), 4u);
}

TEST(Open, TakesFramesOrWholeStacks) {
    const Shared made(
        {.fields = R"({"obs": [[2], "|u1", {"stack": 3}], "reward": [[], "<f4", {}], "done": [[], "|b1", {}]})"});
    Buffer buffer = sharpwave::open(made.address);
    for (std::uint8_t step = 0; step < 5; ++step) {
        const std::array<std::uint8_t, 2> frame{step, step};
        buffer.add({{"obs", frame}, {"reward", 0.0f}, {"done", false}});
    }
    const std::array<std::uint8_t, 6> stack{3, 3, 4, 4, 5, 5};
    buffer.add({{"obs", stack}, {"reward", 0.0f}, {"done", true}});
    const Batch batch = buffer.sample(40);
    EXPECT_EQ(std::vector(batch.shape("obs").begin(), batch.shape("obs").end()), (std::vector<std::size_t>{40, 3, 2}));
    for (std::size_t i = 0; i < batch.size(); ++i) {
        const auto frames = batch.get<std::uint8_t>("obs", i);
        const auto newest = static_cast<int>(batch.indices()[i]);
        for (int frame = 0; frame < 3; ++frame)
            EXPECT_EQ(frames[static_cast<std::size_t>(frame * 2)], std::max(0, newest - 2 + frame));
    }
}

TEST(Open, DerivesNextObservations) {
    const Shared made({.derives_next = true});
    EXPECT_EQ(made.table->layout().fields().size(), 4u);
    Buffer buffer = sharpwave::open(made.address);
    for (int step = 0; step < 30; ++step) add_step(buffer, step, step == 29);
    const Batch batch = buffer.sample(64);
    const auto obs = batch.get<float>("obs"), next = batch.get<float>("next_obs");
    for (std::size_t i = 0; i < obs.size(); ++i) EXPECT_EQ(next[i], obs[i] + 1);
    const std::vector<float> two(6), rewards(2);
    const std::vector<std::int64_t> actions(2);
    const std::array<bool, 2> dones{};
    EXPECT_EQ(message_of(
                  ErrorKind::schema,
                  [&] {
                      buffer.add(
                          {{"obs", two}, {"action", actions}, {"reward", rewards}, {"next_obs", two}, {"done", dones}});
                  }),
              "add(): got 2 rows, and next_obs='derived' needs their order; give the buffer num_envs= (1 if they are "
              "successive steps of one environment), or add one row at a time");
}

TEST(Open, MakesWindowsWithTheirMasks) {
    const Shared made(
        {.view = R"({"kind": "Windows", "bootstrap": 0, "burn_in": 1, "end": "pad", "gamma": 0.99, "length": 3,
        "n_step": 1, "place_indices": true, "priority_eta": 0.9, "start": "uniform", "stride": 1, "truncated": true})"});
    Buffer buffer = sharpwave::open(made.address);
    for (int step = 0; step < 40; ++step) add_step(buffer, step, step % 8 == 7);
    const Batch batch = buffer.sample(16);
    EXPECT_EQ(std::vector(batch.shape("obs").begin(), batch.shape("obs").end()), (std::vector<std::size_t>{16, 4, 3}));
    const auto places = batch.get<std::int64_t>("place_indices"), actions = batch.get<std::int64_t>("action");
    const auto valid = batch.get<bool>("valid"), mask = batch.get<bool>("mask"), first = batch.get<bool>("first");
    EXPECT_EQ(batch.get<bool>("truncated").size(), 64u);
    for (std::size_t i = 0; i < places.size(); ++i) {
        EXPECT_EQ(places[i], valid[i] ? actions[i] : -1);
        if (valid[i]) {
            EXPECT_EQ(first[i], actions[i] % 8 == 0);
        }
        EXPECT_LE(mask[i], valid[i]);
    }
}

TEST(Open, KeepsThePaceOfTheBuffer) {
    const Shared made({.pace = "[3, 1.0, -Infinity, Infinity]"});
    Buffer buffer = sharpwave::open(made.address);
    add_step(buffer, 0);
    EXPECT_NE(message_of(ErrorKind::not_ready, [&] { buffer.sample(1, 0.0); }).find("; give a longer timeout_s"),
              std::string::npos);
    std::thread actor([&] {
        Buffer own = sharpwave::open(made.address);
        add_step(own, 1);
        add_step(own, 2);
    });
    EXPECT_EQ(buffer.sample(2).size(), 2u);  // waits for the other's rows
    actor.join();
    EXPECT_EQ(buffer.stats().at("pace_samples"), 2);
}

TEST(Open, GivesOneTableToManyThreads) {
    const Shared made({.capacity = 10'000});
    Buffer buffer = sharpwave::open(made.address);
    add_step(buffer, 0);
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
        threads.emplace_back([&, t] {
            Buffer own = t == 0 ? buffer : sharpwave::open(made.address);
            for (int step = 0; step < 300; ++step) add_step(t == 1 ? buffer : own, step);
        });
    }
    threads.emplace_back([buffer]() mutable {
        Batch batch = buffer.batch(8);
        for (int i = 0; i < 100; ++i) {
            buffer.sample_into(batch);
            for (std::size_t k = 0; k < 8; ++k) {
                ASSERT_EQ(batch.get<float>("next_obs", k)[0], batch.get<float>("obs", k)[0] + 1);
            }
        }
    });
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(buffer.size(), 901u);
}

TEST(Open, ClosesOnceAndForAll) {
    const Shared made;
    Buffer buffer = sharpwave::open(made.address);
    add_step(buffer, 0);
    buffer.flush();
    buffer.close();
    buffer.close();
    EXPECT_NE(message_of(ErrorKind::closed, [&] { add_step(buffer, 1); }), "no error");
    EXPECT_NE(message_of(ErrorKind::closed, [&] { buffer.sample(1); }), "no error");
    EXPECT_NE(message_of(ErrorKind::closed, [&] { buffer.size(); }), "no error");
    EXPECT_TRUE(made.table->load_word(0) & format::kTruncated);  // the open episode has ended
    EXPECT_EQ(sharpwave::open(made.address).size(), 1u);
}

TEST(Open, DrawsAgainIntoTheSameMemory) {
    const Shared made({.sampler = kPrioritized});
    Buffer buffer = sharpwave::open(made.address);
    for (int step = 0; step < 50; ++step) add_step(buffer, step);
    Batch batch = buffer.batch(32);
    buffer.sample_into(batch);
    const float* const memory = batch.get<float>("obs").data();
    buffer.sample_into(batch);
    EXPECT_EQ(batch.get<float>("obs").data(), memory);
}

TEST(Open, IsTypedWhereTheTypesFit) {
    using Typed = ReplayBuffer<Observed, std::int64_t>;
    const Shared made({.sampler = kPrioritized});
    {
        Typed typed = Typed::open(made.address);
        for (int step = 0; step < 30; ++step) {
            const float now = static_cast<float>(step);
            typed.add({{now, now, now}, step, now / 2, {now + 1, now + 1, now + 1}, step % 10 == 9});
        }
        EXPECT_EQ(typed.size(), 30u);
        EXPECT_EQ(typed.capacity(), 100u);
        std::vector<std::size_t> indices;
        std::vector<float> weights;
        const auto batch = typed.sample(16, &indices, &weights);
        for (std::size_t i = 0; i < batch.size(); ++i) {
            EXPECT_EQ(batch[i].action, static_cast<std::int64_t>(indices[i]));
            EXPECT_EQ(batch[i].next_observation[2], batch[i].observation[0] + 1);
            EXPECT_EQ(batch[i].done, batch[i].action % 10 == 9);
            EXPECT_EQ(weights[i], 1);
        }
        typed.update_priorities({3}, {1e6f});
        typed.sample(16, &indices);
        EXPECT_GT(std::count(indices.begin(), indices.end(), 3u), 8);
    }
    Buffer untyped = sharpwave::open(made.address);
    EXPECT_EQ(untyped.size(), 30u);
    using Small = ReplayBuffer<std::array<float, 2>, std::int64_t>;
    EXPECT_EQ(message_of(ErrorKind::schema, [&] { Small::open(made.address); }),
              "open(): field 'obs': expected 8 bytes a row, as the type in C++ has, got 12");
    using Other = ReplayBuffer<std::array<std::int32_t, 3>, std::int64_t>;
    EXPECT_EQ(message_of(ErrorKind::schema, [&] { Other::open(made.address); }),
              "get(): field 'obs': expected float32, got int32 as the type of its items");
}
