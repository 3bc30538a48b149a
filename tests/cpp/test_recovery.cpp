// States that only a death at one place leaves: files in them open, and are not taken for damaged ones. The places are
// there in builds with SHARPWAVE_FAULTS; tests/crash/sweep.cpp walks all of them at random.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>

#include "base/error.h"
#include "base/fault.h"
#include "rows.h"

using namespace sharpwave;

#if defined(SHARPWAVE_FAULTS)

namespace {

class Recovery : public testing::Test {
protected:
    Recovery() : path_(testing::TempDir() + "sharpwave-recovery-" + std::to_string(getpid())) {}
    ~Recovery() override { std::filesystem::remove(path_); }

    static TableConfig config(std::uint64_t capacity, std::uint64_t width, std::uint64_t block_rows) {
        TableConfig made;
        made.capacity = capacity;
        made.width = width;
        made.block_rows = block_rows;
        made.max_writers = 4;
        made.checksums = true;
        made.fields = {{"id", "<u8", 8, {}}};
        made.description = "{}";
        return made;
    }
    static void push(Writer& writer, int steps) {
        const std::vector<std::uint64_t> ids(writer.table().width());
        const FieldInput fields[] = {{reinterpret_cast<const std::byte*>(ids.data()), 8}};
        for (int i = 0; i < steps; ++i) writer.append({fields, ids.size()});
    }
    // Runs `work` in a process that is expected to be killed.
    template <class Work>
    static void die(Work work) {
        const pid_t child = fork();
        if (child == 0) {
            work();
            _exit(3);
        }
        int status = 0;
        waitpid(child, &status, 0);
        EXPECT_TRUE(WIFSIGNALED(status)) << "it lived on";
    }
    std::string path_;
};

}  // namespace

TEST_F(Recovery, OfAClaimByAWriterThatWasIdleForALap) {
    for (const Fault place : {Fault::claim_unlinked, Fault::claim_linked, Fault::claim_block_ticket}) {
        std::filesystem::remove(path_);
        die([&] {
            auto table = Table::create(config(80, 1, 10), path_);
            auto slow = table->writer(), fast = table->writer();
            push(*slow, 10);
            push(*fast, 100);
            arm(place, 1);
            push(*slow, 1);
        });
        auto table = Table::attach(path_);
        EXPECT_EQ(table->size(), table->live_serials().size()) << fault_name(place);
        EXPECT_GE(table->size(), 70u);
    }
}

TEST_F(Recovery, OfAWideStepWhoseCleanerDiedToo) {
    die([&] {
        auto table = Table::create(config(64 * 40, 64, 0), path_);
        auto writer = table->writer();
        push(*writer, 50);
        arm(Fault::row_writing, 4);
        push(*writer, 1);
    });
    for (const Fault place : {Fault::settle_void, Fault::attach_half_recovered, Fault::attach_before_settled}) {
        die([&] {
            arm(place, 1);
            Table::attach(path_);
        });
    }
    auto table = Table::attach(path_);
    EXPECT_EQ(table->size(), table->live_serials().size());
    EXPECT_GE(table->size(), 64u * 39);
}

#endif
