// What a rollout says about its policy: advantages and returns over (steps, envs) arrays, worked out backwards.
//
// Row t of env n stands at t * envs + n. An end is a step after which an episode was over, for any reason: nothing
// passes it backwards. A terminated step has nothing behind it; behind a truncated one stands the value of the
// observation that it ended with. What must not be used is not multiplied by 0 but never looked at: a NaN there stays
// there.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sharpwave {

// `Flag`: std::uint8_t, or Real where flags come as numbers. Anything but 0 is true.
template <class Real, class Flag>
struct Rollout {
    std::size_t steps = 0, envs = 0;
    const Real* rewards = nullptr;
    const Real* values = nullptr;        // of the observations; unused by discounted()
    const Flag* dones = nullptr;         // steps that ended an episode, for any reason
    const Flag* truncated = nullptr;     // those that did not end in a terminal state; null: none
    const Real* final_values = nullptr;  // behind truncated steps; null: the next row's value is theirs
    const Real* last_values = nullptr;   // one an env: of the observation after the last step
    const std::uint8_t* mask = nullptr;  // 0: no step of the policy's; null: all are
    double gamma = 0.99, lambda = 0.95;
};

// Masked steps get an advantage of 0 and their own value as return; nothing passes them backwards.
template <class Real, class Flag>
void gae(const Rollout<Real, Flag>& rollout, Real* advantages, Real* returns);

template <class Real, class Flag>
void discounted(const Rollout<Real, Flag>& rollout, Real* returns);

// Importance weights of the steps, exp(target - behaviour log-probability), before they are clipped.
template <class Real, class Flag>
struct VTrace {
    Rollout<Real, Flag> rollout;
    const Real* rhos = nullptr;
    double rho_clip = 1, c_clip = 1, pg_rho_clip = 1;  // infinity: none
};
template <class Real, class Flag>
void vtrace(const VTrace<Real, Flag>& input, Real* targets, Real* advantages);

// How much better each row did than the others of its group: rewards less the group's mean, divided by its standard
// deviation (with n - 1, plus eps) where `scales`; or less the mean of the others. `groups`: one a row, below
// `group_count`. A row that is alone in its group gets 0.
struct Groups {
    std::size_t rows = 0, group_count = 0;
    const std::int64_t* groups = nullptr;
    bool scales = true, leaves_out = false;
    double eps = 1e-6;
};
template <class Real>
void group_relative(const Groups& groups, const Real* rewards, Real* advantages);

}  // namespace sharpwave
