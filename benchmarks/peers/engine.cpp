// The engine without Python, for ctypes: the same table, the same draws, the loop over calls in C++.
#include <optional>
#include <vector>

#include "batches/batch_maker.h"
#include "table/writer.h"

using namespace sharpwave;

namespace {

struct Engine {
    std::shared_ptr<Table> table;
    std::unique_ptr<Writer> writer;
    std::unique_ptr<BatchMaker> batches;
};

Engine& engine(void* handle) { return *static_cast<Engine*>(handle); }

}  // namespace

extern "C" {

// Small rows alone: obs, action, reward, next_obs, done.
void* engine_create(std::uint64_t capacity, bool by_priority, double alpha, double beta, std::uint32_t n_step,
                    double gamma) {
    TableConfig config;
    config.capacity = capacity;
    config.fields = {{"obs", "<f4", 4, {17}},
                     {"action", "<f4", 4, {6}},
                     {"reward", "<f4", 4, {}},
                     {"next_obs", "<f4", 4, {17}},
                     {"done", "|b1", 1, {}}};
    config.index.is_by_priority = by_priority;
    config.set_counters = Exponents{alpha, beta, beta, 0}.writer();
    const bool folds = n_step > 1;
    const Role summed = folds ? Role::reward : Role::own, last = folds ? Role::last : Role::own;
    ViewConfig view{n_step, gamma, {{0, Role::own}, {1, Role::own}, {2, summed}, {3, last}, {4, last}}};
    auto* made = new Engine{Table::create(config), nullptr, nullptr};
    made->writer = made->table->writer();
    made->batches = std::make_unique<BatchMaker>(
        made->table,
        BatchConfig{std::move(view), by_priority ? std::optional<RowIndexConfig>(RowIndexConfig{}) : std::nullopt});
    return made;
}

void engine_add(void* handle, std::uint64_t rows, std::uint64_t calls, const std::byte** columns,
                const std::uint8_t* flags, const float* priorities) {
    std::vector<FieldInput> inputs;
    for (const Field& field : engine(handle).table->layout().fields()) {
        inputs.push_back({*columns++, field.full_bytes, 1, nullptr});
    }
    const RowBatch batch{inputs.data(), rows, flags, nullptr, priorities};
    for (std::uint64_t i = 0; i < calls; ++i) engine(handle).writer->append(batch);
}

void engine_sample(void* handle, std::uint64_t rows, std::uint64_t calls, std::byte** columns, float* discounts,
                   std::uint64_t* serials, float* weights, double* probabilities) {
    const Outputs outputs{columns, nullptr, discounts};
    const BatchExtras drawn{serials, weights, probabilities};
    for (std::uint64_t i = 0; i < calls; ++i) engine(handle).batches->sample(rows, outputs, drawn);
}

// One update a batch; the batches stand one after the other.
void engine_update(void* handle, std::uint64_t rows, std::uint64_t batches, const std::uint64_t* serials,
                   const float* priorities) {
    RowIndex& index = *engine(handle).batches->index();
    for (std::uint64_t i = 0; i < batches; ++i) index.update(serials + i * rows, priorities + i * rows, rows);
}
}
