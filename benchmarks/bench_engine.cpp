// Times the engine from C++ against the targets of the project's first specification, and writes them as JSON.
//
//     bench_engine [path]        JSON goes to `path`, a table to the terminal; bench_engine.py says where it was
//     measured
//
// Each sample of a latency is one call, timed by the processor's clock where a call is long enough for it (draws), and
// a hundred calls at once where it is not (adds). The clock's own cost is measured and taken off. Draws of 32 take
// turns, call by call, with a bare gather: the least that copies 32 random rows of as many bytes into one array a
// field.
#include <sharpwave/replay_buffer.h>

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "batches/batch_maker.h"

namespace {

using Clock = std::chrono::steady_clock;
using Observation = std::array<float, 17>;
using Action = std::array<float, 6>;
using Buffer = sharpwave::ReplayBuffer<Observation, Action>;

double clock_cost_ns() {
    double best = 1e9;
    for (int i = 0; i < 10000; ++i) {
        const auto start = Clock::now();
        const auto end = Clock::now();
        best = std::min(best, std::chrono::duration<double, std::nano>(end - start).count());
    }
    return best;
}

struct Figures {
    double min_ns, p50_ns, p99_ns;
};

Figures figures_of(std::vector<double>& ns) {
    std::sort(ns.begin(), ns.end());
    return {ns.front(), ns[ns.size() / 2], ns[ns.size() * 99 / 100]};
}

// Single calls of both in turn, so that they meet the same caches and the same noise.
std::pair<Figures, Figures> measure_in_turn(int samples, const std::function<void()>& one,
                                            const std::function<void()>& other) {
    const double clock_ns = clock_cost_ns();
    std::vector<double> ns[2];
    for (int i = -200; i < samples; ++i) {
        for (int which = 0; which < 2; ++which) {
            const auto start = Clock::now();
            (which ? other : one)();
            const double took = std::chrono::duration<double, std::nano>(Clock::now() - start).count() - clock_ns;
            if (i >= 0) ns[which].push_back(took);
        }
    }
    return {figures_of(ns[0]), figures_of(ns[1])};
}

Figures measure(
    int samples, int calls_each, const std::function<void()>& call, const std::function<void()>& before = [] {}) {
    const double clock_ns = clock_cost_ns();
    std::vector<double> ns(samples);
    for (int i = 0; i < 200; ++i) {
        before();
        call();
    }
    for (double& value : ns) {
        before();
        const auto start = Clock::now();
        for (int c = 0; c < calls_each; ++c) call();
        value = (std::chrono::duration<double, std::nano>(Clock::now() - start).count() - clock_ns) / calls_each;
    }
    return figures_of(ns);
}

// W1: the row of the Python benchmarks, one flat array a field as a Python batch has them.
struct Columns {
    explicit Columns(std::size_t rows)
        : obs(rows),
          next_obs(rows),
          action(rows),
          reward(rows),
          done(rows),
          weights(rows),
          probabilities(rows),
          serials(rows),
          priorities(rows) {
        for (std::size_t i = 0; i < rows; ++i) priorities[i] = 0.1f + static_cast<float>(i % 1009) / 1009;
    }
    std::vector<Observation> obs, next_obs;
    std::vector<Action> action;
    std::vector<float> reward;
    std::vector<std::uint8_t> done;
    std::vector<float> weights;
    std::vector<double> probabilities;
    std::vector<std::uint64_t> serials;
    std::vector<float> priorities;

    std::vector<std::byte*> places() {
        void* all[] = {obs.data(), action.data(), reward.data(), next_obs.data(), done.data()};
        std::vector<std::byte*> flats;
        for (void* place : all) flats.push_back(static_cast<std::byte*>(place));
        return flats;
    }
};

// A full table of such rows with what makes batches of it.
struct Filled {
    Filled(std::uint64_t capacity, bool by_priority, Columns& columns) {
        sharpwave::TableConfig config;
        config.capacity = capacity;
        config.fields = {{"obs", "<f4", 4, {17}},
                         {"action", "<f4", 4, {6}},
                         {"reward", "<f4", 4, {}},
                         {"next_obs", "<f4", 4, {17}},
                         {"done", "|b1", 1, {}}};
        config.index.is_by_priority = by_priority;
        table = sharpwave::Table::create(config);
        sharpwave::ViewConfig view;
        for (std::uint32_t i = 0; i < 5; ++i) view.leaves.push_back({i, sharpwave::Role::own});
        std::optional<sharpwave::RowIndexConfig> index;
        if (by_priority) index.emplace();
        batches = std::make_unique<sharpwave::BatchMaker>(table, sharpwave::BatchConfig{view, index});

        const auto flats = columns.places();
        std::vector<sharpwave::FieldInput> fields;
        for (std::size_t i = 0; i < 5; ++i)
            fields.push_back({flats[i], table->layout().fields()[i].full_bytes, 1, nullptr});
        const std::size_t rows = columns.reward.size();
        const float* priorities = by_priority ? columns.priorities.data() : nullptr;
        const auto writer = table->writer();
        for (std::size_t i = 0; i < capacity / rows + 1; ++i) {
            writer->append({fields.data(), rows, nullptr, nullptr, priorities});
        }
    }
    std::shared_ptr<sharpwave::Table> table;
    std::unique_ptr<sharpwave::BatchMaker> batches;
};

// Rows of one record each, drawn and copied: no words, no checks, nothing that others could write meanwhile.
struct BareRows {
    struct Record {
        Observation obs;
        Action action;
        float reward;
        Observation next_obs;
        std::uint8_t done;
    };
    explicit BareRows(std::size_t capacity) : count(capacity) {
        // As the engine's rows: at the start of a huge page, and huge pages asked for.
        constexpr std::size_t kHuge = std::size_t{1} << 21;
        const std::size_t bytes = (capacity * sizeof(Record) + kHuge - 1) / kHuge * kHuge;
        records.reset(static_cast<Record*>(std::aligned_alloc(kHuge, bytes)));
#ifdef MADV_HUGEPAGE
        madvise(records.get(), bytes, MADV_HUGEPAGE);
#endif
        for (std::size_t i = 0; i < capacity; ++i) records.get()[i] = Record{};
    }
    void sample(std::size_t n, Columns& columns) {
        for (std::size_t i = 0; i < n; ++i) {
            state ^= state << 13, state ^= state >> 7, state ^= state << 17;
            columns.serials[i] = ((state >> 32) * count) >> 32;
            const char* row = reinterpret_cast<const char*>(records.get() + columns.serials[i]);
            for (std::size_t line = 0; line < sizeof(Record); line += 64) __builtin_prefetch(row + line, 0, 2);
            __builtin_prefetch(row + sizeof(Record) - 1, 0, 2);
        }
        for (std::size_t i = 0; i < n; ++i) {
            const Record& row = records.get()[columns.serials[i]];
            columns.obs[i] = row.obs;
            columns.action[i] = row.action;
            columns.reward[i] = row.reward;
            columns.next_obs[i] = row.next_obs;
            columns.done[i] = row.done;
        }
    }
    struct Free {
        void operator()(Record* place) const { std::free(place); }
    };
    std::size_t count;
    std::unique_ptr<Record, Free> records;
    std::uint64_t state = 88172645463325252ull;
};

struct Line {
    std::string name, target;
    Figures figures;
    double rows_a_call;
};

}  // namespace

