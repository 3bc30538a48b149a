// One call's draws from the index.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/random.h"
#include "base/wait.h"
#include "sampling/row_index.h"

namespace sharpwave {

// Where draws go, one entry a position each.
struct Drawn {
    std::uint64_t* slots;
    std::uint64_t* limits;  // a row with this serial or a later one is younger than the draw
    double* probabilities;
};

// What a batch of several tables needs to know of the draw from one of them.
struct DrawOdds {
    double rows = 0;   // that could be drawn: without priorities each has the probability 1 / rows
    double scale = 1;  // the weight before normalisation, (N * P) ^ -beta, of the rows whose normalised weight is 1
};

class IndexDraw {
public:
    // Draws `count` positions and takes a call number. Fewer rows than the order needs are ErrorKind::not_ready
    // and take none. The index lock is waited for until the deadline, here and in again().
    IndexDraw(RowIndex& index, const Drawn& drawn, std::size_t count, Deadline deadline = Deadline::never());

    // The same position once more, inside the call's own random numbers: the row drawn was gone. attempt >= 1.
    void again(const Drawn& drawn, std::size_t position, std::uint64_t attempt);

    // Probabilities to importance weights, (N * P) ^ -beta, normalised as configured.
    void weigh(const double* probabilities, float* weights, std::size_t count) const;
    DrawOdds odds(const double* probabilities, std::size_t count) const;

    const Substream& stream() const { return stream_; }

private:
    void draw_weighted(const Drawn& drawn, std::size_t count);
    bool draw_even(std::uint64_t* slots, std::size_t count) const;
    void draw_counted(const Drawn& drawn, std::size_t count);
    void draw_epoch(std::uint64_t* slots, std::size_t begin, std::size_t end);
    void draw_again(const Drawn& drawn, std::size_t position, std::uint64_t attempt);
    std::vector<double> distinct_ranks(std::uint64_t left, std::size_t begin, std::size_t count) const;
    void begin_epoch();
    void count_reads(const std::uint64_t* slots, std::size_t count);
    void newest_rows(std::uint64_t* slots, std::size_t count) const;
    std::uint64_t turn() const;
    void read_odds();
    void finish(const Drawn& drawn, std::size_t begin, std::size_t end);
    double target(std::size_t position, std::uint64_t attempt) const;
    double reference(const double* probabilities, std::size_t count) const;
    std::uint64_t uniform_slot(std::size_t position, std::uint64_t attempt) const;

    RowIndex& index_;
    RowMasses& masses_;
    Deadline deadline_;
    std::size_t newest_, batch_;  // positions of the newest rows, and those drawn after them
    Substream stream_;
    double beta_ = 0;
    double total_ = 0, rows_ = 0;   // of the index at the last draw
    double share_ = 0, floor_ = 0;  // P = share * mass + floor
    double least_probability_ = 0;
};

}  // namespace sharpwave
