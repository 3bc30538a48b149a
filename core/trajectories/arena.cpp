#include "trajectories/arena.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

namespace sharpwave {
namespace {
constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kRegion = 4 * kHugePage;
constexpr std::size_t kSlabAlignment = 64;
}  // namespace

struct SlabArena::Region {
    void* mapped;  // what mmap gave, a huge page longer: the region starts at a multiple of one
    std::size_t mapped_bytes;
    std::byte* data;
    std::size_t bytes, used;
    std::size_t slabs;
};

SlabArena::Region* SlabArena::new_region(std::size_t bytes) {
    const std::size_t wanted = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    if (wanted == kRegion && spare_) {
        Region* region = spare_;
        spare_ = nullptr;
        region->used = 0;
        return region;
    }
    void* mapped = mmap(nullptr, wanted + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    const auto address = reinterpret_cast<std::uintptr_t>(mapped);
    auto* data = reinterpret_cast<std::byte*>((address + kHugePage - 1) / kHugePage * kHugePage);
#if defined(MADV_HUGEPAGE)
    madvise(data, wanted, MADV_HUGEPAGE);
#endif
    return new Region{mapped, wanted + kHugePage, data, wanted, 0, 0};
}

void SlabArena::unmap(Region* region) noexcept {
    if (!region) return;
    munmap(region->mapped, region->mapped_bytes);
    delete region;
}

SlabArena::~SlabArena() {
    unmap(current_);
    unmap(spare_);
}

void SlabArena::release(Region* region) noexcept {
    if (region->bytes == kRegion && !spare_) {
        spare_ = region;
    } else {
        unmap(region);
    }
}

SlabArena::Slab SlabArena::take(std::size_t bytes) {
    bytes = (bytes + kSlabAlignment - 1) / kSlabAlignment * kSlabAlignment;
    const std::lock_guard guard(mutex_);
    if (bytes > kRegion / 4) {  // one of its own
        Region* region = new_region(bytes);
        region->used = region->bytes;
        region->slabs = 1;
        return {region->data, region};
    }
    if (!current_ || current_->bytes - current_->used < bytes) {
        Region* next = new_region(kRegion);
        if (current_ && current_->slabs == 0) release(current_);
        current_ = next;
    }
    Slab slab{current_->data + current_->used, current_};
    current_->used += bytes;
    ++current_->slabs;
    return slab;
}

void SlabArena::give(const Slab& slab) noexcept {
    const std::lock_guard guard(mutex_);
    if (--slab.region->slabs) return;
    if (slab.region == current_) {
        current_->used = 0;
    } else {
        release(slab.region);
    }
}

}  // namespace sharpwave
