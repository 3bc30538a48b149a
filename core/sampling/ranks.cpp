#include "sampling/ranks.h"

#include <algorithm>
#include <bit>
#include <vector>

namespace sharpwave {

bool Ranks::are_kept() {
    if (!masses_.head->ranked) return false;
    masses_.head->massless = 0;
    for (std::uint64_t slot = 0; slot < masses_.tree.leaf_count; ++slot) {
        const float mass = masses_.tree.mass(slot);
        if (is_row(masses_.tree.stored(slot)) ? !(mass > 0 && mass <= 1) : mass != 0) return false;
    }
    return true;
}

// The bits of stored priorities grow with the priority.
void Ranks::make() {
    constexpr int kBits = 11;
    std::vector<std::uint64_t> order, sorted;
    order.reserve(masses_.head->rows);
    for (std::uint64_t slot = 0; slot < masses_.tree.leaf_count; ++slot) {
        const float stored = masses_.tree.stored(slot);
        masses_.tree.mass(slot) = 0;
        if (is_row(stored)) order.push_back(std::uint64_t{~std::bit_cast<std::uint32_t>(stored)} << 32 | slot);
    }
    sorted.resize(order.size());
    for (int shift = 32; shift < 64; shift += kBits) {
        std::uint64_t starts[(1 << kBits) + 1] = {};
        for (std::uint64_t item : order) ++starts[(item >> shift & ((1 << kBits) - 1)) + 1];
        for (int i = 0; i < 1 << kBits; ++i) starts[i + 1] += starts[i];
        for (std::uint64_t item : order) sorted[starts[item >> shift & ((1 << kBits) - 1)]++] = item;
        order.swap(sorted);
    }
    const double exponent = -masses_.alpha();
    masses_.head->ranked = 0;
    double ranks[64], masses[64];
    for (std::size_t first = 0; first < order.size(); first += 64) {
        const std::size_t count = std::min<std::size_t>(64, order.size() - first);
        for (std::size_t i = 0; i < count; ++i) ranks[i] = static_cast<double>(first + i + 1);
        masses_.kernels.powers(ranks, masses, count, exponent);
        for (std::size_t i = 0; i < count; ++i) {
            masses_.tree.mass(order[first + i] & 0xffffffff) = static_cast<float>(masses[i]);
        }
    }
    masses_.head->massless = masses_.head->changes = 0;
    masses_.head->ranked = 1;
    masses_.refresh_all();
}

}  // namespace sharpwave