int main(int argc, char** argv) {
    constexpr std::size_t kCapacity = 1'000'000;
    std::vector<Line> lines;

    Buffer buffer({.capacity = kCapacity, .seed = 1});
    Buffer::TransitionType row{};
    for (std::size_t i = 0; i < kCapacity; ++i) buffer.add(row);
    const Figures add = measure(20000, 100, [&] { buffer.add(row); });
    lines.push_back({"add one transition", "< 100 ns", add, 1});
    lines.push_back({"transitions a second, one writer", "> 1,000,000", add, 1});
    std::vector<Buffer::TransitionType> batch(32);
    lines.push_back(
        {"sample(32), uniform, structs", "< 1000 ns", measure(200000, 1, [&] { buffer.sample_into(batch); }), 32});

    Columns columns(4096);
    const auto flats = columns.places();
    for (const std::size_t rows : {std::size_t{10'000}, kCapacity}) {
        const bool is_cached = rows != kCapacity;
        const std::string among = is_cached ? "10,000 rows" : "1,000,000 rows";
        Filled filled(rows, false, columns);
        BareRows bare(rows);
        const auto [engine, gather] = measure_in_turn(
            200000, [&] { filled.batches->sample(32, {flats.data()}, {columns.serials.data()}); },
            [&] { bare.sample(32, columns); });
        lines.push_back({"sample(32) among " + among, is_cached ? "< 1000 ns" : "", engine, 32});
        lines.push_back({"bare gather of 32 among " + among, "", gather, 32});
    }
    for (const bool by_priority : {false, true}) {
        Filled filled(kCapacity, by_priority, columns);
        const std::string kind = by_priority ? "prioritized" : "uniform";
        const auto draw = [&](std::size_t n) {
            sharpwave::BatchExtras drawn{columns.serials.data()};
            if (by_priority) drawn = {columns.serials.data(), columns.weights.data(), columns.probabilities.data()};
            filled.batches->sample(n, {flats.data()}, drawn);
        };
        for (const auto& [n, samples] : {std::pair<std::size_t, int>{32, 200000}, {256, 40000}, {4096, 4000}}) {
            lines.push_back({"sample(" + std::to_string(n) + "), " + kind + ", one array a field",
                             n != 32       ? ""
                             : by_priority ? "< 10000 ns"
                                           : "< 1000 ns",
                             measure(samples, 1, [&, n = n] { draw(n); }), static_cast<double>(n)});
        }
        if (!by_priority) continue;
        // A draw comes before each update, outside the clock.
        const auto update = [&] {
            filled.batches->index()->update(columns.serials.data(), columns.priorities.data(), 256);
        };
        lines.push_back(
            {"update of 256 priorities just drawn", "", measure(40000, 1, update, [&] { draw(256); }), 256});
    }

    std::string json = "[\n";
    for (const Line& line : lines) {
        char text[512];
        std::snprintf(text, sizeof text,
                      "  {\"name\": \"%s\", \"target\": \"%s\", \"min_ns\": %.1f, \"p50_ns\": %.1f, \"p99_ns\": %.1f, "
                      "\"per_second\": %.0f}%s\n",
                      line.name.c_str(), line.target.c_str(), line.figures.min_ns, line.figures.p50_ns,
                      line.figures.p99_ns, line.rows_a_call * 1e9 / line.figures.p50_ns,
                      &line == &lines.back() ? "" : ",");
        json += text;
        std::printf("%-45s %-14s min %9.1f  p50 %9.1f  p99 %9.1f ns\n", line.name.c_str(), line.target.c_str(),
                    line.figures.min_ns, line.figures.p50_ns, line.figures.p99_ns);
    }
    json += "]\n";
    if (argc > 1) {
        if (std::FILE* file = std::fopen(argv[1], "w")) {
            std::fputs(json.c_str(), file);
            std::fclose(file);
        }
    }
}
