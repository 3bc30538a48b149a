// What sharpwave::open() and a Buffer refuse, and in which words.
#include <sharpwave/buffer.h>

#include <array>

#include "described_table.h"

using namespace sharpwave;
using namespace sharpwave::test;

TEST(OpenRefusals, SaysWhatDoesNotFitAndWritesNothing) {
    const Shared made;
    Buffer buffer = sharpwave::open(made.address);
    const Observed obs{};
    const std::array<double, 3> wide{};
    const std::array<float, 2> small{};
    const std::array<float, 2> two_rewards{};
    const auto refused = [&](std::initializer_list<Given> values) {
        return message_of(ErrorKind::schema, [&] { buffer.add(values); });
    };
    EXPECT_EQ(refused({{"obs", wide}, {"action", 1}, {"reward", 0}, {"next_obs", obs}, {"done", false}}),
              "add(): field 'obs': expected float32, got float64; give a span of that type");
    EXPECT_EQ(refused({{"obs", small}, {"action", 1}, {"reward", 0}, {"next_obs", obs}, {"done", false}}),
              "add(): field 'obs': expected 3 items, 1 row of shape (3), got 2");
    EXPECT_EQ(refused({{"obs", obs}, {"action", 1}, {"reward", two_rewards}, {"next_obs", obs}, {"done", false}}),
              "add(): field 'obs': expected 6 items, 2 rows of shape (3), got 3");
    EXPECT_EQ(refused({{"obs", obs}, {"action", 1.5}, {"reward", 0}, {"next_obs", obs}, {"done", false}}),
              "add(): field 'action': expected int64, got a number of float64 that it cannot hold");
    EXPECT_EQ(refused({{"obs", obs}, {"action", 1}, {"reward", 1e300}, {"next_obs", obs}, {"done", false}}),
              "add(): field 'reward': expected float32, got a number of float64 that it cannot hold");
    EXPECT_EQ(refused({{"obs", obs}, {"action", 1}, {"reward", 0}, {"next_obs", obs}, {"done", 2}}),
              "add(): field 'done': expected bool, got a number of int32 that it cannot hold");
    EXPECT_EQ(refused({{"obs", obs}, {"reward", 0}, {"next_obs", obs}}),
              "add(): missing 'action', 'done'; the schema has obs, action, reward, next_obs, done");
    EXPECT_EQ(refused({{"obs", obs}, {"aktion", 1}, {"reward", 0}, {"next_obs", obs}, {"done", false}}),
              "add(): unknown field 'aktion'; the schema has obs, action, reward, next_obs, done");
    EXPECT_EQ(
        refused(
            {{"obs", obs}, {"action", 1}, {"reward", 0}, {"next_obs", obs}, {"done", false}, {"terminated", false}}),
        "add(): field 'terminated': given twice; leave one out");
    EXPECT_EQ(
        refused({{"obs", obs}, {"action", 1}, {"reward", 0}, {"next_obs", obs}, {"done", false}, {"priority", 1.0f}}),
        "add(): priority: rows are not drawn by priority; give the buffer sampler=Prioritized()");
    EXPECT_EQ(
        refused({{"obs", obs}, {"action", 1}, {"reward", 0}, {"next_obs", obs}, {"done", false}, {"truncated", 2}}),
        "add(): truncated: expected truth values, got int32");
    EXPECT_EQ(buffer.size(), 0u);
    EXPECT_EQ(message_of(ErrorKind::not_ready, [&] { buffer.sample(4); }).substr(0, 9), "sample():");
    EXPECT_EQ(message_of(ErrorKind::schema, [&] { buffer.sample(0); }),
              "sample(): batch_size: expected at least 1, got 0");
    add_step(buffer, 0);
    const Batch batch = buffer.sample(2);
    EXPECT_EQ(message_of(ErrorKind::schema, [&] { batch.get<double>("obs"); }),
              "get(): field 'obs': expected float32, got float64 as the type of its items");
    EXPECT_EQ(message_of(ErrorKind::schema, [&] { batch.get<float>("image"); }),
              "get(): unknown field 'image'; the batch has obs, action, reward, next_obs, done, indices");
    EXPECT_EQ(message_of(ErrorKind::schema, [&] { batch.get<float>("obs", 2); }),
              "get(): field 'obs': expected an example below 2, got 2");
    const Shared other;
    Batch foreign = sharpwave::open(other.address).batch(2);
    EXPECT_EQ(message_of(ErrorKind::schema, [&] { buffer.sample_into(foreign); }),
              "sample_into(): expected a batch of this buffer, got another's; make it with batch()");
    EXPECT_EQ(message_of(ErrorKind::schema, [&] { buffer.sample(1, -1.0); }),
              "sample(): timeout_s: expected seconds, at least 0, or nothing, got -1.000000");
}

