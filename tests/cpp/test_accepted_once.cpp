// Rows that a client numbers: sent again, they are taken once. Kills are in tests/crash/sweep.cpp.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "rows.h"
#include "table/client_rows.h"

namespace sharpwave::test {
namespace {

constexpr ClientToken kOne = {1, 11}, kTwo = {2, 22}, kThree = {3, 33}, kFour = {0, 44};

std::uint64_t send(Writer& writer, std::uint64_t first_row, std::size_t count, std::uint64_t* serials = nullptr,
                   const std::uint8_t* flags = nullptr) {
    Rows rows(count);
    for (std::size_t i = 0; i < count; ++i) rows.set(i, first_row + i);
    const auto fields = rows.inputs();
    return writer.append_once({fields.data(), count, flags}, first_row, serials);
}

std::vector<std::uint64_t> numbers(std::uint64_t end) {
    std::vector<std::uint64_t> all(end);
    std::iota(all.begin(), all.end(), 0);
    return all;
}

std::string refusal(auto&& call, ErrorKind kind) {
    try {
        call();
    } catch (const Error& error) {
        EXPECT_EQ(error.kind(), kind);
        return error.what();
    }
    return "";
}

struct File {
    File() { std::filesystem::remove(path); }
    ~File() { std::filesystem::remove(path); }
    const std::string path = std::filesystem::temp_directory_path() / ("sharpwave-once-" + std::to_string(getpid()));
};

TEST(AcceptedOnce, RowsSentAgainAreSkipped) {
    TableConfig small = config(1000);
    small.block_rows = 8;  // several pieces an append
    const auto table = Table::create(small);
    const auto writer = table->writer(kOne);
    EXPECT_EQ(send(*writer, 0, 20), 20u);
    EXPECT_EQ(send(*writer, 0, 20), 20u);
    EXPECT_EQ(send(*writer, 5, 5), 20u);
    std::vector<std::uint64_t> serials(30);
    EXPECT_EQ(send(*writer, 10, 30, serials.data()), 40u);
    for (std::size_t i = 0; i < 30; ++i) EXPECT_EQ(serials[i], i < 10 ? format::kNone : 10 + i);
    EXPECT_EQ(contents(table), numbers(40));
    EXPECT_EQ(table->accepted(kOne), 40u);
    EXPECT_EQ(table->accepted(kTwo), std::nullopt);
}

TEST(AcceptedOnce, RowsAfterAGapAreRefused) {
    const auto table = Table::create(config(1000, 2));
    const auto writer = table->writer(kOne);
    send(*writer, 0, 4);
    EXPECT_EQ(refusal([&] { send(*writer, 6, 2); }, ErrorKind::schema),
              "append_once(): expected row 4 or an earlier one, got first_row=6; the rows between were not sent or not "
              "accepted: send them first");
    EXPECT_EQ(refusal([&] { send(*writer, 3, 2); }, ErrorKind::schema),
              "append_once(): expected whole steps of 2 rows, got rows 3 to 5");
    const auto local = table->writer();
    EXPECT_NE(refusal([&] { send(*local, 0, 2); }, ErrorKind::schema).find("a client's token"), std::string::npos);
    EXPECT_EQ(contents(table), numbers(4));
}

TEST(AcceptedOnce, MaskedRowsCountAndHaveNoSerial) {
    const auto table = Table::create(config(1000));
    const auto writer = table->writer(kOne);
    const std::uint8_t flags[] = {0, kRowVoid, 0};
    std::uint64_t serials[3];
    EXPECT_EQ(send(*writer, 0, 3, serials, flags), 3u);
    EXPECT_EQ(serials[1], format::kNone);
    EXPECT_EQ(contents(table), (std::vector<std::uint64_t>{0, 2}));
}

TEST(AcceptedOnce, ClientGoesOnWithAnotherWriter) {
    const auto table = Table::create(config(1000));
    send(*table->writer(kOne), 0, 10);
    const auto writer = table->writer(kOne);
    EXPECT_EQ(writer->accepted(), 10u);
    EXPECT_EQ(send(*writer, 7, 6), 13u);
    EXPECT_EQ(contents(table), numbers(13));
}

TEST(AcceptedOnce, TokenOfALiveWriterIsRefused) {
    const auto table = Table::create(config(1000));
    auto writer = table->writer(kOne);
    EXPECT_EQ(refusal([&] { table->writer(kOne); }, ErrorKind::not_ready),
              "writer(): this client's token is held by a live writer; close that one first, or wait until its process "
              "has ended");
    EXPECT_NE(table->writer(kFour), nullptr);
    writer->close();
    EXPECT_NE(table->writer(kOne), nullptr);
}

TEST(AcceptedOnce, NewWritersTakeRecordsWithoutAClientThenTheLongestUnused) {
    const auto table = Table::create(config(1000, 1, 3));
    for (const ClientToken& token : {kOne, kTwo}) send(*table->writer(token), 0, 5);
    table->writer();  // the third record
    table->writer();
    EXPECT_TRUE(table->accepted(kOne) && table->accepted(kTwo));
    table->writer(kOne);  // used again: now the second client is the one that was here longest ago
    send(*table->writer(kThree), 0, 1);
    EXPECT_TRUE(table->accepted(kOne) && table->accepted(kTwo) && table->accepted(kThree));
    const auto local = table->writer();
    EXPECT_TRUE(table->accepted(kOne) && !table->accepted(kTwo) && table->accepted(kThree));
    EXPECT_EQ(table->clients().size(), 2u);
    EXPECT_EQ(table->writer(kTwo)->accepted(), 0u);  // a new client, in the place of the first
    EXPECT_FALSE(table->accepted(kOne));
}

TEST(AcceptedOnce, LiveFileKeepsClientsAndSnapshotForgetsThem) {
    const File file, snapshot_file;
    {
        const auto table = Table::create(config(1000), file.path);
        send(*table->writer(kOne), 0, 10);
    }
    auto table = Table::attach(file.path);
    EXPECT_EQ(table->accepted(kOne), 10u);
    const std::string snapshot = file.path + ".saved";
    table->save(snapshot);
    EXPECT_TRUE(Table::load(snapshot)->clients().empty());
    std::filesystem::remove(snapshot);
    EXPECT_EQ(table->accepted(kOne), 10u);
    table.reset();
    EXPECT_TRUE(Table::attach(file.path, {true})->clients().empty());  // recover=True
}

TEST(AcceptedOnce, RowsOfAClearedTableStayAccepted) {
    const auto table = Table::create(config(1000));
    const auto writer = table->writer(kOne);
    send(*writer, 0, 10);
    table->clear();
    EXPECT_EQ(send(*writer, 0, 12), 12u);
    EXPECT_EQ(contents(table), (std::vector<std::uint64_t>{10, 11}));
}

TEST(AcceptedOnce, ThreadsThatSendTheSameRowsAddThemOnce) {
    TableConfig small = config(4000);
    small.block_rows = 50;
    const auto table = Table::create(small);
    const auto writer = table->writer(kOne);
    std::vector<std::thread> threads;
    for (std::uint64_t t = 0; t < 4; ++t) {
        threads.emplace_back([&, t] {
            for (std::uint64_t first = 0; first < 3000; first = writer->accepted()) {
                const std::uint64_t again = std::min(first, t * 5);
                send(*writer, first - again, std::min<std::uint64_t>(3000 - first, t * 7 + 3) + again);
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(contents(table), numbers(3000));
}

TEST(AcceptedOnce, ThreadsThatOpenOneTokenGetItOneAtATime) {
    const auto table = Table::create(config(1000, 1, 8));
    std::atomic<std::uint64_t> opened{0};
    std::atomic<int> holders{0}, most{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
        threads.emplace_back([&] {
            while (opened < 200) {
                try {
                    auto writer = table->writer(kOne);
                    most = std::max(most.load(), ++holders);
                    const std::uint64_t first = writer->accepted();
                    EXPECT_EQ(send(*writer, first, 1), first + 1);
                    ++opened;
                    --holders;
                } catch (const Error& error) {
                    EXPECT_EQ(error.kind(), ErrorKind::not_ready);
                }
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(most, 1);
    EXPECT_EQ(table->clients().size(), 1u);
    EXPECT_EQ(contents(table), numbers(*table->accepted(kOne)));
}

// ---- stacks ---------------------------------------------------------------------------------------------------------

constexpr std::uint32_t kFrames = 4;

std::shared_ptr<Table> stacked(bool derived, bool pads_zero) {
    TableConfig config;
    config.capacity = 200;
    config.block_rows = 20;
    config.fields = {{"obs", "<u4", 4, {}}};
    config.fields[0].stack = kFrames;
    config.fields[0].pads_zero = pads_zero;
    config.fields[0].gives_next = derived;
    config.description = "{}";
    return Table::create(config);
}

// The stack of step `step` of an episode whose frames are first, first + 1, ...
void send_stack(Writer& writer, std::uint64_t row, std::uint32_t first, std::uint32_t step, bool pads_zero) {
    std::uint32_t frames[2 * kFrames];
    for (std::uint32_t k = 0; k < kFrames; ++k) {
        const auto frame = [&](std::uint32_t of) {
            return of + k + 1 >= kFrames ? first + of + k + 1 - kFrames : pads_zero ? 0 : first;
        };
        frames[k] = frame(step);
        frames[kFrames + k] = frame(step + 1);
    }
    const auto* newest = reinterpret_cast<const std::byte*>(frames + kFrames - 1);
    const FieldInput field{newest, sizeof frames, kFrames};
    const FieldInput next{newest + kFrames * 4, sizeof frames, kFrames};
    writer.append_once({&field, 1, nullptr, &next}, row);
}

std::vector<std::vector<std::uint32_t>> stacks(const std::shared_ptr<Table>& table) {
    std::vector<std::uint64_t> serials = table->live_serials(), words(serials.size());
    std::vector<std::uint32_t> flat(serials.size() * kFrames);
    std::byte* flats[] = {reinterpret_cast<std::byte*>(flat.data())};
    BatchMaker(table, {ViewConfig{1, 1.0, {{0, Role::own}}}})
        .read(serials.data(), serials.size(), {flats}, words.data());
    std::vector<std::vector<std::uint32_t>> found;
    for (std::size_t i = 0; i < serials.size(); ++i)
        found.emplace_back(flat.begin() + static_cast<std::ptrdiff_t>(i * kFrames),
                           flat.begin() + static_cast<std::ptrdiff_t>((i + 1) * kFrames));
    return found;
}

TEST(AcceptedOnce, ClientThatReturnsInTheMiddleOfAnEpisodeGivesItsStacks) {
    for (const bool derived : {false, true}) {
        for (const bool pads_zero : {false, true}) {
            const auto table = stacked(derived, pads_zero);
            {
                const auto writer = table->writer(kOne);
                for (std::uint32_t step = 0; step < 6; ++step) send_stack(*writer, step, 50, step, pads_zero);
            }
            const auto writer = table->writer(kOne);
            for (std::uint32_t step = 6; step < 12; ++step) send_stack(*writer, step, 50, step, pads_zero);
            // Rows 6 to 8 lack frames and are not drawn; those after them are whole.
            const auto found = stacks(table);
            ASSERT_EQ(found.size(), 9u);
            EXPECT_EQ(found[5], (std::vector<std::uint32_t>{52, 53, 54, 55}));
            EXPECT_EQ(found[6], (std::vector<std::uint32_t>{56, 57, 58, 59}));
            EXPECT_EQ(found[8], (std::vector<std::uint32_t>{58, 59, 60, 61}));
            EXPECT_EQ(table->stats().rows_retired, 3u);
            EXPECT_EQ(table->stats().resets_unflagged, 0u);
            // A jump later in the same episode is still refused.
            EXPECT_THROW(send_stack(*writer, 12, 80, 7, pads_zero), Error);
            EXPECT_EQ(writer->accepted(), 12u);
        }
    }
}

TEST(AcceptedOnce, ClientThatReturnsWithANewEpisodeLosesNoRow) {
    const auto table = stacked(false, false);
    send_stack(*table->writer(kOne), 0, 50, 0, false);
    const auto writer = table->writer(kOne);
    for (std::uint32_t step = 0; step < 3; ++step) send_stack(*writer, 1 + step, 70, step, false);
    EXPECT_EQ(stacks(table).size(), 4u);
    // The table may have forgotten a client that goes on: its stacks are accepted too.
    const auto other = table->writer(kTwo);
    for (std::uint32_t step = 3; step < 7; ++step) send_stack(*other, step - 3, 90, step, false);
    EXPECT_EQ(stacks(table).back(), (std::vector<std::uint32_t>{93, 94, 95, 96}));
    EXPECT_EQ(stacks(table).size(), 5u);
}

}  // namespace
}  // namespace sharpwave::test
