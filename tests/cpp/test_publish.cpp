// The protocol by which rows become visible, as a litmus: one writer laps readers on a small ring, every word of a row
// holds the row's serial, and whatever a reader is given is of one serial. Run natively, under ThreadSanitizer's
// word-wise copies, and for aarch64 (make test-aarch64).
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <thread>

#include "base/error.h"
#include "rows.h"

using namespace sharpwave;
using namespace sharpwave::test;

namespace {

using Values = std::vector<std::uint64_t>;

// How long the two race in one test, on however slow a machine.
constexpr std::chrono::milliseconds kRace{400};
constexpr std::chrono::seconds kHang{60};  // a race that nobody runs: on a loaded machine one goes on beyond kRace

struct Kind {
    std::uint64_t words = 8;  // of a row
    bool is_ragged = false;   // and stands in the heap
    bool derives = false;     // its next observation is the row after
    std::size_t rows = 1;     // of an append
    std::uint64_t capacity = 24;
    std::uint32_t n_step = 1;
};

TableConfig config_of(const Kind& kind) {
    TableConfig made = config(kind.capacity, 1, 2);
    const auto words = static_cast<std::int64_t>(kind.words);
    made.fields = {{"obs", "<u8", 8, {words}}, {"reward", "<f8", 8, {}}};
    made.fields[0].is_ragged = kind.is_ragged;
    made.fields[0].gives_next = kind.derives;
    return made;
}

ViewConfig view_of(const Kind& kind) {
    ViewConfig view{kind.n_step, 1.0, {{0, Role::own}, {1, Role::reward}}};
    if (kind.derives) view.leaves.push_back({0, Role::next});
    return view;
}

// The only writer: the rows that it appends get the serials 0, 1, 2, ...
class Scribe {
public:
    Scribe(Writer& writer, const Kind& kind)
        : writer_(writer), kind_(kind), obs_(kind.rows * kind.words), next_(obs_.size()), reward_(kind.rows) {
        for (std::size_t i = 0; i <= kind.rows; ++i) starts_.push_back(i * kind.words * 8);
    }
    void append() {
        for (std::size_t i = 0; i < kind_.rows; ++i) {
            std::fill_n(&obs_[i * kind_.words], kind_.words, serial_ + i);
            std::fill_n(&next_[i * kind_.words], kind_.words, serial_ + i + 1);
            reward_[i] = static_cast<double>(serial_ + i);
        }
        const auto input = [&](const Values& values) {
            const auto* flat = reinterpret_cast<const std::byte*>(values.data());
            return FieldInput{flat, kind_.words * 8, 1, kind_.is_ragged ? starts_.data() : nullptr};
        };
        const FieldInput fields[] = {input(obs_), {reinterpret_cast<const std::byte*>(reward_.data()), 8}};
        const FieldInput next = input(next_);
        writer_.append({fields, kind_.rows, nullptr, &next});
        serial_ += kind_.rows;
    }
    std::uint64_t serial() const { return serial_; }

private:
    Writer& writer_;
    Kind kind_;
    Values obs_, next_, starts_;
    std::vector<double> reward_;
    std::uint64_t serial_ = 0;
};

// A batch, and whether each of its rows is one row.
class Reader {
public:
    Reader(const std::shared_ptr<Table>& table, const Kind& kind, std::size_t count)
        : batches(table, {view_of(kind)}),
          serials(count),
          kind_(kind),
          obs_(count * kind.words),
          next_(obs_.size()),
          reward_(count),
          discounts_(count),
          lengths_(count) {}

    Outputs outputs() {
        flats_ = {reinterpret_cast<std::byte*>(obs_.data()), reinterpret_cast<std::byte*>(reward_.data()),
                  reinterpret_cast<std::byte*>(next_.data())};
        length_places_.assign(3, kind_.is_ragged ? lengths_.data() : nullptr);
        return {flats_.data(), length_places_.data(), kind_.n_step > 1 ? discounts_.data() : nullptr};
    }

    // The serials that the words of a row do not agree with.
    std::uint64_t torn(bool single = false) const {
        std::uint64_t wrong = 0;
        for (std::size_t i = 0; i < serials.size(); ++i) {
            const std::uint64_t serial = serials[i];
            bool whole = true;
            for (std::uint64_t k = 0; k < kind_.words; ++k) whole = whole && obs_[i * kind_.words + k] == serial;
            double sum = static_cast<double>(serial);
            std::uint64_t last = serial;
            if (kind_.n_step > 1 && !single) {
                // As many steps as there were rows after it: sums of serials tell how many.
                while (sum < reward_[i]) sum += static_cast<double>(++last);
            }
            whole = whole && sum == reward_[i];
            for (std::uint64_t k = 0; kind_.derives && k < kind_.words; ++k)
                whole = whole && next_[i * kind_.words + k] == last + 1;
            wrong += !whole;
        }
        return wrong;
    }

