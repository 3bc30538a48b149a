#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

#include "base/error.h"
#include "rows.h"

using namespace sharpwave;
using namespace sharpwave::test;
namespace fs = std::filesystem;

namespace {

class Storages : public testing::Test {
protected:
    Storages() : folder_(fs::path(testing::TempDir()) / ("sharpwave-" + std::to_string(getpid()))) {
        fs::remove_all(folder_);
        fs::create_directories(folder_);
    }
    ~Storages() override { fs::remove_all(folder_); }
    std::string path(const char* name) const { return (folder_ / name).string(); }
    fs::path folder_;
};

std::string bytes_of(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

void put_bytes(const std::string& path, const std::string& bytes) {
    std::ofstream(path, std::ios::binary | std::ios::trunc)
        .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

std::string refusal(const std::string& path) {
    try {
        Table::load(path);
    } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::storage);
        return error.what();
    }
    return "";
}

}  // namespace

TEST_F(Storages, SnapshotsHoldEverything) {
    auto table = Table::create(config(100));
    auto writer = table->writer();
    append(*writer, 0, 100);
    append(*writer, 100, 37);
    draw(table, 10);
    table->save(path("a"));
    auto copy = Table::load(path("a"));
    EXPECT_EQ(contents(copy), contents(table));
    EXPECT_EQ(copy->live_serials(), table->live_serials());
    EXPECT_EQ(draw(copy, 50), draw(table, 50)) << "the random stream goes on where it stopped";
    EXPECT_GT(copy->stats().incarnation, table->stats().incarnation);
    append(*copy->writer(), 137, 1);
    EXPECT_GT(copy->live_serials().back(), table->live_serials().back()) << "serials go on";
    EXPECT_EQ(copy->size(), 100u);
}

TEST_F(Storages, SnapshotsReplaceSnapshotsAndNothingElse) {
    auto table = Table::create(config(10));
    append(*table->writer(), 0, 3);
    table->save(path("a"));
    append(*table->writer(), 3, 3);
    table->save(path("a"));
    EXPECT_EQ(Table::load(path("a"))->size(), 6u);
    put_bytes(path("thesis.txt"), std::string(5000, 'x'));
    EXPECT_THROW(table->save(path("thesis.txt")), Error);
    EXPECT_EQ(bytes_of(path("thesis.txt")), std::string(5000, 'x'));
    EXPECT_THROW(table->save(folder_.string()), Error);
    EXPECT_EQ(std::distance(fs::directory_iterator(folder_), {}), 2) << "no temporary file is left";
}

