// A learner in C++: draws batches from a buffer that another process fills, whatever its fields are, and says what it
// got. Where rows are drawn by priority, it gives them new ones.
//
// Usage: learner shm://replay [batches] [batch size]
#include <sharpwave/buffer.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <thread>
#include <vector>

int main(int count, char** words) {
    if (count < 2) {
        std::fprintf(stderr, "usage: learner ADDRESS [BATCHES] [BATCH_SIZE]\n");
        return 2;
    }
    const int batches = count > 2 ? std::atoi(words[2]) : 10;
    const std::size_t batch_size = count > 3 ? static_cast<std::size_t>(std::atoi(words[3])) : 32;
    try {
        sharpwave::Buffer buffer = sharpwave::open(words[1], {.wait = true, .timeout_s = 10});
        for (const sharpwave::FieldInfo& field : buffer.fields()) {
            std::printf("field %s %s\n", field.name.c_str(), field.dtype.c_str());
        }
        while (buffer.size() < batch_size) std::this_thread::sleep_for(std::chrono::milliseconds(10));

        sharpwave::Batch batch = buffer.batch(batch_size);
        std::vector<float> errors(batch_size);
        for (int i = 0; i < batches; ++i) {
            buffer.sample_into(batch);  // into the same memory each time
            const std::span<const float> rewards = batch.get<float>("reward");
            double sum = 0;
            for (std::size_t row = 0; row < batch.size(); ++row) {
                sum += rewards[row];
                errors[row] = 1.0f + static_cast<float>(row);
            }
            if (!batch.weights().empty()) buffer.update_priorities(batch.indices(), errors);
            std::printf("batch %d: rows", i);
            for (const std::int64_t index : batch.indices()) std::printf(" %lld", static_cast<long long>(index));
            std::printf("; sum of rewards %.6f\n", sum);
        }
    } catch (const sharpwave::Error& error) {
        std::fprintf(stderr, "learner: %s\n", error.what());
        return 1;
    }
}