    BatchMaker batches;
    Values serials;

private:
    Kind kind_;
    Values obs_, next_;
    std::vector<double> reward_;
    std::vector<float> discounts_;
    std::vector<std::int64_t> lengths_;
    std::vector<std::byte*> flats_;
    std::vector<std::int64_t*> length_places_;
};

// Lets a writer and two readers race: one draws, the other reads all that there is.
void race(const Kind& kind) {
    auto table = Table::create(config_of(kind));
    auto writer = table->writer();
    Scribe scribe(*writer, kind);
    while (table->size() < kind.capacity) scribe.append();
    std::atomic<bool> stop{false};
    std::atomic<std::uint64_t> torn{0}, drawn{0}, read{0};
    // Writers may be faster than a reader can be: that is told, and no mistake.
    const auto unless_lapped = [](const std::function<void()>& call) {
        try {
            call();
            return true;
        } catch (const Error& error) {
            EXPECT_EQ(error.kind(), ErrorKind::not_ready) << error.what();
            return false;
        }
    };
    std::thread drawing([&] {
        Reader reader(table, kind, 16);
        while (!stop) {
            const Outputs out = reader.outputs();
            if (!unless_lapped([&] { reader.batches.sample(16, out, {reader.serials.data()}); })) continue;
            torn += reader.torn();
            drawn += 16;
        }
    });
    std::thread reading([&] {
        while (!stop) {
            Values serials = table->live_serials();
            if (serials.empty()) continue;
            Reader reader(table, kind, serials.size());
            Values words(serials.size());
            std::size_t skipped = 0;
            reader.batches.read(serials.data(), serials.size(), reader.outputs(), words.data(), &skipped);
            serials.resize(serials.size() - skipped);
            reader.serials = serials;
            torn += reader.torn(true);
            read += serials.size();
        }
    });
    const auto begin = std::chrono::steady_clock::now();
    const auto is_enough = [&] { return drawn + read > 0 && scribe.serial() > 10 * kind.capacity; };
    for (auto now = begin; now < begin + kRace || (now < begin + kHang && !is_enough());
         now = std::chrono::steady_clock::now()) {
        for (int i = 0; i < 64; ++i) scribe.append();
    }
    stop = true;
    drawing.join();
    reading.join();
    EXPECT_EQ(torn, 0u) << "of " << drawn << " drawn and " << read << " read while " << scribe.serial()
                        << " were added";
    EXPECT_GT(drawn + read, 0u);
    EXPECT_GT(scribe.serial(), 10 * kind.capacity) << "the writer has to lap the readers";
}

}  // namespace

TEST(Threads, GiveRowsOfOneSerialWhenTheWordStandsInTheRow) { race({}); }

TEST(Threads, GiveRowsOfOneSerialWhenAGroupIsCommittedAtOnce) { race({.rows = 16}); }

TEST(Threads, GiveRowsOfOneSerialWhenWordsAreAColumn) { race({.words = 160, .rows = 3}); }

TEST(Threads, GiveRowsOfOneSerialWhenValuesStandInTheHeap) { race({.words = 12, .is_ragged = true}); }

TEST(Threads, GiveNextObservationsOfTheRowAfter) { race({.derives = true}); }

TEST(Threads, GiveNextObservationsOfTheRowAfterOutOfTheHeap) {
    race({.words = 12, .is_ragged = true, .derives = true});
}

TEST(Threads, GiveSumsOfStepsThatFollowEachOther) { race({.derives = true, .n_step = 3}); }

TEST(Threads, GiveSumsOfStepsThatFollowEachOtherOverManyBlocks) { race({.rows = 7, .n_step = 5}); }

// An example's own row may be written over between its draw and the choice of its goal.
TEST(Threads, GiveGoalsOfLongEpisodesThatAreWrittenOver) {
    constexpr std::size_t kSteps = 1000, kBatch = 256;
    TableConfig made = config(2 * kSteps, 1, 2);
    made.fields = {{"obs", "<u8", 8, {}}};
    made.index = {.has_index = true, .numbers_steps = true};
    made.set_counters = Exponents{.alpha = 1}.writer();
    auto table = Table::create(made);
    RowIndexConfig index;
    index.eps = 0;
    index.normalize = Normalize::none;
    index.new_rows = NewRows::constant;
    index.starts.needs = StartRule::Needs::end;
    GoalConfig goal;
    goal.strategy = GoalStrategy::episode;
    goal.ratio = 1;
    goal.achieved = {0, Role::own};
    BatchMaker batches(table, {.view = {1, 1.0, {{0, Role::own}}}, .index = index, .goals = goal});
    auto writer = table->writer();
    Values episode(kSteps);
    std::vector<std::uint8_t> flags(kSteps, 0);
    flags.back() = kRowTruncated;
    const FieldInput field{reinterpret_cast<const std::byte*>(episode.data()), 8};
    const auto append = [&](std::uint64_t number) {
        std::fill(episode.begin(), episode.end(), number);
        writer->append({&field, kSteps, flags.data()});
    };
    append(0);
    append(1);
    std::atomic<bool> stop{false};
    std::thread writing([&] {
        for (std::uint64_t number = 2; !stop; ++number) append(number);
    });
    Values obs(kBatch), goals(kBatch), serials(kBatch);
    std::vector<std::uint8_t> relabelled(kBatch);
    std::byte* const flat = reinterpret_cast<std::byte*>(obs.data());
    BatchExtras drawn{serials.data()};
    drawn.goals = {reinterpret_cast<std::byte*>(goals.data()), relabelled.data()};
    const auto end = std::chrono::steady_clock::now() + kRace;
    std::uint64_t wrong = 0;
    while (std::chrono::steady_clock::now() < end) {
        try {
            batches.sample(kBatch, {&flat}, drawn);
        } catch (const Error&) {
            continue;
        }
        for (std::size_t i = 0; i < kBatch; ++i) wrong += obs[i] != goals[i];
    }
    stop = true;
    writing.join();
    EXPECT_EQ(wrong, 0u) << "goals are of the example's own episode";
}