TEST_F(Storages, RefuseWhatIsNoTable) {
    EXPECT_NE(refusal(path("absent")).find("cannot open"), std::string::npos);
    put_bytes(path("empty"), "");
    EXPECT_NE(refusal(path("empty")).find("not a Sharpwave table"), std::string::npos);
    put_bytes(path("foreign"), std::string(10'000, 'x'));
    EXPECT_NE(refusal(path("foreign")).find("not a Sharpwave table"), std::string::npos);
    EXPECT_NE(refusal(folder_.string()), "");
}

TEST_F(Storages, RefuseTruncatedAndDamagedSnapshots) {
    auto table = Table::create(config(50));
    append(*table->writer(), 0, 50);
    table->save(path("a"));
    const std::string whole = bytes_of(path("a"));
    for (std::size_t length : {std::size_t{4095}, std::size_t{4096}, whole.size() / 2, whole.size() - 1}) {
        put_bytes(path("b"), whole.substr(0, length));
        EXPECT_NE(refusal(path("b")), "") << length << " bytes";
    }
    const auto expected = contents(table);
    std::mt19937_64 random(3);
    int refused = 0;
    for (int trial = 0; trial < 600; ++trial) {
        std::string damaged = whole;
        damaged[random() % damaged.size()] ^= static_cast<char>(1 << random() % 8);
        put_bytes(path("b"), damaged);
        if (refusal(path("b")).empty()) {
            EXPECT_EQ(contents(Table::load(path("b"))), expected) << "only padding may change unnoticed";
        } else {
            ++refused;
        }
    }
    EXPECT_GT(refused, 300);
}

TEST_F(Storages, FilesAreForTheirOwnerOnly) {
    auto table = Table::create(config(10), path("live"));
    struct stat info{};
    ASSERT_EQ(stat(path("live").c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777, 0600u);
}

TEST_F(Storages, AreSharedByWhoeverAttaches) {
    auto one = Table::create(config(100), path("live"));
    auto two = Table::attach(path("live"));
    append(*one->writer(), 0, 5);
    append(*two->writer(), 5, 5);
    EXPECT_EQ(contents(one), contents(two));
    EXPECT_EQ(one->size(), 10u);
    EXPECT_THROW(Table::create(config(100), path("live")), Error);
    EXPECT_THROW(Table::load(path("live")), Error);
    one->save(path("snapshot"));
    EXPECT_THROW(Table::attach(path("snapshot")), Error);
}

TEST_F(Storages, KeepEveryCommittedRowWhenTheirWriterIsKilled) {
    TableConfig durable = config(1000);
    durable.checksums = true;
    int pipe_ends[2];
    ASSERT_EQ(pipe(pipe_ends), 0);
    const pid_t child = fork();
    if (child == 0) {
        auto table = Table::create(durable, path("live"));
        auto writer = table->writer();
        for (std::uint64_t i = 0;; ++i) {
            append(*writer, i, 1);
            if (write(pipe_ends[1], &i, sizeof i) != sizeof i) _exit(1);
        }
    }
    close(pipe_ends[1]);
    std::uint64_t last = 0;
    for (int i = 0; i < 2500; ++i) ASSERT_EQ(read(pipe_ends[0], &last, sizeof last), static_cast<ssize_t>(sizeof last));
    kill(child, SIGKILL);
    std::uint64_t more;
    while (read(pipe_ends[0], &more, sizeof more) == sizeof more) last = more;
    waitpid(child, nullptr, 0);
    close(pipe_ends[0]);

    auto table = Table::attach(path("live"));
    const auto rows = contents(table);
    ASSERT_GE(rows.back(), last) << "every acknowledged row is there";
    EXPECT_EQ(table->stats().recoveries, 1u);
    EXPECT_GE(rows.size(), 998u);
    append(*table->writer(), 1'000'000, 1);
    EXPECT_EQ(contents(table).back(), 1'000'000u);
    table.reset();
    EXPECT_EQ(Table::attach(path("live"))->stats().recoveries, 1u) << "a clean close needs no recovery";
}

TEST_F(Storages, GiveNoSerialTwiceAfterAStepWasLeftHalfWritten) {
    using namespace format;
    std::uint64_t head;
    {
        auto table = Table::create(config(4000, 4, 2), path("live"));
        auto writer = table->writer();
        append(*writer, 0, 12);
        head = table->position(0).head;
        const std::uint64_t slot = table->position(0).ticket * table->block_rows() + head;
        // As a kill in the middle of a step leaves it: two rows finished, one begun, one not reached.
        table->word(slot) = make_word(slot, kEpisodeStart, kCommitted);
        table->word(slot + 1) = make_word(slot + 1, kEpisodeStart, kCommitted);
        table->word(slot + 2) = make_word(slot + 2, 0, kWriting);
        fs::copy_file(path("live"), path("crashed"));
    }
    auto table = Table::attach(path("crashed"));
    EXPECT_EQ(table->size(), 12u) << "a part of a step is no step";
    const auto before = table->live_serials();
    for (std::uint64_t serial : {before[8], before[9], before[10], before[11]}) {
        EXPECT_EQ(table->word(serial) & kFlagMask & (kTruncated | kClosedByEngine), kTruncated | kClosedByEngine);
    }
    append(*table->writer(), 100, 4);
    const auto after = table->live_serials();
    EXPECT_EQ(after.size(), 16u);
    EXPECT_GE(after[12], before.back() + 4) << "the serials of the broken step are spent";
}

TEST_F(Storages, DropRowsWithAWrongChecksumAfterPowerLoss) {
    TableConfig durable = config(100);
    durable.checksums = true;
    std::uint64_t rows_at;
    {
        auto table = Table::create(durable, path("live"));
        append(*table->writer(), 0, 100);
        rows_at = table->header().regions[format::kRows].offset;
        std::strcpy(table->counters().boot_id, "another boot");
        fs::copy_file(path("live"), path("crashed"));  // while it is open: nobody has closed the copy
    }
    std::string bytes = bytes_of(path("crashed"));
    bytes[rows_at + 40 * 96 + 50] ^= 1;  // somewhere in the payload of one row
    put_bytes(path("crashed"), bytes);
    auto table = Table::attach(path("crashed"));
    EXPECT_EQ(table->size(), 99u);
    EXPECT_EQ(table->stats().rows_lost, 1u);
}

TEST_F(Storages, RefuseAForkedChild) {
    auto table = Table::create(config(10));
    append(*table->writer(), 0, 1);
    const pid_t child = fork();
    if (child == 0) {
        try {
            draw(table, 1);
        } catch (const Error& error) {
            _exit(error.kind() == ErrorKind::closed && std::string(error.what()).find("shm://") != std::string::npos
                      ? 0
                      : 2);
        }
        _exit(1);
    }
    int status;
    waitpid(child, &status, 0);
    EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST_F(Storages, TellWhoHoldsTheIndexAndIsStopped) {
    auto table = Table::create(config(100), path("live"));
    auto& lock = *reinterpret_cast<SharedLock*>(table->region(format::kRuntime));
    const pid_t child = fork();
    if (child == 0) {
        // Not through the table: it is the parent's.
        lock.take(1, nullptr);
        raise(SIGSTOP);
        for (;;) pause();
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, WUNTRACED), child);
    ASSERT_TRUE(WIFSTOPPED(status));
    EXPECT_EQ(lock.take(0, nullptr), SharedLock::Taken::no);
    const std::uint64_t began = steady_ns();
    try {
        const Table::IndexLock held(*table, Deadline::in(0.2));
        ADD_FAILURE() << "took a lock that another process holds";
    } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::not_ready);
        EXPECT_NE(std::string(error.what()).find("held by process " + std::to_string(child)), std::string::npos)
            << error.what();
    }
    const double waited = static_cast<double>(steady_ns() - began) * 1e-9;
    EXPECT_GT(waited, 0.19);
    EXPECT_LT(waited, 5);
    kill(child, SIGKILL);
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(lock.take(5, nullptr), SharedLock::Taken::after_death);
    lock.unlock(nullptr);
}
