// What the rooms give each other and the module.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/wait.h"
#include "batches/batch_maker.h"
#include "interpreter.h"
#include "numpy_api.h"
#include "results.h"
#include "sampling/pace.h"
#include "table/streams.h"
#include "table/table.h"
#include "tree.h"

void bind_settings(nb::module_& m);
void bind_tree(nb::module_& m);
void bind_table(nb::module_& m);
void bind_streams(nb::module_& m);
void bind_writer(nb::module_& m);
void bind_packer(nb::module_& m);
void bind_columns(nb::module_& m);
void bind_returns(nb::module_& m);
void bind_trajectories(nb::module_& m);
void bind_launch(nb::module_& m);
void bind_files(nb::module_& m);
void bind_sequences(nb::module_& m);
void bind_wire(nb::module_& m);
void bind_desk(nb::module_& m);

// The deadline that a `timeout=` stands for: None (or null) is never, else seconds from now.
sharpwave::Deadline read_deadline(PyObject* timeout);

// Waits for the turn of so many rows and reserves them. When the deadline is over, or when no other thread or process
// could end the wait, ErrorKind::not_ready tells why. `timeout` is what the deadline was read from, for the message.
// Nothing to do without a pace.
void take_turn(sharpwave::Pace* pace, sharpwave::Pace::Side side, std::uint64_t rows, PyObject* timeout,
               sharpwave::Deadline deadline);

// A turn that was taken and must end, whatever happens in between.
class PaceTurn {
public:
    PaceTurn(std::shared_ptr<sharpwave::Pace> pace, sharpwave::Pace::Side side, std::uint64_t rows, PyObject* timeout,
             sharpwave::Deadline deadline)
        : pace_(std::move(pace)), side_(side), rows_(rows) {
        take_turn(pace_.get(), side, rows, timeout, deadline);
    }
    ~PaceTurn() {
        if (pace_) pace_->settle(side_, rows_, done);
    }
    PaceTurn(const PaceTurn&) = delete;
    PaceTurn& operator=(const PaceTurn&) = delete;
    void keep() { pace_.reset(); }  // settled later, by hand
    bool done = false;

private:
    std::shared_ptr<sharpwave::Pace> pace_;
    sharpwave::Pace::Side side_;
    std::uint64_t rows_;
};

// Odds of a draw into the caller's array of two float64: rows, then scale. Nothing to do for None.
void put_odds(nb::handle array, const sharpwave::DrawOdds& odds);

// A table together with the shape that its rows have in Python.
struct BoundTable {
    explicit BoundTable(std::shared_ptr<sharpwave::Table> opened) : table(std::move(opened)) {}
    BoundTable(BoundTable&&) = default;
    ~BoundTable() { let_go(); }

    // The last user of a file may have to wait for processes that are opening it: without the interpreter's lock.
    void let_go() {
        auto gone_table = std::move(table);
        auto gone_batches = std::move(batches);
        auto gone_pace = std::move(pace);
        const PatientRelease release(gone_table != nullptr);
        gone_pace.reset();
        gone_batches.reset();
        gone_table.reset();
    }

    std::shared_ptr<sharpwave::Table> table;  // null after close()
    std::shared_ptr<Tree> tree;
    std::shared_ptr<LastArrays> last;
    std::shared_ptr<sharpwave::BatchMaker> batches;
    std::shared_ptr<sharpwave::Pace> pace;  // null: no call ever waits
    npy_intp newest = 0;                    // the smallest batch
    npy_intp most = NPY_MAX_INTP;           // the largest batch: the capacity if each row is given once

    // A reference of the caller's own: close() in another thread must not take the table away during a call.
    std::shared_ptr<sharpwave::Table> open() const {
        if (!table) throw sharpwave::Error(sharpwave::ErrorKind::closed, "the buffer is closed");
        table->check_open();
        return table;
    }
};

// Streams and episodes of rows that are read in order.
struct BoundStreams {
    explicit BoundStreams(const BoundTable& bound);

    // Adds "stream" and "episode" to a batch of these rows.
    void number(const std::vector<std::uint64_t>& serials, const std::vector<std::uint64_t>& words, nb::handle batch);

    std::shared_ptr<sharpwave::Table> table;
    sharpwave::Streams streams;
};

void bind_direct(nb::module_& m, nb::class_<BoundTable>& table);
void bind_write(nb::class_<BoundTable>& table);
void bind_clients(nb::class_<BoundTable>& table);
