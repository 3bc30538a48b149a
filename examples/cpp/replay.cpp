// The C++ face in one page: fill a ring, draw from it by priority, read what came, give it new priorities.
#include <sharpwave/replay_buffer.h>

#include <array>
#include <cstdio>

int main() {
    using Observation = std::array<float, 4>;
    sharpwave::ReplayBuffer<Observation, int> buffer({.capacity = 1000,
                                                      .strategy = sharpwave::SamplingStrategy::Prioritized,
                                                      .alpha = 0.6f,
                                                      .beta = 0.4f,
                                                      .seed = 7});

    for (int step = 0; step < 1500; ++step) {
        const float now = static_cast<float>(step);
        buffer.add({.observation = {now, 0, 0, 0},
                    .action = step % 2,
                    .reward = 1.0f,
                    .next_observation = {now + 1, 0, 0, 0},
                    .done = step % 100 == 99});
    }
    std::printf("%zu of %zu rows\n", buffer.size(), buffer.capacity());

    std::vector<std::size_t> indices;
    std::vector<float> weights, td_errors = {0.1f, -2.0f, 0.5f, 0.0f};
    for (const auto& row : buffer.sample(4, &indices, &weights)) {
        std::printf("step %.0f -> %.0f, action %d%s\n", row.observation[0], row.next_observation[0], row.action,
                    row.done ? ", terminated" : "");
    }
    std::printf("the first is row %zu of all that were ever added, its weight %.2f\n", indices[0], weights[0]);
    buffer.update_priorities(indices, td_errors);
}
