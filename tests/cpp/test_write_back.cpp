// Values written back: a row has its old values or its new ones, for every reader, in snapshots and after damage.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <string>
#include <thread>

#include "base/error.h"
#include "rows.h"
#include "table/mutable_values.h"
#include "table/write_back.h"

namespace sharpwave {
namespace {

using namespace test;

constexpr std::uint64_t kItems = 61;

// `id` stands in the row; `state` and `mark` are written back, always to one number.
TableConfig mutable_config(std::uint64_t capacity, bool checksums = false) {
    TableConfig made = config(capacity, 1, 4);
    made.checksums = checksums;
    made.fields = {
        {"state", "<u4", 4, {static_cast<std::int64_t>(kItems)}}, {"id", "<u8", 8, {}}, {"mark", "<u4", 4, {}}};
    made.fields[0].is_mutable = made.fields[2].is_mutable = true;
    return made;
}

struct Values {
    explicit Values(std::size_t count) : state(count), id(count), mark(count) {}
    std::vector<std::array<std::uint32_t, kItems>> state;
    std::vector<std::uint64_t> id;
    std::vector<std::uint32_t> mark;

    void set(std::size_t row, std::uint32_t value) {
        state[row].fill(value);
        mark[row] = value;
    }
    bool is_whole(std::size_t row) const {
        for (const std::uint32_t item : state[row]) {
            if (item != mark[row]) return false;
        }
        return true;
    }
    std::vector<std::byte*> flats() {
        return {reinterpret_cast<std::byte*>(state.data()), reinterpret_cast<std::byte*>(id.data()),
                reinterpret_cast<std::byte*>(mark.data())};
    }
    std::vector<FieldWrite> writes() {
        return {{0, reinterpret_cast<const std::byte*>(state.data())},
                {2, reinterpret_cast<const std::byte*>(mark.data())}};
    }
    void append(Writer& writer) {
        const auto at = flats();
        const FieldInput inputs[] = {{at[0], kItems * 4}, {at[1], 8}, {at[2], 4}};
        writer.append({inputs, id.size()});
    }
};

ViewConfig all_leaves() { return {1, 1.0, {{0, Role::own}, {1, Role::own}, {2, Role::own}}}; }

// Rows numbered first.. whose mutable values are their numbers.
void add(Writer& writer, std::uint64_t first, std::size_t count) {
    Values rows(count);
    for (std::size_t i = 0; i < count; ++i) {
        rows.id[i] = first + i;
        rows.set(i, static_cast<std::uint32_t>(first + i));
    }
    rows.append(writer);
}

Values all_rows(const std::shared_ptr<Table>& table, std::vector<std::uint64_t>* named = nullptr) {
    std::vector<std::uint64_t> serials = table->live_serials(), words(serials.size());
    Values rows(serials.size());
    const auto flats = rows.flats();
    BatchMaker(table, {all_leaves()}).read(serials.data(), serials.size(), {flats.data()}, words.data());
    if (named) *named = serials;
    return rows;
}

Written write_all(Table& table, const std::vector<std::uint64_t>& serials, std::uint32_t value, bool skips = false) {
    Values rows(serials.size());
    for (std::size_t i = 0; i < serials.size(); ++i) rows.set(i, value);
    return write_back(table, serials.data(), serials.size(), rows.writes(), skips);
}

std::string file_named(const char* name) {
    return std::filesystem::temp_directory_path() / ("sharpwave-write-" + std::to_string(getpid()) + "-" + name);
}

TEST(WriteBack, GivesRowsNewValuesAndLeavesTheOthersAlone) {
    auto table = Table::create(mutable_config(50));
    auto writer = table->writer();
    add(*writer, 0, 70);  // a ring and a bit
    std::vector<std::uint64_t> serials;
    all_rows(table, &serials);
    ASSERT_EQ(serials.size(), 50u);
    const std::vector<std::uint64_t> some(serials.begin() + 3, serials.begin() + 9);
    for (std::uint32_t round = 0; round < 5; ++round) {
        const Written written = write_all(*table, some, 1000 + round);
        EXPECT_EQ(written.applied, 6u);
        EXPECT_EQ(written.stale, 0u);
        const Values rows = all_rows(table);
        for (std::size_t i = 0; i < 50; ++i) {
            ASSERT_TRUE(rows.is_whole(i));
            EXPECT_EQ(rows.mark[i], i >= 3 && i < 9 ? 1000 + round : rows.id[i]);
        }
    }
    add(*writer, 70, 50);  // over all of them
    const Values rows = all_rows(table);
    for (std::size_t i = 0; i < 50; ++i) EXPECT_EQ(rows.mark[i], rows.id[i]);
}

TEST(WriteBack, KeepsFieldsThatAreNotNamed) {
    auto table = Table::create(mutable_config(10));
    auto writer = table->writer();
    add(*writer, 0, 10);
    const std::vector<std::uint64_t> serials = table->live_serials();
    const std::uint32_t marks[] = {7, 8, 9};
    for (int turn = 0; turn < 3; ++turn)
        write_back(*table, serials.data(), 3, {{2, reinterpret_cast<const std::byte*>(marks)}}, false);
    const Values rows = all_rows(table);
    for (std::size_t i = 0; i < 3; ++i) {
        EXPECT_EQ(rows.mark[i], marks[i]);
        EXPECT_EQ(rows.state[i][kItems - 1], i);
    }
}

TEST(WriteBack, RefusesRowsThatAreGoneBeforeAnythingIsWritten) {
    auto table = Table::create(mutable_config(8));
    auto writer = table->writer();
    add(*writer, 0, 12);
    std::vector<std::uint64_t> serials = table->live_serials();
    serials.push_back(kNoSerial);
    serials.push_back(1);  // overwritten
    try {
        write_all(*table, serials, 99);
        FAIL() << "a row that is gone was written";
    } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::stale_handle);
        EXPECT_NE(std::string(error.what()).find("row 1 is not in the buffer"), std::string::npos) << error.what();
    }
    for (std::size_t i = 0; i < 8; ++i) EXPECT_NE(all_rows(table).mark[i], 99u);
    const Written written = write_all(*table, serials, 99, true);
    EXPECT_EQ(written.applied, 8u);
    EXPECT_EQ(written.stale, 1u);
    for (std::size_t i = 0; i < 8; ++i) EXPECT_EQ(all_rows(table).mark[i], 99u);
    table->clear();
    EXPECT_EQ(write_all(*table, serials, 5, true).stale, 9u);
}

