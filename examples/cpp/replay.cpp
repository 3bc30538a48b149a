// The C++ face in one page: fill a ring, draw from it, read what came.
#include <sharpwave/replay_buffer.h>

#include <array>
#include <cstdio>

int main() {
    using Observation = std::array<float, 4>;
    sharpwave::ReplayBuffer<Observation, int> buffer({.capacity = 1000, .seed = 7});

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
    for (const auto& row : buffer.sample(4, &indices)) {
        std::printf("step %.0f -> %.0f, action %d%s\n", row.observation[0], row.next_observation[0], row.action,
                    row.done ? ", terminated" : "");
    }
    std::printf("the first is row %zu of all that were ever added\n", indices[0]);
}
