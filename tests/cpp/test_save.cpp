// Snapshots of tables that somebody else is writing: every row of one instant, whatever the writer is at.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <thread>

#include "base/error.h"
#include "base/fault.h"
#include "base/workers.h"
#include "rows.h"

namespace sharpwave {
namespace {

using namespace test;

std::string place(const char* name) {
    return std::filesystem::temp_directory_path() / ("sharpwave-save-" + std::to_string(getpid()) + "-" + name);
}

// One writer goes round a small ring while snapshots are taken: each holds a run of rows without a hole, a whole ring
// of them once it has been filled.
TEST(Save, HoldsEveryRowOfItsInstant) {
    const std::string path = place("lap");
    for (const std::uint64_t capacity : {64u, 1000u}) {
        auto table = Table::create(config(capacity, 1, 2));
        std::atomic<bool> stop{false};
        std::thread writer([&] {
            auto mine = table->writer();
            for (std::uint64_t number = 0; !stop; ++number) append(*mine, number, 1);
        });
        const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(2);
        std::uint64_t saves = 0, holes = 0, short_ones = 0;
        while (std::chrono::steady_clock::now() < end) {
            try {
                table->save(path);
            } catch (const Error& error) {
                ASSERT_EQ(error.kind(), ErrorKind::not_ready) << error.what();  // faster than can be copied
                continue;
            }
            ++saves;
            const auto ids = contents(Table::load(path));
            for (std::size_t i = 1; i < ids.size(); ++i) holes += ids[i] != ids[i - 1] + 1;
            short_ones += !ids.empty() && ids.back() + 1 >= capacity && ids.size() + 2 < capacity;
        }
        stop = true;
        writer.join();
        EXPECT_EQ(holes, 0u) << saves << " snapshots of " << capacity << " rows";
        EXPECT_EQ(short_ones, 0u) << saves << " snapshots of " << capacity << " rows";
    }
    std::filesystem::remove(path);
}

#if defined(SHARPWAVE_FAULTS)
// A writer dies in the middle of claiming a block: what was there is still there, and in every snapshot.
TEST(Save, HoldsWhatADeadWriterLeft) {
    const std::string path = place("dead"), snapshot = place("dead-saved");
    for (const Fault fault : {Fault::claim_ticket, Fault::claim_owner, Fault::claim_linked, Fault::claim_block_ticket,
                              Fault::claim_record_ticket}) {
        auto table = Table::create(config(1024, 1, 4), path);
        const pid_t child = fork();
        if (child == 0) {
            auto theirs = Table::attach(path)->writer();
            arm(fault, 25);
            append(*theirs, 0, 20'000);
            _exit(0);
        }
        int status = 0;
        waitpid(child, &status, 0);
        ASSERT_TRUE(WIFSIGNALED(status)) << fault_name(fault);
        for (int turn = 0; turn < 2; ++turn) {
            const std::size_t live = contents(table).size();
            table->save(snapshot);
            EXPECT_EQ(contents(Table::load(snapshot)).size(), live) << fault_name(fault);
            table->stats();  // settles the dead writer's affairs
        }
        table.reset();
        std::filesystem::remove(path);
        std::filesystem::remove(path + ".lock");
    }
    std::filesystem::remove(snapshot);
}
#endif

TEST(Workers, TellTheCallerWhatWentWrong) {
    for (int turn = 0; turn < 20; ++turn) {
        const auto fails = [&](std::size_t begin, std::size_t) {
            if (begin > 10) throw std::runtime_error("a piece");
        };
        EXPECT_THROW(in_parallel(1000, fails), std::runtime_error);
        std::atomic<std::size_t> done{0};
        in_parallel(1000, [&](std::size_t begin, std::size_t end) { done += end - begin; });
        EXPECT_EQ(done.load(), 1000u);
    }
}

}  // namespace
}  // namespace sharpwave
