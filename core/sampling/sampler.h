// A table's sampler and view together: rows are drawn, become examples, and are drawn again where they had gone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "sampling/index.h"
#include "table/table.h"
#include "views/goals.h"
#include "views/transitions.h"
#include "views/windows.h"

namespace sharpwave {

// The arrays of a batch beside its examples.
struct Drawings {
    std::uint64_t* serials;
    float* weights = nullptr;         // by priority only, with ...
    double* probabilities = nullptr;  // ... these
    WindowMasks masks = {};           // with windows
    GoalOutputs goals = {};           // with hindsight
};

struct SamplerConfig {
    ViewConfig view;
    std::optional<IndexConfig> index = std::nullopt;  // the table was made for one; without, rows are drawn uniformly
    std::optional<WindowConfig> windows = std::nullopt;
    std::optional<GoalConfig> goals = std::nullopt;  // with an index whose rows start where their episode has ended
    std::uint64_t newest = 0;                        // the first positions of a batch are the newest rows
};

class Sampler {
public:
    Sampler(std::shared_ptr<Table> table, SamplerConfig config);

    // `count` examples. A table that has none to give is ErrorKind::not_ready, and so is an index lock that another
    // process keeps until the deadline. (Without an index nothing is waited for.)
    void sample(std::size_t count, const Outputs& out, const Drawings& drawn, Deadline deadline = Deadline::never());

    // Single transitions by serial; a row that is gone is ErrorKind::stale_handle, or skipped when `skipped` is given:
    // then the outputs hold count - *skipped rows, in order. `words` tells their flags.
    void read(std::uint64_t* serials, std::size_t count, const Outputs& out, std::uint64_t* words,
              std::size_t* skipped = nullptr) const;

    const Transitions& view() const { return view_; }
    std::uint64_t example_bytes() const { return view_.example_bytes() * (windows_ ? windows_->places() : 1); }
    Index* index() { return index_.get(); }  // null: uniform

private:
    std::shared_ptr<Table> table_;
    Transitions view_;
    std::unique_ptr<Index> index_;
    std::optional<Windows> windows_;
    std::optional<Goals> goals_;
    std::uint64_t newest_;
};

}  // namespace sharpwave
