// The engine without Python, for ctypes: the same table, the same draws, the loop over calls in C++.
#include <vector>

#include "sampling/uniform.h"
#include "table/writer.h"

using namespace sharpwave;

namespace {

struct Engine {
    std::shared_ptr<Table> table;
    std::unique_ptr<Writer> writer;

    std::vector<FieldMove> moves(void** columns) const {
        std::vector<FieldMove> result;
        for (const Field& field : table->layout().fields()) {
            result.push_back({field.offset, field.bytes, static_cast<std::byte*>(*columns++)});
        }
        return result;
    }
};

}  // namespace

extern "C" {

// Small rows alone: obs, action, reward, next_obs, done.
void* engine_create(std::uint64_t capacity) {
    TableConfig config;
    config.capacity = capacity;
    config.fields = {{"obs", "<f4", 4, {17}},
                     {"action", "<f4", 4, {6}},
                     {"reward", "<f4", 4, {}},
                     {"next_obs", "<f4", 4, {17}},
                     {"done", "|b1", 1, {}}};
    auto* engine = new Engine{Table::create(config), nullptr};
    engine->writer = engine->table->writer();
    return engine;
}

void engine_add(void* handle, std::uint64_t rows, std::uint64_t calls, void** columns) {
    auto* engine = static_cast<Engine*>(handle);
    const auto fields = engine->moves(columns);
    for (std::uint64_t i = 0; i < calls; ++i) engine->writer->append({fields.data(), rows, nullptr});
}

void engine_sample(void* handle, std::uint64_t rows, std::uint64_t calls, void** columns, std::uint64_t* serials) {
    auto* engine = static_cast<Engine*>(handle);
    const auto fields = engine->moves(columns);
    for (std::uint64_t i = 0; i < calls; ++i) sample_uniform(*engine->table, rows, fields.data(), serials);
}
}
