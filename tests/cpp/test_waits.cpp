#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <thread>

#include "base/error.h"
#include "base/wait.h"
#include "base/workers.h"
#include "rows.h"

using namespace sharpwave;
using namespace sharpwave::test;
namespace fs = std::filesystem;

namespace {

// What set_yield() and set_interrupt_check() are given here.
struct Waits {
    static inline std::atomic<int> begun{0}, ended{0}, checks{0};
    static inline std::atomic<bool> is_raised{false};

    Waits() {
        begun = ended = checks = 0;
        is_raised = false;
        set_yield([]() -> void* { return begun++, &begun; }, [](void*) { ++ended; });
        set_interrupt_check([] {
            ++checks;
            if (is_raised) throw Error(ErrorKind::interrupted, "interrupted");
        });
    }
    ~Waits() {
        set_yield(nullptr, nullptr);
        set_interrupt_check(nullptr);
    }
};

double seconds_since(std::uint64_t began) { return static_cast<double>(steady_ns() - began) * 1e-9; }

// A child process that runs `job` and then sleeps, until it is killed.
class Sleeper {
public:
    explicit Sleeper(const std::function<void()>& job) {
        int ready[2];
        if (pipe(ready) != 0) throw std::runtime_error("no pipe");
        pid_ = fork();
        if (pid_ == 0) {
            job();
            char byte = 1;
            _exit(write(ready[1], &byte, 1) == 1 ? (pause(), 0) : 1);
        }
        close(ready[1]);
        char byte = 0;
        is_ready_ = read(ready[0], &byte, 1) == 1;
        close(ready[0]);
    }
    ~Sleeper() { end(); }
    bool is_ready() const { return is_ready_; }
    void end() {
        if (pid_ <= 0) return;
        kill(pid_, SIGKILL);
        waitpid(pid_, nullptr, 0);
        pid_ = 0;
    }

private:
    pid_t pid_;
    bool is_ready_ = false;
};

class Holds : public testing::Test {
protected:
    Holds() : path_((fs::path(testing::TempDir()) / ("sharpwave-waits-" + std::to_string(getpid()))).string()) {
        fs::remove(path_);
    }
    ~Holds() override { fs::remove(path_); }
    std::string path_;
};

// One whose rows fill its block: the next one needs another.
std::unique_ptr<Writer> writer_at_the_end_of_its_block(Table& table) {
    auto writer = table.writer();
    append(*writer, 0, table.block_rows());
    return writer;
}

}  // namespace

TEST(Deadlines, AreOverWhenTheyAreOver) {
    EXPECT_TRUE(Deadline::in(0).is_over());
    EXPECT_TRUE(Deadline::in(-5).is_over());
    EXPECT_FALSE(Deadline::in(60).is_over());
    EXPECT_TRUE(Deadline::in(1e300).is_never());
    EXPECT_FALSE(Deadline::never().is_over());
    EXPECT_GT(Deadline::in(0).at_least(30).left_s(), 29);
    EXPECT_GT(Deadline::in(60).at_least(30).left_s(), 59);
    EXPECT_TRUE(Deadline::never().at_least(1).is_never());
}

TEST(IndexLock, YieldsWhileItWaitsAndUntilItIsGivenBack) {
    auto table = Table::create(config(100));
    const Waits waits;
    {
        const Table::IndexLock free(*table);
    }
    EXPECT_EQ(Waits::begun, 0) << "a free lock costs no yield";
    auto held = std::make_unique<Table::IndexLock>(*table);
    std::atomic<int> ended_under_lock{-1};
    std::thread other([&] {
        const Table::IndexLock mine(*table);
        ended_under_lock = Waits::ended.load();
    });
    while (Waits::checks == 0) std::this_thread::yield();
    EXPECT_EQ(Waits::begun, 1);
    held.reset();
    other.join();
    EXPECT_EQ(ended_under_lock, 0) << "nothing is taken back under the index lock";
    EXPECT_EQ(Waits::ended, 1);
}

TEST(IndexLock, EndsItsWaitOnASignal) {
    auto table = Table::create(config(100));
    const Waits waits;
    const Table::IndexLock held(*table);
    std::atomic<bool> is_interrupted{false};
    std::thread other([&] {
        try {
            const Table::IndexLock mine(*table);
        } catch (const Error& error) {
            is_interrupted = error.kind() == ErrorKind::interrupted;
        }
    });
    while (Waits::checks == 0) std::this_thread::yield();
    Waits::is_raised = true;
    other.join();
    EXPECT_TRUE(is_interrupted);
    EXPECT_EQ(Waits::ended, 1);
}

TEST_F(Holds, EndWithTheirProcess) {
    auto table = Table::create(config(4096, 1, 4), path_);
    auto writer = writer_at_the_end_of_its_block(*table);
    std::uint64_t killed_at = 0;
    Sleeper saver([&] {
        auto own = Table::attach(path_);
        new Table::AddHold(*own, 60);
        new std::shared_ptr<Table>(own);  // neither is ended: the process is killed
    });
    ASSERT_TRUE(saver.is_ready());
    ASSERT_TRUE(table->are_adds_held());
    std::thread killer([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        killed_at = steady_ns();
        saver.end();
    });
    append(*writer, 0, 1);
    const std::uint64_t back_at = steady_ns();
    killer.join();
    EXPECT_GE(back_at, killed_at) << "it was held back while the saver lived";
    EXPECT_LT(static_cast<double>(back_at - killed_at) * 1e-9, 30) << "its time would have been up after 60 s";
    EXPECT_FALSE(table->are_adds_held()) << "the next one need not look again";
}