TEST(OpenRefusals, RefusesWhatItCannotOpen) {
    const auto refused = [](ErrorKind kind, const std::string& address, const OpenOptions& options = {}) {
        return message_of(kind, [&] { sharpwave::open(address, options); });
    };
    EXPECT_EQ(refused(ErrorKind::storage, "replay"), "open(): expected 'shm://name' or 'file://path', got 'replay'");
    EXPECT_EQ(refused(ErrorKind::storage, "shm://a/b"),
              "open(): expected a name of letters, digits, '_', '.', '-' after shm://, got 'a/b'");
    EXPECT_EQ(refused(ErrorKind::storage, "file://"), "open(): expected a path after file://, got 'file://'");
    EXPECT_NE(refused(ErrorKind::storage, "shm://test-open-none"), "no error");
    EXPECT_EQ(refused(ErrorKind::not_ready, "shm://test-open-none", {.wait = true, .timeout_s = 0.01}),
              "open(): 'shm://test-open-none' was not created in time; give a longer timeout_s");
    const std::string hindsight =
        R"({"kind": "Transitions", "n_step": 1, "gamma": 0.99, "truncated": false, "hindsight": {"reward": "task:reward"}})";
    Made of;
    of.view = hindsight;
    const Shared relabels({}, of.description());
    EXPECT_NE(refused(ErrorKind::schema, relabels.address)
                  .find("whose reward is a function of Python (task:reward); C++ cannot call it"),
              std::string::npos);
}

TEST(OpenRefusals, RefusesDamagedDescriptions) {
    const Made whole;
    const auto refused = [&](const std::string& description) {
        const Shared made({}, description);
        return message_of(ErrorKind::storage, [&] { sharpwave::open(made.address); });
    };
    const std::string text = whole.description();
    EXPECT_NE(refused(text.substr(0, text.size() / 2)).find("the description is damaged"), std::string::npos);
    for (const auto& [from, to] :
         std::initializer_list<std::pair<std::string, std::string>>{{"\"<i8\"", "\"<i4\""},
                                                                    {"[3]", "[4]"},
                                                                    {"[3]", "[0]"},
                                                                    {"[3]", "[-1]"},
                                                                    {"\"<f4\"", "\"f\""},
                                                                    {"\"action\"", "\"aktion\""},
                                                                    {"Uniform", "Unifrom"},
                                                                    {"Uniform", "Fifo"},
                                                                    {"\"n_step\": 1", "\"n_step\": 0"},
                                                                    {"0.99", "1.01"},
                                                                    {"\"pace\": null", "\"pace\": [1, 1.0, 2]"},
                                                                    {"\"pace\": null", "\"pace\": [1, 0, 0, 0]"},
                                                                    {"\"num_envs\": null", "\"num_envs\": 2"},
                                                                    {"Transitions", "Windows"},
                                                                    {"\"schema\"", "\"scheme\""},
                                                                    {"\"<f4\", {}", "\"<f4\", {\"stack\": 2}"}}) {
        std::string damaged = text;
        damaged.replace(damaged.find(from), from.size(), to);
        EXPECT_NE(refused(damaged).find("the description is damaged"), std::string::npos) << from << " " << to;
    }
}