TEST(WriteBack, LastOfEqualSerialsHolds) {
    auto table = Table::create(mutable_config(8));
    auto writer = table->writer();
    add(*writer, 0, 8);
    const std::vector<std::uint64_t> serials = {3, 4, 3, 3, 4};
    Values rows(5);
    for (std::size_t i = 0; i < 5; ++i) rows.set(i, static_cast<std::uint32_t>(100 + i));
    EXPECT_EQ(write_back(*table, serials.data(), 5, rows.writes(), false).applied, 5u);
    EXPECT_EQ(all_rows(table).mark[3], 103u);
    EXPECT_EQ(all_rows(table).mark[4], 104u);
}

// Threads write, add and read at once: no reader sees half a value, nor a value of the row before.
TEST(WriteBack, IsNeverSeenHalf) {
    auto table = Table::create(mutable_config(64));
    auto writer = table->writer();
    add(*writer, 0, 64);
    std::atomic<bool> stop{false};
    std::atomic<std::uint64_t> torn{0}, of_another{0}, drawn{0}, stale{0};
    std::vector<std::thread> threads;
    for (std::uint32_t who = 1; who <= 2; ++who) {
        threads.emplace_back([&, who] {
            for (std::uint32_t turn = 0; !stop; ++turn) {
                const std::vector<std::uint64_t> serials = table->live_serials();
                Values rows(serials.size());
                // The row's serial in the upper bits: a value that came to another row is found out.
                for (std::size_t i = 0; i < serials.size(); ++i)
                    rows.set(i, static_cast<std::uint32_t>(serials[i] << 8 | (turn % 100 + 100 * (who - 1) + 1)));
                stale += write_back(*table, serials.data(), serials.size(), rows.writes(), true).stale;
            }
        });
    }
    threads.emplace_back([&] {
        for (std::uint64_t number = 64; !stop; ++number) {
            Values row(1);
            row.id[0] = number;
            row.set(0, static_cast<std::uint32_t>(number << 8));
            row.append(*writer);
            if (number % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
        }
    });
    for (int reader = 0; reader < 2; ++reader) {
        threads.emplace_back([&] {
            BatchMaker batches(table, {all_leaves()});
            Values rows(64);
            std::vector<std::uint64_t> serials(64);
            const auto flats = rows.flats();
            while (!stop) {
                batches.sample(64, {flats.data()}, {serials.data()});
                for (std::size_t i = 0; i < 64; ++i) {
                    torn += !rows.is_whole(i);
                    const bool is_first_add = rows.id[i] < 64 && rows.mark[i] == rows.id[i];
                    of_another += !is_first_add && rows.mark[i] >> 8 != (serials[i] & 0xffffff);
                    ++drawn;
                }
            }
        });
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(700));
    stop = true;
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(torn, 0u) << drawn << " rows";
    EXPECT_EQ(of_another, 0u) << drawn << " rows";
}

TEST(WriteBack, IsInSnapshotsAndTheirIncrements) {
    const std::string path = file_named("snapshot");
    auto table = Table::create(mutable_config(300, false));
    auto writer = table->writer();
    add(*writer, 0, 290);
    std::vector<std::uint64_t> serials;
    all_rows(table, &serials);
    write_all(*table, {serials.begin(), serials.begin() + 5}, 5000);
    table->save(path);
    Values loaded = all_rows(Table::load(path));
    for (std::size_t i = 0; i < serials.size(); ++i) EXPECT_EQ(loaded.mark[i], i < 5 ? 5000 : loaded.id[i]);
    write_all(*table, {serials.begin() + 3, serials.begin() + 4}, 6000);
    table->save(path, true);
    ASSERT_TRUE(std::filesystem::exists(path + ".delta"));
    loaded = all_rows(Table::load(path));
    for (std::size_t i = 0; i < serials.size(); ++i) {
        ASSERT_TRUE(loaded.is_whole(i));
        EXPECT_EQ(loaded.mark[i], i == 3 ? 6000 : i < 5 ? 5000 : loaded.id[i]);
    }
    auto again = Table::load(path);
    write_all(*again, {serials.begin(), serials.begin() + 2}, 7000);
    EXPECT_EQ(all_rows(again).mark[1], 7000u);
    std::filesystem::remove(path);
    std::filesystem::remove(path + ".delta");
}

// Every row of a snapshot is whole while others write; what was written before it began is in it.
TEST(WriteBack, GoesOnDuringASave) {
    const std::string path = file_named("busy");
    auto table = Table::create(mutable_config(2000));
    auto writer = table->writer();
    add(*writer, 0, 2000);
    const std::vector<std::uint64_t> serials = table->live_serials();
    std::atomic<bool> stop{false};
    std::atomic<std::uint32_t> done{0};
    std::thread other([&] {
        for (std::uint32_t turn = 10000; !stop; ++turn) {
            write_all(*table, serials, turn);
            done = turn;
        }
    });
    while (done == 0) std::this_thread::yield();
    for (int turn = 0; turn < 10; ++turn) {
        const std::uint32_t before = done;
        table->save(path, turn % 2 == 1);
        const Values rows = all_rows(Table::load(path));
        for (std::size_t i = 0; i < rows.id.size(); ++i) {
            ASSERT_TRUE(rows.is_whole(i));
            ASSERT_GE(rows.mark[i], before);
        }
    }
    stop = true;
    other.join();
    std::filesystem::remove(path);
    std::filesystem::remove(path + ".delta");
}

TEST(WriteBack, IsThereWhenAFileIsOpenedAgain) {
    const std::string path = file_named("live");
    {
        auto table = Table::create(mutable_config(20, true), path);
        auto writer = table->writer();
        add(*writer, 0, 20);
        write_all(*table, {2, 4}, 77);
        writer.reset();
    }
    auto table = Table::attach(path);
    const Values rows = all_rows(table);
    for (std::size_t i = 0; i < 20; ++i) EXPECT_EQ(rows.mark[i], i == 2 || i == 4 ? 77 : i);
    table.reset();
    std::filesystem::remove(path);
}

// Damage to what holds is told, and costs the row it hit; damage to the place that does not hold costs nothing.
TEST(WriteBack, DamageIsFound) {
    const std::string path = file_named("damaged");
    for (const int what : {0, 1, 2, 3}) {
        std::uint64_t offset = 0;
        {
            auto table = Table::create(mutable_config(20, true), path, true);
            auto writer = table->writer();
            add(*writer, 0, 20);
            write_all(*table, {3, 5}, 77);
            writer.reset();
            const MutableValues values(*table);
            const std::uint64_t selector = values.selector(5).load();
            const std::byte* at[] = {values.values(5, selector) + 100, values.values(5, selector) - 12,
                                     reinterpret_cast<const std::byte*>(table->region(format::kSelectors)) + 5 * 8,
                                     values.values(5, selector ^ 1) + 100};
            offset = static_cast<std::uint64_t>(at[what] - table->storage().data());
        }
        FILE* file = std::fopen(path.c_str(), "r+b");
        std::fseek(file, static_cast<long>(offset), SEEK_SET);
        const int was = std::fgetc(file);
        std::fseek(file, static_cast<long>(offset), SEEK_SET);
        std::fputc(was ^ 1, file);
        std::fclose(file);
        if (what == 3) {
            EXPECT_EQ(all_rows(Table::attach(path)).mark[5], 77u);
            continue;
        }
        EXPECT_THROW(Table::attach(path), Error) << what;
        auto table = Table::attach(path, {.recover = true});
        EXPECT_EQ(table->lost_at_open(), 1u) << what;
        const Values rows = all_rows(table);
        ASSERT_EQ(rows.id.size(), 19u) << what;
        for (std::size_t i = 0; i < 19; ++i) {
            EXPECT_NE(rows.id[i], 5u);
            EXPECT_EQ(rows.mark[i], rows.id[i] == 3 ? 77 : rows.id[i]);
        }
    }
    std::filesystem::remove(path);
}

// After a power loss selectors and places may be of different moments: the newest place that is whole holds.
TEST(WriteBack, ComesThroughAPowerLossOldOrNew) {
    const std::string path = file_named("power");
    auto table = Table::create(mutable_config(8, true), path, true);
    auto writer = table->writer();
    add(*writer, 0, 8);
    write_all(*table, {1, 2, 3}, 50);
    write_all(*table, {1, 2, 3}, 60);
    const MutableValues values(*table);
    const std::uint64_t now = values.selector(1).load();
    values.selector(1).store(now - 4);         // its page is older than both places
    values.values(2, now)[8] ^= std::byte{1};  // the place's page is torn
    values.values(3, now)[8] ^= std::byte{1};  // both are
    values.values(3, now ^ 1)[8] ^= std::byte{1};
    EXPECT_TRUE(values.choose_whole(1, 1));
    EXPECT_TRUE(values.choose_whole(2, 2));
    EXPECT_FALSE(values.choose_whole(3, 3));
    const Values rows = all_rows(table);
    EXPECT_EQ(rows.mark[1], 60u);
    EXPECT_EQ(rows.mark[2], 50u);
    EXPECT_TRUE(rows.is_whole(1) && rows.is_whole(2));
    table.reset();
    writer.reset();
    std::filesystem::remove(path);
}

// A write that is stopped in its turn holds up other writes, and neither adds nor readers.
TEST(WriteBack, WaitsForItsTurnUntilTheDeadline) {
    const std::string path = file_named("turn");
    auto table = Table::create(mutable_config(8), path, true);
    auto writer = table->writer();
    add(*writer, 0, 8);
    int ready[2];
    ASSERT_EQ(pipe(ready), 0);
    const pid_t child = fork();
    if (child == 0) {
        auto mine = Table::attach(path);
        const Table::WriteLock lock(*mine);
        if (write(ready[1], "x", 1) != 1) _exit(1);
        for (;;) pause();
    }
    char byte;
    ASSERT_EQ(read(ready[0], &byte, 1), 1);
    Values rows(1);
    rows.set(0, 9);
    const std::uint64_t serial = 3;
    try {
        write_back(*table, &serial, 1, rows.writes(), false, Deadline::in(0.1));
        ADD_FAILURE() << "two writes at once";
    } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::not_ready);
        EXPECT_NE(std::string(error.what()).find("process " + std::to_string(child)), std::string::npos);
    }
    add(*writer, 8, 1);
    EXPECT_EQ(all_rows(table).mark[3], 4u);
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    const std::uint64_t changed = table->block_record(0).changed.load();
    EXPECT_EQ(write_back(*table, &serial, 1, rows.writes(), false).applied, 1u);
    EXPECT_GT(table->block_record(0).changed.load(), changed + (table->blocks() == 1)) << "of the dead one's row";
    writer.reset();
    table.reset();
    std::filesystem::remove(path);
}

TEST(WriteBack, RefusesFieldsThatCannotBeMutable) {
    for (int what = 0; what < 4; ++what) {
        TableConfig made = mutable_config(8);
        if (what == 0) made.fields[0].stack = 2;
        if (what == 1) made.fields[0].is_ragged = true;
        if (what == 2) made.fields[0].gives_next = true;
        if (what == 3) made.fields[1].is_mutable = true;
        EXPECT_THROW(Table::create(made), Error) << what;
    }
}

}  // namespace
}  // namespace sharpwave
