// The engine's returns from C++: the textbook's case, and every width of a row.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "returns/returns.h"

namespace sharpwave {
namespace {

TEST(Returns, TellTruncatedFromTerminated) {
    const float rewards[] = {1, 2, 3}, values[] = {10, 20, 30}, last[] = {40};
    const float nan = std::nanf(""), finals[] = {nan, 25, nan};
    const std::uint8_t ends[] = {0, 1, 0};
    Rollout<float, std::uint8_t> rollout{3, 1, rewards, values, ends, nullptr, nullptr, last, nullptr, 0.9, 0.5};
    float advantages[3], returns[3];
    gae(rollout, advantages, returns);
    EXPECT_NEAR(advantages[0], 0.9f, 1e-5);
    EXPECT_NEAR(advantages[1], -18, 1e-5);
    EXPECT_NEAR(returns[2], 39, 1e-5);
    rollout.truncated = ends;
    rollout.final_values = finals;
    gae(rollout, advantages, returns);
    EXPECT_NEAR(advantages[0], 11.025f, 1e-5);
    EXPECT_NEAR(advantages[1], 4.5f, 1e-5);
    EXPECT_NEAR(returns[1], 24.5f, 1e-5);
}

// Widths around a register's and a tile's: each env as if it were alone.
TEST(Returns, AreThoseOfEachEnvAlone) {
    std::mt19937 stream(1);
    std::normal_distribution<double> normal;
    const std::size_t steps = 7;
    for (std::size_t envs : {1u, 3u, 8u, 9u, 31u, 1023u, 1025u, 2050u}) {
        std::vector<double> rewards(steps * envs), values(steps * envs), last(envs), a(steps * envs), r(steps * envs);
        std::vector<double> dones(steps * envs);
        for (double& x : rewards) x = normal(stream);
        for (double& x : values) x = normal(stream);
        for (double& x : last) x = normal(stream);
        for (double& x : dones) x = normal(stream) > 1;
        gae(Rollout<double, double>{steps, envs, rewards.data(), values.data(), dones.data(), nullptr, nullptr,
                                    last.data()},
            a.data(), r.data());
        for (std::size_t n = 0; n < envs; ++n) {
            double later = 0;
            for (std::size_t t = steps; t-- > 0;) {
                const std::size_t at = t * envs + n;
                const double next = t + 1 == steps ? last[n] : values[at + envs];
                const double alive = 1 - dones[at];
                later = rewards[at] + 0.99 * next * alive - values[at] + 0.99 * 0.95 * alive * later;
                ASSERT_NEAR(a[at], later, 1e-12) << envs << " envs, step " << t << ", env " << n;
                ASSERT_NEAR(r[at], later + values[at], 1e-12);
            }
        }
    }
}

}  // namespace
}  // namespace sharpwave
