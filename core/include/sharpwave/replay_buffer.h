// The C++ face: a typed ring of transitions over the engine's table.
//
//     using Observation = std::array<float, 17>;
//     using Action = std::array<float, 6>;
//     sharpwave::ReplayBuffer<Observation, Action> buffer({.capacity = 1'000'000});
//     buffer.add({observation, action, reward, next_observation, done});
//     auto batch = buffer.sample(32);
//
// Observation and Action are trivially copyable: their bytes are the row. Every method may be called from any thread.
// Link against the CMake target sharpwave::core.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "base/error.h"
#include "sampling/uniform.h"
#include "table/table.h"
#include "table/writer.h"

namespace sharpwave {

template <typename Observation, typename Action>
struct Transition {
    Observation observation{};
    Action action{};
    float reward = 0;
    Observation next_observation{};
    bool done = false;   // terminated: do not bootstrap
    float priority = 1;  // for prioritized replay
};

enum class SamplingStrategy { Uniform, Prioritized };

struct BufferConfig {
    std::size_t capacity = 0;
    SamplingStrategy strategy = SamplingStrategy::Uniform;
    float alpha = 0.6f;
    float beta = 0.4f;
    bool enable_compression = false;
    std::uint64_t seed = 0;
};

template <typename Observation, typename Action>
class ReplayBuffer {
    static_assert(std::is_trivially_copyable_v<Observation> && std::is_trivially_copyable_v<Action>,
                  "observations and actions are stored as bytes: use std::array or a plain struct, not std::vector");

public:
    using TransitionType = Transition<Observation, Action>;

    explicit ReplayBuffer(const BufferConfig& config)
        : table_(Table::create(table_config(config))), writer_(table_->writer()) {}

    // One row; returns when it is committed.
    void add(const TransitionType& transition) { add(std::span(&transition, 1)); }

    // Several rows; each goes straight from its struct into its record.
    void add(std::span<const TransitionType> transitions) {
        for (const TransitionType& row : transitions) {
            const auto fields = moves(const_cast<TransitionType&>(row), row.done);
            const std::uint8_t flags = row.done ? kRowTerminated : 0;
            writer_->append({fields.data(), 1, &flags});
        }
    }

    // Uniform, with replacement. With `indices` it also tells which rows they were: names that never come back.
    std::vector<TransitionType> sample(std::size_t batch_size, std::vector<std::size_t>* indices = nullptr) {
        std::vector<TransitionType> batch(batch_size);
        if (indices) indices->resize(batch_size);
        sample_into(batch, indices ? std::span<std::size_t>(*indices) : std::span<std::size_t>{});
        return batch;
    }

    // The same into memory of the caller's; nothing is allocated once a batch of this size has been drawn.
    void sample_into(std::span<TransitionType> batch, std::span<std::size_t> indices = {}) {
        thread_local std::vector<Record> records;
        thread_local std::vector<std::uint64_t> serials;
        if (records.size() < batch.size()) {
            records.resize(batch.size());
            serials.resize(batch.size());
        }
        const std::array<FieldMove, 1> whole{
            FieldMove{table_->layout().payload_offset(), sizeof(Record), reinterpret_cast<std::byte*>(records.data())}};
        sample_uniform(*table_, batch.size(), whole.data(), serials.data());
        for (std::size_t i = 0; i < batch.size(); ++i) {
            const Record& record = records[i];
            batch[i] = {record.observation, record.action, record.reward, record.next_observation, record.done != 0, 1};
        }
        for (std::size_t i = 0; i < indices.size(); ++i) indices[i] = serials[i];
    }

    // Part of the seed's interface; uniform sampling has no priorities to update.
    void update_priorities(const std::vector<std::size_t>&, const std::vector<float>&) {
        throw std::logic_error("update_priorities(): needs SamplingStrategy::Prioritized");
    }

    std::size_t size() const { return table_->size(); }
    std::size_t capacity() const { return table_->capacity(); }
    bool is_full() const { return size() == capacity(); }
    Table& table() { return *table_; }

private:
    // The row as the table stores it: one field, so that a draw is one copy a row.
    struct Record {
        Observation observation;
        Observation next_observation;
        Action action;
        float reward;
        std::uint32_t done;
    };

    static std::array<FieldMove, 1> moves(TransitionType& row, bool done) {
        thread_local Record record;
        record = {row.observation, row.next_observation, row.action, row.reward, done};
        return {FieldMove{payload_offset(), sizeof(Record), reinterpret_cast<std::byte*>(&record)}};
    }

    static constexpr std::uint64_t payload_offset() { return sizeof(Record) < RowLayout::kEmbeddedBelow ? 8 : 0; }

    static TableConfig table_config(const BufferConfig& config) {
        if (config.strategy != SamplingStrategy::Uniform) {
            throw std::invalid_argument("BufferConfig: strategy: expected Uniform; this version draws uniformly");
        }
        if (config.enable_compression) {
            throw std::invalid_argument("BufferConfig: enable_compression: expected false; this version stores bytes");
        }
        TableConfig table;
        table.capacity = config.capacity;
        table.seed = config.seed;
        table.fields = {{"transition", "|V" + std::to_string(sizeof(Record)), sizeof(Record), {}}};
        return table;
    }

    std::shared_ptr<Table> table_;
    std::unique_ptr<Writer> writer_;
};

}  // namespace sharpwave
