#include "table/stack_memory.h"

#include <algorithm>
#include <cstring>

namespace sharpwave {

StackMemory::StackMemory(const RowLayout& layout, std::uint64_t width) : layout_(layout), check_(layout, width) {
    if (!has_stacks()) return;
    Env env;
    std::uint64_t bytes = 0;
    for (const Field& field : layout.fields()) {
        offsets_.push_back(bytes);
        if (field.follows < 0) bytes += (field.stack - 1) * field.full_bytes;
        if (field.gives_next) env.next.emplace_back();
    }
    env.frames.resize(bytes);
    envs_.assign(width, env);
    for (Env& one : envs_) {
        std::size_t next = 0;
        for (const Field& field : layout.fields()) {
            if (field.gives_next) one.next[next++].reserve(field.full_bytes);
        }
    }
}

const std::byte* StackMemory::frame(const Env& env, std::size_t field, std::uint32_t back) const {
    const Field& of = layout_.fields()[field];
    return env.frames.data() + offsets_[field] + (env.position - 1 - back) % (of.stack - 1) * of.full_bytes;
}

bool StackMemory::goes_on(const Field& field, std::uint64_t number, const std::byte* newest,
                          std::uint32_t count) const {
    const Env& env = envs_[number];
    const auto index = static_cast<std::size_t>(&field - layout_.fields().data());
    const std::uint32_t known = std::min(count, env.rows);
    for (std::uint32_t k = 0; k < known; ++k, newest -= field.full_bytes) {
        if (std::memcmp(frame(env, index, k), newest, field.full_bytes) != 0) return false;
    }
    if (!env.is_whole) return true;
    // Before the episode's first frame there is its padding.
    for (std::uint32_t k = known; k < count; ++k, newest -= field.full_bytes) {
        const auto is_zero = [](std::byte item) { return item == std::byte{0}; };
        const bool is_padding = field.pads_zero
                                    ? std::all_of(newest, newest + field.full_bytes, is_zero)
                                    : std::memcmp(frame(env, index, known - 1), newest, field.full_bytes) == 0;
        if (!is_padding) return false;
    }
    return true;
}

// Where next observations are derived, a row that shows another one than was said starts an episode.
bool StackMemory::shows_next(const RowBatch& batch, std::size_t row, const Env& env) const {
    std::size_t next = 0;
    for (std::size_t f = 0; f < layout_.fields().size(); ++f) {
        const Field& field = layout_.fields()[f];
        if (!field.gives_next) continue;
        const GivenValue shown = value_of(batch.fields[f], field, row);
        const std::vector<std::byte>& said = env.next[next++];
        if (shown.bytes != said.size() || (shown.bytes && std::memcmp(shown.data, said.data(), shown.bytes) != 0))
            return false;
    }
    return true;
}

void StackMemory::remember_row(const RowBatch& batch, std::size_t row, Env& env) {
    if (!env.is_open || check_.is_reset(row) || !shows_next(batch, row, env)) {
        env.rows = 0;
        env.is_whole = env.is_known;
        env.is_known = true;
    }
    ++env.position;
    env.rows = std::min(env.rows + 1, layout_.stack());
    std::size_t next = 0;
    for (std::size_t f = 0; f < layout_.fields().size(); ++f) {
        const Field& field = layout_.fields()[f];
        if (field.stack > 1 && field.follows < 0) {
            std::memcpy(const_cast<std::byte*>(frame(env, f, 0)), value_of(batch.fields[f], field, row).data,
                        field.full_bytes);
        }
        if (!field.gives_next) continue;
        const GivenValue said = value_of(batch.next[next], field, row);
        env.next[next++].assign(said.data, said.data + said.bytes);  // has the room
    }
}

void StackMemory::remember(const RowBatch& batch) {
    for (std::size_t i = 0; i < batch.rows; ++i) {
        if (is_void(batch, i)) continue;
        Env& env = envs_[i % envs_.size()];
        remember_row(batch, i, env);
        env.is_open = !(batch.flags && (batch.flags[i] & (kRowTerminated | kRowTruncated)));
    }
}

void StackMemory::forget() {
    for (Env& env : envs_) env.is_open = env.is_known = false;
}

}  // namespace sharpwave
