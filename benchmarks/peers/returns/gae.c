// Generalized advantage estimation as one who knows C writes it: backwards over the steps, a row of environments at a
// time. Plain loops, one thread, no checks; written so that the compiler makes vectors of them by itself (no choice
// between two numbers, and no two names for one array), or the yardstick would be several times too long.
#include <stdint.h>

static void estimate_row(int64_t envs, float gamma, float gamma_lambda, const float* restrict rewards,
                         const float* restrict values, const uint8_t* restrict dones, const float* restrict next_values,
                         const float* restrict carried, float* restrict advantages, float* restrict returns) {
    for (int64_t n = 0; n < envs; n++) {
        const float alive = 1.0f - (float)dones[n];
        const float delta = rewards[n] + gamma * alive * next_values[n] - values[n];
        advantages[n] = delta + gamma_lambda * alive * carried[n];
        returns[n] = advantages[n] + values[n];
    }
}

void gae(int64_t calls, int64_t steps, int64_t envs, float gamma, float lambda, const float* rewards,
         const float* values, const uint8_t* dones, const float* last_values, float* advantages, float* returns) {
    for (int64_t call = 0; call < calls; call++) {
        const int64_t last = (steps - 1) * envs;
        // Nothing is carried into the last step: whatever stands there is multiplied by 0.
        estimate_row(envs, gamma, 0.0f, rewards + last, values + last, dones + last, last_values, last_values,
                     advantages + last, returns + last);
        for (int64_t row = last - envs; row >= 0; row -= envs) {
            estimate_row(envs, gamma, gamma * lambda, rewards + row, values + row, dones + row, values + row + envs,
                         advantages + row + envs, advantages + row, returns + row);
        }
    }
}
