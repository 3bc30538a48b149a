// The C++ face: a typed ring of transitions over the engine's table.
//
//     using Observation = std::array<float, 17>;
//     using Action = std::array<float, 6>;
//     sharpwave::ReplayBuffer<Observation, Action> buffer({.capacity = 1'000'000});
//     buffer.add({observation, action, reward, next_observation, done});
//     auto batch = buffer.sample(32);
//
// Observation and Action are trivially copyable: their bytes are the row. Every method may be called from any thread.
// ReplayBuffer::open("shm://replay") is the same over a buffer that Python made; other fields: sharpwave/buffer.h.
// Link against the CMake target sharpwave::core.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "base/error.h"
#include "batches/batch_maker.h"
#include "sampling/exponents.h"
#include "sharpwave/buffer.h"
#include "table/codec.h"
#include "table/table.h"
#include "table/writer.h"

namespace sharpwave {

template <typename Observation, typename Action>
struct Transition {
    Observation observation{};
    Action action{};
    float reward = 0;
    Observation next_observation{};
    bool done = false;  // terminated: do not bootstrap
    // Of a new row, for prioritized replay; NaN: the largest in the buffer.
    float priority = std::numeric_limits<float>::quiet_NaN();
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
        : table_(Table::create(table_config(config))), writer_(table_->writer()) {
        batches_.emplace(table_, BatchConfig{ViewConfig{1, 1.0, {{0, Role::own}}}, index_config(config)});
    }

    // A buffer at an address, whose fields are obs, action, reward (float32), next_obs and done (bool), with the sizes
    // of these types: anything else is ErrorKind::schema. It draws as its sampler says.
    static ReplayBuffer open(const std::string& address, const OpenOptions& options = {}) {
        return ReplayBuffer(sharpwave::open(address, options));
    }

    // One row; returns when it is committed.
    void add(const TransitionType& transition) { add(std::span(&transition, 1)); }

    // Several rows; each goes straight from its struct into its record.
    void add(std::span<const TransitionType> transitions) {
        if (attached_) return add_attached(transitions);
        thread_local Record record;
        for (const TransitionType& row : transitions) {
            record = {row.observation, row.next_observation, row.action, row.reward, row.done};
            const FieldInput field{reinterpret_cast<const std::byte*>(&record), sizeof(Record)};
            const std::uint8_t flags = row.done ? kRowTerminated : 0;
            const float priority = std::fabs(row.priority);
            if (std::isinf(priority)) throw std::invalid_argument("add(): priority: expected a finite number");
            writer_->append({&field, 1, &flags, nullptr, std::isnan(priority) ? nullptr : &priority});
        }
    }

    // With replacement. `indices` gets which rows they were, names that never come back; `weights` the importance
    // weights of prioritized draws, the largest being 1 (all 1 with uniform ones).
    std::vector<TransitionType> sample(std::size_t batch_size, std::vector<std::size_t>* indices = nullptr,
                                       std::vector<float>* weights = nullptr) {
        std::vector<TransitionType> batch(batch_size);
        if (indices) indices->resize(batch_size);
        if (weights) weights->resize(batch_size);
        sample_into(batch, indices ? std::span<std::size_t>(*indices) : std::span<std::size_t>{},
                    weights ? std::span<float>(*weights) : std::span<float>{});
        return batch;
    }

    // The same into memory of the caller's; nothing is allocated once a batch of this size has been drawn.
    void sample_into(std::span<TransitionType> batch, std::span<std::size_t> indices = {},
                     std::span<float> weights = {}) {
        if (attached_) return sample_attached(batch, indices, weights);
        thread_local std::vector<Record> records;
        thread_local std::vector<std::uint64_t> serials;
        if (records.size() < batch.size()) {
            records.resize(batch.size());
            serials.resize(batch.size());
        }
        std::byte* const flat = reinterpret_cast<std::byte*>(records.data());
        const bool weighs = batches_->index() && !weights.empty();
        batches_->sample(batch.size(), {&flat}, {serials.data(), weighs ? weights.data() : nullptr});
        for (std::size_t i = 0; i < batch.size(); ++i) {
            const Record& record = records[i];
            batch[i] = {record.observation, record.action, record.reward, record.next_observation, record.done != 0};
        }
        for (std::size_t i = 0; i < indices.size(); ++i) indices[i] = serials[i];
        for (std::size_t i = 0; !weighs && i < weights.size(); ++i) weights[i] = 1;
    }

    // New priorities by magnitude: TD errors as they are. Rows that have left since are passed over. A number that is
    // not finite is refused, and nothing is changed.
    void update_priorities(const std::vector<std::size_t>& indices, const std::vector<float>& priorities) {
        if (!attached_ && !batches_->index()) {
            throw std::logic_error("update_priorities(): needs SamplingStrategy::Prioritized");
        }
        if (indices.size() != priorities.size()) {
            throw std::invalid_argument("update_priorities(): expected as many priorities as indices");
        }
        for (float priority : priorities) {
            if (!std::isfinite(priority)) throw std::invalid_argument("update_priorities(): expected finite numbers");
        }
        if (attached_) {
            const std::vector<std::int64_t> names(indices.begin(), indices.end());
            attached_->update_priorities(names, priorities);
            return;
        }
        const std::vector<std::uint64_t> names(indices.begin(), indices.end());
        batches_->index()->update(names.data(), priorities.data(), names.size());
    }

