// A BatchMaker makes the batches of a table: it draws rows (sampling), shapes them into examples (views), and draws
// again the rows that were overwritten between the two. The only room that knows both sampling and views.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "sampling/index_draw.h"
#include "sampling/live_rows.h"
#include "sampling/row_index.h"
#include "table/table.h"
#include "views/goals.h"
#include "views/transitions.h"
#include "views/windows.h"

namespace sharpwave {

// The arrays of a batch beside its examples.
struct BatchExtras {
    std::uint64_t* serials;
    float* weights = nullptr;         // by priority only, with ...
    double* probabilities = nullptr;  // ... these
    WindowMasks masks = {};           // with windows
    GoalOutputs goals = {};           // with hindsight
    DrawOdds* odds = nullptr;         // where asked for
};

struct BatchConfig {
    ViewConfig view;
    std::optional<RowIndexConfig> index =
        std::nullopt;  // the table was made for one; without, rows are drawn uniformly
    std::optional<WindowConfig> windows = std::nullopt;
    std::optional<GoalConfig> goals = std::nullopt;  // with an index whose rows start where their episode has ended
    std::uint64_t newest = 0;                        // the first positions of a batch are the newest rows
};

class BatchMaker {
public:
    BatchMaker(std::shared_ptr<Table> table, BatchConfig config);

    // `count` examples. A table that has none to give is ErrorKind::not_ready, and so is an index lock that another
    // process keeps until the deadline. (Without an index nothing is waited for.)
    void sample(std::size_t count, const Outputs& out, const BatchExtras& drawn, Deadline deadline = Deadline::never());

    // Single transitions by serial; a row that is gone is ErrorKind::stale_handle, or skipped when `skipped` is given:
    // then the outputs hold count - *skipped rows, in order. `words` tells their flags.
    void read(std::uint64_t* serials, std::size_t count, const Outputs& out, std::uint64_t* words,
              std::size_t* skipped = nullptr) const;

    const Transitions& view() const { return view_; }
    std::uint64_t example_bytes() const { return view_.example_bytes() * (windows_ ? windows_->places() : 1); }
    RowIndex* index() { return index_.get(); }  // null: uniform
    const std::shared_ptr<RowIndex>& shared_index() const { return index_; }

private:
    std::shared_ptr<Table> table_;
    Transitions view_;
    std::shared_ptr<RowIndex> index_;
    LiveRows live_;  // without an index
    std::optional<Windows> windows_;
    std::optional<Goals> goals_;
    std::uint64_t newest_;
};

}  // namespace sharpwave
