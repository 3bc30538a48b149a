// What the rooms give each other and the module.
#pragma once

#include <memory>
#include <string>

#include "base/error.h"
#include "numpy_api.h"
#include "results.h"
#include "sampling/pace.h"
#include "sampling/sampler.h"
#include "table/table.h"
#include "tree.h"

void bind_tree(nb::module_& m);
void bind_table(nb::module_& m);
void bind_writer(nb::module_& m);
void bind_returns(nb::module_& m);
void bind_trajectories(nb::module_& m);
void bind_launch(nb::module_& m);
void bind_files(nb::module_& m);

// Leaves the interpreter to other threads during a wait. A thread that wakes while the interpreter is being taken down
// sleeps for ever: taking the lock then would end the thread in the middle of our frames, and with it the process.
class PatientRelease {
public:
    PatientRelease() : state_(PyEval_SaveThread()) {}
    ~PatientRelease();
    PatientRelease(const PatientRelease&) = delete;
    PatientRelease& operator=(const PatientRelease&) = delete;

private:
    PyThreadState* state_;
};

// Runs the handlers of signals that came during a wait; throws ErrorKind::interrupted where one of them raised. Called
// without the interpreter's lock.
void check_signals();

// Waits until there is a file of that name; whether there is one.
bool wait_for_file(const std::string& path, double seconds);

// Waits for the turn of so many rows and reserves them. `timeout` is None or seconds; when it is over, or when nobody
// could ever end the wait, ErrorKind::not_ready tells why. Nothing to do without a pace.
void take_turn(sharpwave::Pace* pace, sharpwave::Pace::Side side, std::uint64_t rows, PyObject* timeout);

// A turn that was taken and must end, whatever happens in between.
class Turn {
public:
    Turn(std::shared_ptr<sharpwave::Pace> pace, sharpwave::Pace::Side side, std::uint64_t rows, PyObject* timeout)
        : pace_(std::move(pace)), side_(side), rows_(rows) {
        take_turn(pace_.get(), side, rows, timeout);
    }
    ~Turn() {
        if (pace_) pace_->settle(side_, rows_, done);
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    void keep() { pace_.reset(); }  // settled later, by hand
    bool done = false;

private:
    std::shared_ptr<sharpwave::Pace> pace_;
    sharpwave::Pace::Side side_;
    std::uint64_t rows_;
};

// A table together with the shape that its rows have in Python.
struct BoundTable {
    std::shared_ptr<sharpwave::Table> table;  // null after close()
    std::shared_ptr<Tree> tree;
    std::shared_ptr<LastArrays> last;
    std::shared_ptr<sharpwave::Sampler> sampler;
    std::shared_ptr<sharpwave::Pace> pace;  // null: nobody ever waits
    npy_intp newest = 0;                    // the smallest batch

    // A reference of the caller's own: close() in another thread must not take the table away during a call.
    std::shared_ptr<sharpwave::Table> open() const {
        if (!table) throw sharpwave::Error(sharpwave::ErrorKind::closed, "the buffer is closed");
        table->check_open();
        return table;
    }
};

void bind_direct(nb::module_& m, nb::class_<BoundTable>& table);
