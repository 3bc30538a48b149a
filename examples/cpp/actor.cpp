// An actor in C++: adds transitions to a buffer that another process made, for example Python with
//
//     sw.ReplayBuffer(100_000, schema={"obs": sw.Field((4,)), "action": sw.Field((), "int64")}, storage="shm://replay")
//
// Usage: actor shm://replay [steps]
#include <sharpwave/buffer.h>

#include <cstdio>
#include <cstdlib>

#include "cart.h"

int main(int count, char** words) {
    if (count < 2) {
        std::fprintf(stderr, "usage: actor ADDRESS [STEPS]\n");
        return 2;
    }
    const int steps = count > 2 ? std::atoi(words[2]) : 1000;
    try {
        sharpwave::Buffer buffer = sharpwave::open(words[1], {.wait = true, .timeout_s = 10});
        Cart cart;
        for (int total = 0; total < steps; ++total) {
            const Cart::Observation obs = cart.observation;
            const std::int64_t action = total % 3 == 0;
            const bool terminated = cart.push(action);
            const bool truncated = !terminated && cart.step == 50;
            buffer.add({{"obs", obs},
                        {"action", action},
                        {"reward", 1.0f},
                        {"next_obs", cart.observation},
                        {"terminated", terminated},
                        {"truncated", truncated}});
            if (terminated || truncated) cart.reset();
        }
        std::printf("added %d rows; the buffer has %zu of %zu\n", steps, buffer.size(), buffer.capacity());
    } catch (const sharpwave::Error& error) {
        std::fprintf(stderr, "actor: %s\n", error.what());
        return 1;
    }
}
