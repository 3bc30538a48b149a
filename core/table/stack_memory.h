// The newest frames of each env, where no table holds them: a packer refuses the stacks that the table would refuse,
// before they are sent. It costs a second copy of each frame.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "table/row_batch.h"
#include "table/stack_check.h"

namespace sharpwave {

class StackMemory : private FramesBefore {
public:
    // The layout must live as long.
    StackMemory(const RowLayout& layout, std::uint64_t width);

    bool has_stacks() const { return layout_.stack() > 1; }

    // See StackCheck.
    void check(const RowBatch& batch) { check_.check(batch, *this); }

    // The rows of the batch that was checked last have been packed. Cannot fail.
    void remember(const RowBatch& batch);

    // Whether the newest rows will arrive is not known: they may come again, or not. Each env's next stack is accepted,
    // and the table decides.
    void forget();

private:
    // Of one env. Its memory is taken at once.
    struct Env {
        bool is_open = false;
        bool is_known = true;           // what came before its next row
        bool is_whole = true;           // the open episode is remembered from its first row on
        std::uint32_t rows = 0;         // remembered of the open episode
        std::uint64_t position = 0;     // rows ever: the newest frame stands at (position - 1) mod (stack - 1)
        std::vector<std::byte> frames;  // of all stacked fields, stack - 1 each
        std::vector<std::vector<std::byte>> next;  // of each field that gives_next: what the next row should show
    };
    bool is_open(std::uint64_t env) const override { return envs_[env].is_open; }
    bool goes_on(const Field& field, std::uint64_t env, const std::byte* newest, std::uint32_t count) const override;
    bool may_start_inside(std::uint64_t env) const override { return !envs_[env].is_known; }
    const std::byte* frame(const Env& env, std::size_t field, std::uint32_t back) const;
    bool shows_next(const RowBatch& batch, std::size_t row, const Env& env) const;
    void remember_row(const RowBatch& batch, std::size_t row, Env& env);

    const RowLayout& layout_;
    StackCheck check_;
    std::vector<std::uint64_t> offsets_;  // one a field: where its frames stand in Env::frames
    std::vector<Env> envs_;
};

}  // namespace sharpwave
