// How fast adding and sampling may go relative to each other: Reverb's inequalities.
//
// With I rows added and S rows delivered since the table was made or cleared, and `size` rows that may be drawn:
//     sampling n goes when  size >= min_size  and  I * ratio - S - n >= min_diff,
//     adding n goes when    size + n <= min_size  or  (I + n) * ratio - S <= max_diff.
// Rows alone may not make an example: windows need their length, hindsight a finished episode. Where the index has none
// to draw, sampling waits, and adding goes on, for only that can help.
//
// A call is tested and its rows are reserved under the index lock; what it did is counted when it is done, so a batch
// that was not delivered costs nothing. A reservation stands at its process's seat and ends with the process.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>

#include "sampling/row_index.h"
#include "table/table.h"

namespace sharpwave {

struct PaceConfig {
    double min_size = 1;
    double ratio = 1;  // samples per insert
    double min_diff = -std::numeric_limits<double>::infinity();
    double max_diff = std::numeric_limits<double>::infinity();
};

class Pace {
public:
    enum class Side { add, sample };

    // `index` is null where rows are drawn uniformly.
    Pace(std::shared_ptr<Table> table, std::shared_ptr<RowIndex> index, const PaceConfig& config);

    // Reserves n rows if it is their turn. A number of rows that no state could let through is ErrorKind::schema. The
    // index lock is waited for until the deadline.
    bool try_reserve(Side side, std::uint64_t rows, Deadline deadline = Deadline::never());

    // The rows were added or delivered, or were not: the reservation ends, and waiting calls look again.
    void settle(Side side, std::uint64_t rows, bool done);

    // Wakes the waiting calls: something has changed.
    void ring();

    // A mark before a failed try; wait() returns when something has happened since, or after so many seconds.
    std::uint32_t mark() const;
    void wait(std::uint32_t mark, double seconds);

    // Why it is not their turn, in numbers.
    std::string reason(Side side, std::uint64_t rows) const;

    void check_open() const { table_->check_open(); }

    // Whether other processes could have the table, and that none has it now.
    bool is_shared() const { return !table_->path().empty(); }
    bool is_alone() const { return table_->is_alone(); }

    struct Counts {
        std::uint64_t inserts, samples, waiting;
    };
    Counts counts() const;

private:
    struct State {
        double inserts, samples;  // done
        double adding, sampling;  // reserved
    };
    State state() const;
    double size() const;
    std::uint64_t rows_added() const;
    bool has_examples(std::uint64_t rows) const;
    void notice_clear() const;
    void forget_the_dead() const;

    std::shared_ptr<Table> table_;
    std::shared_ptr<RowIndex> index_;
    PaceConfig config_;
};

}  // namespace sharpwave
