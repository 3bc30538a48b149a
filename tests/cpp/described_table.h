// Tables as Python makes them, with its description, for tests of sharpwave::open().
#pragma once

#include <gtest/gtest.h>
#include <sharpwave/buffer.h>
#include <unistd.h>

#include <array>
#include <memory>
#include <string>

#include "buffer/row_spec.h"
#include "sampling/exponents.h"
#include "storage/storage.h"
#include "table/table.h"

namespace sharpwave::test {

inline const std::string kTransitions =
    R"({"kind": "Transitions", "n_step": 1, "gamma": 0.99, "truncated": false, "hindsight": null})";
inline const std::string kUniform = R"({"kind": "Uniform", "max_reads": null, "newest": 0})";
inline const std::string kPrioritized =
    R"({"kind": "Prioritized", "alpha": 0.6, "beta": 0.4, "eps": 1e-06, "max_reads": null, "mix": 0.0,
        "new_rows": "live_max", "newest": 0, "normalize": "batch", "rank_based": false, "stratified": true})";
inline const std::string kPlain =
    R"({"obs": [[3], "<f4", {}], "action": [[], "<i8", {}], "reward": [[], "<f4", {}], "next_obs": [[3], "<f4", {}],
        "done": [[], "|b1", {}]})";

struct Made {
    std::string fields = kPlain;
    std::string sampler = kUniform;
    std::string view = kTransitions;
    std::string pace = "null";
    std::string num_envs = "null";
    bool derives_next = false;
    std::uint64_t capacity = 100;

    std::string description() const {
        return R"({"face": "ReplayBuffer", "schema": {"fields": )" + fields +
               ", \"derives_next\": " + (derives_next ? "true" : "false") + "}, \"num_envs\": " + num_envs +
               ", \"sampler\": " + sampler + ", \"view\": " + view + ", \"pace\": " + pace + "}";
    }
};

// A table in shared memory, gone with this object.
class Shared {
public:
    explicit Shared(const Made& made = {}, const std::string& description = "") {
        static int number = 0;
        const std::string name = "test-open-" + std::to_string(getpid()) + "-" + std::to_string(number++);
        address = "shm://" + name;
        path_ = shared_memory_folder() + "/sharpwave-" + name + ".sw";
        const RowSpec spec = RowSpec::parse(made.description(), made.capacity, "test");
        TableConfig config;
        config.fields = spec.fields;
        config.capacity = made.capacity;
        config.width = spec.width();
        config.seed = 7;
        config.index.is_by_priority = spec.is_prioritized;
        config.index.has_index = spec.config.index.has_value();
        if (spec.config.index) {
            config.index.numbers_steps = !spec.config.index->starts.is_any();
            config.index.counts_reads = spec.config.index->max_reads > 1;
        }
        config.set_counters = Exponents{0.6, 0.4, 0.4, 0}.writer();
        config.description = description.empty() ? made.description() : description;
        table = Table::create(config, path_);
    }
    ~Shared() { unlink(path_.c_str()); }
    std::string address;
    std::shared_ptr<Table> table;

private:
    std::string path_;
};

using Observed = std::array<float, 3>;

inline void add_step(Buffer& buffer, int step, bool done = false) {
    const float now = static_cast<float>(step);
    const Observed obs{now, now, now}, next{now + 1, now + 1, now + 1};
    buffer.add({{"obs", obs}, {"action", step}, {"reward", now / 2}, {"next_obs", next}, {"done", done}});
}

template <class Call>
std::string message_of(ErrorKind kind, Call call) {
    try {
        call();
    } catch (const Error& error) {
        EXPECT_EQ(error.kind(), kind) << error.what();
        return error.what();
    }
    return "no error";
}

}  // namespace sharpwave::test
