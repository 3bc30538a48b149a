// A cart that drifts: enough of an environment for the examples, with observations like CartPole's.
#pragma once

#include <array>
#include <cstdint>

struct Cart {
    using Observation = std::array<float, 4>;
    Observation observation{};
    int step = 0;

    void reset() {
        observation = {};
        step = 0;
    }

    // Pushes left (0) or right (1); whether the episode is over.
    bool push(std::int64_t action) {
        auto& [position, speed, angle, turn] = observation;
        speed += action == 1 ? 0.1f : -0.1f;
        position += speed;
        turn = -speed;
        angle += 0.1f * turn;
        ++step;
        return position > 2.4f || position < -2.4f;
    }
};