    std::size_t size() const { return attached_ ? attached_->size() : table_->size(); }
    std::size_t capacity() const { return attached_ ? attached_->capacity() : table_->capacity(); }
    bool is_full() const { return size() == capacity(); }
    Table& table() { return *table_; }  // of a buffer in memory

private:
    // The row as the table stores it: one field, so that a draw is one copy a row.
    struct Record {
        Observation observation;
        Observation next_observation;
        Action action;
        float reward;
        std::uint32_t done;
    };

    explicit ReplayBuffer(Buffer buffer) : attached_(std::move(buffer)) {
        check_field<Observation>("obs");
        check_field<Action>("action");
        check_field<float>("reward");
        check_field<Observation>("next_obs");
        check_field<bool>("done");
        const Batch probe = attached_->batch(1);
        bool is_plain = attached_->fields().size() == 5 && attached_->num_envs().value_or(1) == 1;
        for (const FieldInfo& field : attached_->fields()) is_plain = is_plain && !field.is_ragged && field.stack == 1;
        if (!is_plain || probe.array("reward").bytes != sizeof(float)) {
            throw Error(ErrorKind::schema,
                        "open(): '" + attached_->address() +
                            "': expected plain transitions of obs, action, reward, next_obs and done, "
                            "one environment and no windows; use sharpwave::open() for others");
        }
    }

    // The items of a type, where it says what they are: a number, or an array of numbers.
    template <class T>
    struct ItemOf {
        using type = T;
    };
    template <class T>
        requires requires { typename T::value_type; }
    struct ItemOf<T> {
        using type = typename ItemOf<typename T::value_type>::type;
    };

    template <class T>
    void check_field(const std::string& name) const {
        for (const FieldInfo& field : attached_->fields()) {
            if (field.name != name) continue;
            const std::uint64_t bytes = attached_->batch(1).array(name).bytes;
            if (bytes != sizeof(T)) {
                throw Error(ErrorKind::schema, "open(): field '" + name + "': expected " + std::to_string(sizeof(T)) +
                                                   " bytes a row, as the type in C++ has, got " +
                                                   std::to_string(bytes));
            }
            using ItemType = typename ItemOf<T>::type;
            if constexpr (Item<ItemType>) attached_->batch(1).template get<ItemType>(name);  // refuses another dtype
            return;
        }
        throw Error(ErrorKind::schema, "open(): '" + attached_->address() + "' has no field '" + name + "'");
    }

    void add_attached(std::span<const TransitionType> transitions) {
        const auto bytes = [](const auto& value) {
            return std::span(reinterpret_cast<const std::byte*>(&value), sizeof value);
        };
        for (const TransitionType& row : transitions) {
            const Given values[] = {{"obs", bytes(row.observation)},
                                    {"action", bytes(row.action)},
                                    {"reward", row.reward},
                                    {"next_obs", bytes(row.next_observation)},
                                    {"done", row.done},
                                    {"priority", row.priority}};
            attached_->add(std::span(values, std::isnan(row.priority) ? 5 : 6));
        }
    }

    void sample_attached(std::span<TransitionType> batch, std::span<std::size_t> indices, std::span<float> weights) {
        const Batch drawn = attached_->sample(batch.size());
        const std::byte* const observations = drawn.array("obs").data;
        const std::byte* const actions = drawn.array("action").data;
        const std::byte* const next_observations = drawn.array("next_obs").data;
        const std::span<const float> rewards = drawn.get<float>("reward");
        const std::span<const bool> dones = drawn.get<bool>("done");
        for (std::size_t i = 0; i < batch.size(); ++i) {
            TransitionType& row = batch[i];
            row = TransitionType{};
            std::memcpy(&row.observation, observations + i * sizeof(Observation), sizeof(Observation));
            std::memcpy(&row.action, actions + i * sizeof(Action), sizeof(Action));
            std::memcpy(&row.next_observation, next_observations + i * sizeof(Observation), sizeof(Observation));
            row.reward = rewards[i];
            row.done = dones[i];
        }
        for (std::size_t i = 0; i < indices.size(); ++i) indices[i] = static_cast<std::size_t>(drawn.indices()[i]);
        for (std::size_t i = 0; i < weights.size(); ++i) {
            weights[i] = drawn.weights().empty() ? 1 : drawn.weights()[i];
        }
    }

    static std::optional<RowIndexConfig> index_config(const BufferConfig& config) {
        if (config.strategy == SamplingStrategy::Uniform) return std::nullopt;
        return RowIndexConfig{};
    }

    static TableConfig table_config(const BufferConfig& config) {
        if (config.alpha < 0 || config.alpha > 1 || config.beta < 0 || config.beta > 1) {
            throw std::invalid_argument("BufferConfig: alpha, beta: expected 0 to 1");
        }
        if (config.enable_compression && !has_codecs()) {
            throw std::invalid_argument("BufferConfig: enable_compression: this library was built without Blosc2");
        }
        TableConfig table;
        table.capacity = config.capacity;
        table.seed = config.seed;
        table.fields = {{"transition", "|V" + std::to_string(sizeof(Record)), sizeof(Record), {}}};
        if (config.enable_compression) table.fields[0].codec = Codec::lz4;
        table.index.is_by_priority = config.strategy == SamplingStrategy::Prioritized;
        table.set_counters = Exponents{config.alpha, config.beta, config.beta, 0}.writer();
        return table;
    }

    std::shared_ptr<Table> table_;
    std::unique_ptr<Writer> writer_;
    std::optional<BatchMaker> batches_;
    std::optional<Buffer> attached_;  // instead of the three
};

}  // namespace sharpwave
