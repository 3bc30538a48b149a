// Which rows may be drawn, and how likely each is: one mass a slot, in a tree (sampling/sum_tree.h).
//
// Writers never touch the index. Whoever draws or updates takes the index lock and catches up first: it reads the words
// that the writers have committed since and gives each new row its priority. So the index is derived: it can be rebuilt
// from rows and stored priorities, and it is, when a process died inside the lock.
//
// The mass of a row is (priority + eps) ^ alpha, or with rank_based (1 / rank) ^ alpha. Orders other than weighted ones
// give every row that may be drawn mass 1, so that a running sum of masses counts rows: the k-th oldest is found by the
// same descent as a draw.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/random.h"
#include "sampling/starts.h"
#include "sampling/sum_tree.h"
#include "table/table.h"

namespace sharpwave {

enum class Normalize { batch, buffer, none };
enum class NewRows { live_max, running_max, constant };

// How rows follow each other.
enum class Order {
    weighted,  // by mass, with replacement
    recent,    // the same over the newest ones only
    shuffle,   // each once an epoch
    fifo,      // oldest first
    lifo,      // newest first
};

// What stays as it was built. Alpha and beta stand in the table's counters, where they may change.
struct RowIndexConfig {
    double eps = 1e-6;
    bool rank_based = false;
    bool stratified = true;
    Normalize normalize = Normalize::batch;
    double mix = 0;  // share of draws that are uniform
    NewRows new_rows = NewRows::live_max;
    float new_priority = 1;  // with NewRows::constant
    Order order = Order::weighted;
    std::uint64_t recent = 0;     // with Order::recent: so many
    std::uint64_t newest = 0;     // the first positions of a batch are the newest rows
    std::uint64_t max_reads = 0;  // a row leaves after so many; 0: never
    StartRule starts;
};

// Where draws go, one entry a position each.
struct Drawn {
    std::uint64_t* slots;
    std::uint64_t* limits;  // a row with this serial or a later one is younger than the draw
    double* probabilities;
};

class RowIndex {
public:
    // The table was made with priorities.
    RowIndex(Table& table, const RowIndexConfig& config);

    const RowIndexConfig& config() const { return config_; }

    // One call's draws.
    class Draw {
    public:
        // Draws `count` positions and takes a call number. Fewer rows than the order needs are ErrorKind::not_ready
        // and take none. The index lock is waited for until the deadline, here and in again().
        Draw(RowIndex& index, const Drawn& drawn, std::size_t count, Deadline deadline = Deadline::never());

        // The same position once more, inside the call's own random numbers: the row drawn was gone. attempt >= 1.
        void again(const Drawn& drawn, std::size_t position, std::uint64_t attempt);

        // Probabilities to importance weights, (N * P) ^ -beta, normalised as configured.
        void weigh(const double* probabilities, float* weights, std::size_t count) const;

        const Substream& stream() const { return stream_; }

    private:
        void draw_weighted(const Drawn& drawn, std::size_t count);
        void draw_counted(const Drawn& drawn, std::size_t count);
        void draw_epoch(std::uint64_t* slots, std::size_t begin, std::size_t end);
        void read_odds();
        void finish(const Drawn& drawn, std::size_t begin, std::size_t end);
        double target(std::size_t position, std::uint64_t attempt) const;
        std::uint64_t uniform_slot(std::size_t position, std::uint64_t attempt) const;

        RowIndex& index_;
        Deadline deadline_;
        std::size_t newest_, batch_;  // positions of the newest rows, and those drawn after them
        Substream stream_;
        double beta_ = 0;
        double total_ = 0, rows_ = 0;   // of the index at the last draw
        double share_ = 0, floor_ = 0;  // P = share * mass + floor
        double least_probability_ = 0;
    };

    struct Updated {
        std::uint64_t applied = 0, stale = 0;
    };

    // Gives rows new priorities: magnitudes, last write wins. The caller has refused NaN and infinities.
    Updated update(const std::uint64_t* serials, const float* priorities, std::size_t count,
                   Deadline deadline = Deadline::never());

    // Rows that were drawn and reached nobody: as if they had not been.
    void give_back(const std::uint64_t* serials, std::size_t count);

    // Every mass follows at once, exactly, from 0 too.
    void set_alpha(double alpha);
    double alpha() const;
    void set_beta(double start, double end, double steps);
    double beta() const;  // of the next call
    void beta_schedule(double& start, double& end, double& steps) const;

    // What rows have now; those that are gone have -1.
    void priorities(const std::uint64_t* serials, float* priorities, std::size_t count);

    std::uint64_t updates_applied() const;
    std::uint64_t updates_stale() const;
    double total();        // sum of all masses, after catching up
    std::uint64_t rows();  // that may be drawn, after catching up
    const Starts& starts() const { return starts_; }

    // For a caller that holds the table's lock already: brings the index up to date.
    std::uint64_t rows_locked();

    // Rows that may be drawn, as of the last call that brought the index up to date. Needs no lock.
    std::uint64_t rows_known() const;

    // How many rows a draw of `count` needs at least: see Order.
    std::uint64_t rows_needed(std::uint64_t count) const {
        return config_.order == Order::weighted || config_.order == Order::recent ? 1 : count;
    }

    // The sum of the leaves taken anew, for tests of the tree.
    double recomputed_total();

private:
    // The region's first bytes.
    struct Head {
        std::uint64_t rows;      // live rows in the index
        std::uint64_t massless;  // of those, rows of mass 0
        std::uint64_t changes;   // adds and updates since the last ranking
        std::uint64_t ranked;    // 1: masses are those of a ranking that came to its end
        std::uint64_t reserved[4];
    };
    struct Range {
        std::uint64_t slot, count, end;  // `end`: the serial after the last row
        bool is_even;                    // every one of them counts: see BlockRecord::uneven
    };

    void catch_up();
    bool take_late_ends();
    void collect(std::uint64_t ticket, std::uint64_t head);
    void take_in();
    void remove(std::uint64_t slot);
    void set_leaf(std::uint64_t slot, float priority, float mass);
    void set_waiting(std::uint64_t slot, float priority);
    void let_in(const std::vector<std::uint64_t>& legal, bool again = false);
    void recount_episode(std::uint64_t slot);
    void share_anew();
    void rebuild();
    void rebuild_starts();
    void remake_masses();
    void rank();
    bool keep_ranks();
    void begin_epoch();
    void count_reads(const std::uint64_t* slots, std::size_t count);
    void newest_rows(std::uint64_t* slots, std::size_t count) const;
    std::uint64_t turn() const;
    float mass_of(float priority) const;
    float fallback_priority(float given_max);
    [[noreturn]] void refuse(std::uint64_t asked) const;

    // Everything from here on belongs to the lock.
    Table& table_;
    RowIndexConfig config_;
    Head* head_;
    std::uint64_t* cursors_;  // one a block: the first serial that is not in the index yet
    float* given_;            // by writers: the priority that an add brought, as stored; 0: none
    std::uint32_t* reads_;    // one a row; null: not counted
    SumTree tree_;
    const SumTreeKernels& kernels_;
    Starts starts_;
    std::vector<Range> new_rows_;
    std::vector<std::pair<std::uint64_t, std::uint64_t>> seen_;  // writers and the newest of their blocks
    std::vector<std::uint64_t> leaves_, retired_, legal_, changed_, words_;
    std::vector<float> stored_, masses_;
};

}  // namespace sharpwave
