// A table's sampler and view together: rows are drawn, become examples, and are drawn again where they had gone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "sampling/index.h"
#include "table/table.h"
#include "views/transitions.h"

namespace sharpwave {

// The arrays of a batch beside its examples.
struct Drawings {
    std::uint64_t* serials;
    float* weights = nullptr;         // by priority only, with ...
    double* probabilities = nullptr;  // ... these
};

class Sampler {
public:
    // With `index` rows are drawn by priority; the table was made for it.
    Sampler(std::shared_ptr<Table> table, ViewConfig view, const std::optional<IndexConfig>& index);

    // `count` examples, with replacement. An empty table is ErrorKind::not_ready.
    void sample(std::size_t count, const Outputs& out, const Drawings& drawn);

    // Single transitions by serial; a row that is gone is ErrorKind::stale_handle, or skipped when `skipped` is given:
    // then the outputs hold count - *skipped rows, in order. `words` tells their flags.
    void read(std::uint64_t* serials, std::size_t count, const Outputs& out, std::uint64_t* words,
              std::size_t* skipped = nullptr) const;

    const Transitions& view() const { return view_; }
    Index* index() { return index_.get(); }  // null: uniform

private:
    std::shared_ptr<Table> table_;
    Transitions view_;
    std::unique_ptr<Index> index_;
};

}  // namespace sharpwave
