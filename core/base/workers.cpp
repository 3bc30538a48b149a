#include "base/workers.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/process.h"

namespace sharpwave {
namespace {

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Longer than waking a thread takes.
constexpr std::chrono::microseconds kPatience{30};

class Workers {
public:
    explicit Workers(unsigned helpers) : generation_(process_generation()) {
        // Where the system has no thread left, callers go on with fewer helpers, or alone.
        threads_.reserve(helpers);
        try {
            for (unsigned i = 0; i < helpers; ++i) threads_.emplace_back([this] { help(); });
        } catch (const std::system_error&) {
        }
    }

    std::uint64_t generation() const { return generation_; }

    void run(std::size_t count, const std::function<void(std::size_t, std::size_t)>& part) {
        std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
        if (!turn.owns_lock() || threads_.empty()) return part(0, count);
        {
            std::lock_guard<std::mutex> guard(mutex_);
            part_ = &part;
            count_ = count;
            // Four pieces a thread: a helper that wakes late takes fewer of them.
            piece_ = std::max<std::size_t>(1, count / (4 * (threads_.size() + 1)));
            next_.store(0, std::memory_order_relaxed);
            job_.fetch_add(1, std::memory_order_relaxed);
        }
        wake_.notify_all();
        take_pieces(part, count, piece_);
        std::unique_lock<std::mutex> guard(mutex_);
        part_ = nullptr;  // a helper that wakes from now on finds nothing to do
        if (busy_.load(std::memory_order_relaxed) != 0) {
            // The pieces are short: the last of the others is nearly done. Sleeping and waking takes longer than that.
            guard.unlock();
            const auto until = std::chrono::steady_clock::now() + kPatience;
            while (busy_.load(std::memory_order_relaxed) != 0 && std::chrono::steady_clock::now() < until) {
                for (int i = 0; i < 16; ++i) pause();
            }
            guard.lock();
            idle_.wait(guard, [this] { return busy_.load(std::memory_order_relaxed) == 0; });
        }
        if (std::exception_ptr error = std::exchange(error_, nullptr)) std::rethrow_exception(error);
    }

private:
    void take_pieces(const std::function<void(std::size_t, std::size_t)>& part, std::size_t count, std::size_t piece) {
        for (;;) {
            const std::size_t begin = next_.fetch_add(piece, std::memory_order_relaxed);
            if (begin >= count) return;
            try {
                part(begin, std::min(begin + piece, count));
            } catch (...) {
                // Told by run(), in the caller's thread, when no thread uses the part any more.
                std::lock_guard<std::mutex> guard(mutex_);
                if (!error_) error_ = std::current_exception();
                next_.store(count, std::memory_order_relaxed);
                return;
            }
        }
    }

    // A caller that draws one large batch often draws the next at once: looking for it a little longer than waking up
    // takes saves the waking. A training loop comes back later than that, and then the helper is asleep.
    void linger(std::uint64_t seen) const {
        const auto until = std::chrono::steady_clock::now() + kPatience;
        while (job_.load(std::memory_order_relaxed) == seen && std::chrono::steady_clock::now() < until) {
            for (int i = 0; i < 16; ++i) pause();
        }
    }

    void help() {
        std::uint64_t seen = 0;
        std::unique_lock<std::mutex> guard(mutex_);
        for (;;) {
            if (seen) {
                guard.unlock();
                linger(seen);
                guard.lock();
            }
            wake_.wait(guard, [&] { return job_.load(std::memory_order_relaxed) != seen; });
            seen = job_.load(std::memory_order_relaxed);
            if (!part_) continue;
            busy_.fetch_add(
                1, std::memory_order_relaxed);  // from here on run() waits for this thread, so its part stays alive
            const auto& part = *part_;
            const std::size_t count = count_, piece = piece_;
            guard.unlock();
            take_pieces(part, count, piece);
            guard.lock();
            if (busy_.fetch_sub(1, std::memory_order_relaxed) == 1) idle_.notify_one();
        }
    }

    std::mutex turn_;
    std::mutex mutex_;
    std::condition_variable wake_, idle_;
    const std::function<void(std::size_t, std::size_t)>* part_ = nullptr;
    std::size_t count_ = 0, piece_ = 1;
    std::atomic<std::size_t> next_{0};
    std::atomic<std::uint64_t> job_{0};
    std::atomic<unsigned> busy_{0};  // changed under the mutex
    std::exception_ptr error_;
    std::uint64_t generation_;
    std::vector<std::thread> threads_;
};

// On sixteen cores 256 rows of images took half the time of four threads with eight, and a seventh less with all; 4,096
// small rows took a third longer with all than with eight.
constexpr unsigned kMostThreads = 8;

// Held across a fork, so that a child never finds it locked by a thread that it has not.
std::mutex making;
[[maybe_unused]] const int making_is_held_across_forks =
    pthread_atfork([] { making.lock(); }, [] { making.unlock(); }, [] { making.unlock(); });

}  // namespace

void in_parallel(std::size_t count, const std::function<void(std::size_t, std::size_t)>& part) {
    // Never destroyed: joining threads while the process exits is how programs hang at their end.
    static Workers* workers = nullptr;
    Workers* mine;
    {
        std::lock_guard<std::mutex> guard(making);
        if (!workers || workers->generation() != process_generation()) {
            const unsigned cores = std::max(1u, std::thread::hardware_concurrency());
            workers = new Workers(std::min(cores, kMostThreads) - 1);
        }
        mine = workers;
    }
    mine->run(count, part);
}

}  // namespace sharpwave
