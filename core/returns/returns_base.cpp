// The kernels of returns for any processor of the architecture, the choice among all of them, and the way to several
// cores.
#define SHARPWAVE_KERNELS base_return_kernels
#include "returns/returns_kernels.inc"

#include <cmath>
#include <type_traits>
#include <vector>

#include "base/workers.h"

namespace sharpwave {

#if defined(SHARPWAVE_HAS_AVX2)
const AllReturnKernels& avx2_return_kernels();
#endif

namespace {

const AllReturnKernels& all_kernels() {
    static const AllReturnKernels& chosen = []() -> const AllReturnKernels& {
#if defined(SHARPWAVE_HAS_AVX2)
        if (__builtin_cpu_supports("avx2")) return avx2_return_kernels();
#endif
        namespace k = base_return_kernels;
        static const AllReturnKernels base = {k::kKernels<float, std::uint8_t>, k::kKernels<float, float>,
                                              k::kKernels<double, std::uint8_t>, k::kKernels<double, double>};
        return base;
    }();
    return chosen;
}

template <class Real, class Flag>
const ReturnKernels<Real, Flag>& return_kernels() {
    const AllReturnKernels& all = all_kernels();
    if constexpr (std::is_same_v<Real, float>) {
        if constexpr (std::is_same_v<Flag, float>)
            return all.f32;
        else
            return all.f32_bool;
    } else {
        if constexpr (std::is_same_v<Flag, double>)
            return all.f64;
        else
            return all.f64_bool;
    }
}

// Envs are independent: tiles of them go to the threads that are free. Small ones are done before a helper is awake.
template <class Tile>
void over_envs(std::size_t steps, std::size_t envs, const Tile& tile) {
    constexpr std::size_t kWorthSharing = 1 << 18;
    const std::size_t tiles = (envs + kTileEnvs - 1) / kTileEnvs;
    const auto run = [&](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i) tile(i * kTileEnvs, std::min(kTileEnvs, envs - i * kTileEnvs));
    };
    if (steps * envs < kWorthSharing || tiles == 1) return run(0, tiles);
    in_parallel(tiles, run);
}

}  // namespace

template <class Real, class Flag>
void gae(const Rollout<Real, Flag>& r, Real* advantages, Real* returns) {
    over_envs(r.steps, r.envs, [&](std::size_t first, std::size_t count) {
        return_kernels<Real, Flag>().gae(r, first, count, advantages, returns);
    });
}

template <class Real, class Flag>
void discounted(const Rollout<Real, Flag>& r, Real* returns) {
    over_envs(r.steps, r.envs, [&](std::size_t first, std::size_t count) {
        return_kernels<Real, Flag>().discounted(r, first, count, returns);
    });
}

template <class Real, class Flag>
void vtrace(const VTrace<Real, Flag>& v, Real* targets, Real* advantages) {
    over_envs(v.rollout.steps, v.rollout.envs, [&](std::size_t first, std::size_t count) {
        return_kernels<Real, Flag>().vtrace(v, first, count, targets, advantages);
    });
}

template <class Real>
void group_relative(const Groups& g, const Real* rewards, Real* advantages) {
    struct Sum {
        double count = 0, total = 0, mean = 0, squares = 0;
    };
    std::vector<Sum> sums(g.group_count);
    for (std::size_t i = 0; i < g.rows; ++i) {
        Sum& sum = sums[static_cast<std::size_t>(g.groups[i])];
        sum.count += 1;
        sum.total += rewards[i];
    }
    for (Sum& sum : sums) sum.mean = sum.count ? sum.total / sum.count : 0;
    for (std::size_t i = 0; i < g.rows; ++i) {
        Sum& sum = sums[static_cast<std::size_t>(g.groups[i])];
        sum.squares += (rewards[i] - sum.mean) * (rewards[i] - sum.mean);
    }
    for (std::size_t i = 0; i < g.rows; ++i) {
        const Sum& sum = sums[static_cast<std::size_t>(g.groups[i])];
        if (sum.count < 2) {
            advantages[i] = 0;
            continue;
        }
        // The mean of the others: (total - own) / (count - 1).
        double advantage = (rewards[i] - sum.mean) * (g.leaves_out ? sum.count / (sum.count - 1) : 1);
        if (g.scales && sum.squares > 0) advantage /= std::sqrt(sum.squares / (sum.count - 1)) + g.eps;
        advantages[i] = static_cast<Real>(advantage);
    }
}
template void group_relative<float>(const Groups&, const float*, float*);
template void group_relative<double>(const Groups&, const double*, double*);

#define SHARPWAVE_RETURNS(Real, Flag)                                        \
    template void gae<Real, Flag>(const Rollout<Real, Flag>&, Real*, Real*); \
    template void discounted<Real, Flag>(const Rollout<Real, Flag>&, Real*); \
    template void vtrace<Real, Flag>(const VTrace<Real, Flag>&, Real*, Real*);
SHARPWAVE_RETURNS(float, std::uint8_t)
SHARPWAVE_RETURNS(float, float)
SHARPWAVE_RETURNS(double, std::uint8_t)
SHARPWAVE_RETURNS(double, double)

}  // namespace sharpwave