TEST_F(Holds, EndAfterTheirTimeThoughTheirProcessIsStopped) {
    auto table = Table::create(config(4096, 1, 4));
    auto writer = writer_at_the_end_of_its_block(*table);
    const std::uint64_t began = steady_ns();
    const Table::AddHold hold(*table, 0.2);
    append(*writer, 0, 1);
    EXPECT_GE(seconds_since(began), 0.2);
    EXPECT_FALSE(table->are_adds_held());
}

TEST_F(Holds, LetSmallAddsGiveUpAndOthersWaitUntilTheirDeadline) {
    auto table = Table::create(config(4096, 1, 4));
    auto writer = writer_at_the_end_of_its_block(*table);
    Rows rows(1);
    rows.set(0, 7);
    const auto fields = rows.inputs();
    {
        const Table::AddHold hold(*table, 60);
        EXPECT_FALSE(writer->try_append({fields.data(), 1}));
        const std::uint64_t began = steady_ns();
        try {
            writer->append({fields.data(), 1}, Deadline::in(0.1));
            ADD_FAILURE() << "added while a saver holds adds back";
        } catch (const Error& error) {
            EXPECT_EQ(error.kind(), ErrorKind::not_ready);
            EXPECT_NE(std::string(error.what()).find("save()"), std::string::npos) << error.what();
        }
        EXPECT_LT(seconds_since(began), 30) << "the hold ends after 60 s";
        EXPECT_EQ(table->size(), table->block_rows()) << "nothing was written";
    }
    EXPECT_TRUE(writer->try_append({fields.data(), 1}));
}

TEST_F(Holds, AreNotEndedByAnotherSaverThatIsDone) {
    auto table = Table::create(config(4096, 1, 4));
    auto first = std::make_unique<Table::AddHold>(*table, 60);
    const Table::AddHold second(*table, 61);
    first.reset();
    EXPECT_TRUE(table->are_adds_held());
}

TEST_F(Holds, WakeWritersAtTheirEnd) {
    auto table = Table::create(config(4096, 1, 4));
    auto writer = writer_at_the_end_of_its_block(*table);
    auto hold = std::make_unique<Table::AddHold>(*table, 60);
    std::thread other([&] { append(*writer, 0, 1); });
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    EXPECT_EQ(table->size(), table->block_rows());
    hold.reset();
    other.join();
    EXPECT_EQ(table->size(), table->block_rows() + 1);
}

TEST_F(Holds, EndTheirWaitOnASignal) {
    auto table = Table::create(config(4096, 1, 4));
    auto writer = writer_at_the_end_of_its_block(*table);
    const Waits waits;
    Waits::is_raised = true;
    const Table::AddHold hold(*table, 60);
    Rows rows(1);
    const auto fields = rows.inputs();
    EXPECT_THROW(writer->append({fields.data(), 1}), Error);
    EXPECT_EQ(table->size(), table->block_rows());
}

TEST(Writers, SayAtTheDeadlineThatAnotherThreadHasTheirTurn) {
    auto table = Table::create(config(4096, 1, 4));
    auto writer = table->writer();
    std::atomic<bool> stop{false};
    std::thread other([&] {
        while (!stop) append(*writer, 0, 4096);
    });
    Rows rows(1);
    const auto fields = rows.inputs();
    std::string said;
    for (const Deadline limit = Deadline::in(60); said.empty() && !limit.is_over();) {
        try {
            writer->append({fields.data(), 1}, Deadline::in(0));
        } catch (const Error& error) {
            EXPECT_EQ(error.kind(), ErrorKind::not_ready);
            said = error.what();
        }
    }
    stop = true;
    other.join();
    EXPECT_NE(said.find("buf.writer()"), std::string::npos) << said;
}

TEST(Waiting, ForAFileEndsOnASignal) {
    const Waits waits;
    Waits::is_raised = true;
    EXPECT_THROW(wait_for_file("/tmp/sharpwave-no-such-file", Deadline::never()), Error);
}

TEST(Workers, GoOnAloneWhereTheSystemHasNoThreadLeft) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    GTEST_SKIP() << "a sanitizer needs addresses of its own, and this test leaves none";
#endif
    const Sleeper child([] {
        rlimit none{0, 0};
        if (setrlimit(RLIMIT_NPROC, &none) != 0) _exit(2);
        // A limit for the superuser is none: let the stack of a thread be too large instead.
        rlimit small{};
        getrlimit(RLIMIT_AS, &small);
        small.rlim_cur = 1;
        if (setrlimit(RLIMIT_AS, &small) != 0) _exit(2);
        std::atomic<std::size_t> done{0};
        in_parallel(100, [&](std::size_t begin, std::size_t end) { done += end - begin; });
        if (done != 100) _exit(3);
    });
    EXPECT_TRUE(child.is_ready());
}
