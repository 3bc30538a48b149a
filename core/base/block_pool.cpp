#include "base/block_pool.h"

#include <pthread.h>
#include <sys/mman.h>

#include <cstdlib>
#include <iterator>
#include <list>
#include <map>
#include <mutex>
#include <new>
#include <vector>

namespace sharpwave {
namespace {

constexpr std::size_t kPoolLimit = std::size_t{256} << 20;
constexpr std::size_t kHugePage = 2 << 20;

// Bounded: where a block would pass the limit, blocks of the size that was not used for longest are freed for it, so
// sizes that are no longer asked for do not keep the pool full. If that size is the block's own, the block itself is
// freed: batches that are together larger than the limit keep reusing the part that fits, instead of each block pushing
// out the one that is needed next.
class BlockPool {
public:
    void* take(std::size_t bytes) {
        {
            const std::lock_guard guard(mutex_);
            Size& size = used(bytes);
            if (!size.blocks.empty()) {
                void* memory = size.blocks.back();
                size.blocks.pop_back();
                held_ -= bytes;
                return memory;
            }
        }
        void* memory = std::aligned_alloc(bytes >= kHugePage ? kHugePage : 64, bytes);
#if defined(__linux__)
        if (memory && bytes >= kHugePage) madvise(memory, bytes, MADV_HUGEPAGE);
#endif
        return memory;
    }

    void give(void* memory, std::size_t bytes) noexcept {
        try {
            const std::lock_guard guard(mutex_);
            const bool fits = make_room(bytes);
            Size& size = used(bytes);
            if (fits) {
                size.blocks.push_back(memory);
                held_ += bytes;
                return;
            }
            std::free(memory);
        } catch (const std::bad_alloc&) {  // no memory for the list: the block goes back to the system
            std::free(memory);
        }
    }

    void lock() { mutex_.lock(); }
    void unlock() { mutex_.unlock(); }

    std::size_t held() {
        const std::lock_guard guard(mutex_);
        return held_;
    }

private:
    struct Size {
        std::size_t bytes;
        std::vector<void*> blocks;
    };
    using Sizes = std::list<Size>;

    // The size's entry, now the last one used.
    Size& used(std::size_t bytes) {
        const auto found = by_bytes_.find(bytes);
        if (found != by_bytes_.end()) {
            sizes_.splice(sizes_.end(), sizes_, found->second);
        } else {
            sizes_.push_back({bytes, {}});
            try {
                by_bytes_.emplace(bytes, std::prev(sizes_.end()));
            } catch (...) {
                sizes_.pop_back();
                throw;
            }
        }
        return sizes_.back();
    }

    bool make_room(std::size_t bytes) {
        if (bytes > kPoolLimit) return false;
        while (held_ + bytes > kPoolLimit) {
            Size& oldest = sizes_.front();
            if (oldest.bytes == bytes) return false;
            if (oldest.blocks.empty()) {
                by_bytes_.erase(oldest.bytes);
                sizes_.pop_front();
                continue;
            }
            std::free(oldest.blocks.back());
            oldest.blocks.pop_back();
            held_ -= oldest.bytes;
        }
        return true;
    }

    std::mutex mutex_;
    Sizes sizes_;  // that were not used for longest first
    std::map<std::size_t, Sizes::iterator> by_bytes_;
    std::size_t held_ = 0;
};

BlockPool& pool();

// A child of a fork gets the pool as it is between two calls, not in the middle of one.
BlockPool* new_pool() {
    pthread_atfork([] { pool().lock(); }, [] { pool().unlock(); }, [] { pool().unlock(); });
    return new BlockPool;
}

BlockPool& pool() {
    static BlockPool* instance = new_pool();  // arrays may die after static destructors have run
    return *instance;
}

}  // namespace

std::size_t block_bytes(std::size_t bytes) {
    const std::size_t unit = bytes >= kHugePage ? kHugePage : 4096;
    return (bytes + unit - 1) / unit * unit;
}

void* take_block(std::size_t bytes) { return pool().take(block_bytes(bytes)); }

void give_block(void* memory, std::size_t bytes) noexcept { pool().give(memory, block_bytes(bytes)); }

std::size_t pooled_block_bytes() { return pool().held(); }

}  // namespace sharpwave
