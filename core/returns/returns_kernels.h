// The kernels behind returns.h: each works on `count` envs from `first` on.
#pragma once

#include "returns/returns.h"

namespace sharpwave {

inline constexpr std::size_t kTileEnvs = 2048;  // what is carried from step to step stays in the nearest cache

template <class Real, class Flag>
struct ReturnKernels {
    void (*gae)(const Rollout<Real, Flag>&, std::size_t first, std::size_t count, Real* advantages, Real* returns);
    void (*discounted)(const Rollout<Real, Flag>&, std::size_t first, std::size_t count, Real* returns);
    void (*vtrace)(const VTrace<Real, Flag>&, std::size_t first, std::size_t count, Real* targets, Real* advantages);
};

struct AllReturnKernels {
    ReturnKernels<float, std::uint8_t> f32_bool;
    ReturnKernels<float, float> f32;
    ReturnKernels<double, std::uint8_t> f64_bool;
    ReturnKernels<double, double> f64;
};

}  // namespace sharpwave
