// Memory of slabs. Rows are drawn from all over the cache, and with pages of 4 KiB every one costs a walk through the
// page tables: slabs share regions of huge pages. The oldest slabs go first, so regions empty one after the other; an
// empty one goes back to the system, but for one that waits for new slabs.
#pragma once

#include <cstddef>
#include <mutex>

namespace sharpwave {

class SlabArena {
public:
    struct Region;
    struct Slab {
        std::byte* data = nullptr;
        Region* region = nullptr;
    };

    SlabArena() = default;
    ~SlabArena();  // every slab must have been given back
    SlabArena(const SlabArena&) = delete;
    SlabArena& operator=(const SlabArena&) = delete;

    // Memory of any value, at a cache line. Throws std::bad_alloc. Any thread may call.
    Slab take(std::size_t bytes);
    void give(const Slab& slab) noexcept;

private:
    Region* new_region(std::size_t bytes);
    void release(Region* region) noexcept;
    static void unmap(Region* region) noexcept;

    std::mutex mutex_;
    Region* current_ = nullptr;
    Region* spare_ = nullptr;
};

}  // namespace sharpwave
