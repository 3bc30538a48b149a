// Waiting for one's turn without holding the interpreter, and without missing Ctrl-C.
#include <unistd.h>

#include <algorithm>
#include <string>

#include "base/process.h"
#include "bind.h"
#include "errors.h"

using sharpwave::Pace;

namespace {

constexpr double kSlice = 0.1;  // seconds between looks at signals

double read_timeout(PyObject* timeout) {
    const double seconds = PyBool_Check(timeout) ? -2 : PyFloat_AsDouble(timeout);
    if ((seconds == -1 && PyErr_Occurred()) || !(seconds >= 0)) {
        PyErr_Clear();
        const std::string given = nb::steal<nb::str>(PyObject_Repr(timeout)).c_str();
        throw sharpwave::Error(sharpwave::ErrorKind::schema,
                               "timeout: expected seconds, at least 0, or None, got " + given);
    }
    return seconds;
}

// Whether this thread is the only one that could ever change anything.
bool is_alone(const Pace& pace) {
    if (!pace.is_alone()) return false;
    const nb::object count = nb::module_::import_("threading").attr("active_count")();
    return nb::cast<int>(count) == 1;
}

}  // namespace

bool wait_for_file(const std::string& path, double seconds) {
    const std::uint64_t start = sharpwave::now_ns();
    for (;;) {
        const double left = seconds - static_cast<double>(sharpwave::now_ns() - start) * 1e-9;
        bool is_there;
        {
            const PatientRelease release;
            is_there = sharpwave::wait_for_file(path, std::min(left, kSlice));
        }
        if (is_there || left <= kSlice) return is_there;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
    }
}

namespace {

void wait_out_the_end() {
#if PY_VERSION_HEX >= 0x030d0000
    const auto is_ending = [] { return Py_IsFinalizing(); };
#else
    const auto is_ending = [] { return _Py_IsFinalizing(); };
#endif
    while (is_ending()) pause();
}

}  // namespace

PatientRelease::~PatientRelease() {
    wait_out_the_end();
    PyEval_RestoreThread(state_);
}

void check_signals() {
    wait_out_the_end();
    const PyGILState_STATE state = PyGILState_Ensure();
    const bool is_raised = PyErr_CheckSignals() != 0;
    PyGILState_Release(state);
    if (is_raised) throw sharpwave::Error(sharpwave::ErrorKind::interrupted, "interrupted");
}

void take_turn(Pace* pace, Pace::Side side, std::uint64_t rows, PyObject* timeout) {
    if (!pace || rows == 0) {
        if (timeout && timeout != Py_None) read_timeout(timeout);
        return;
    }
    const bool forever = !timeout || timeout == Py_None;
    const double seconds = forever ? 0 : read_timeout(timeout);
    std::uint32_t mark = pace->mark();
    if (pace->try_reserve(side, rows)) return;
    const auto refuse = [&](const std::string& how) {
        throw sharpwave::Error(sharpwave::ErrorKind::not_ready, pace->reason(side, rows) + how);
    };
    if (forever && is_alone(*pace)) {
        const std::string first = side == Pace::Side::add ? "sample first" : "add first";
        refuse("; this thread is the only one and waits for itself: " + first +
               (pace->is_shared() ? ", or give timeout= to wait for other processes" : ""));
    }
    const std::uint64_t start = sharpwave::now_ns();
    for (;;) {
        const double left = forever ? kSlice : seconds - static_cast<double>(sharpwave::now_ns() - start) * 1e-9;
        if (left <= 0) refuse("; timeout=" + std::string(nb::steal<nb::str>(PyObject_Repr(timeout)).c_str()));
        bool mine;
        {
            const PatientRelease release;
            pace->wait(mark, std::min(left, kSlice));
            mark = pace->mark();
            mine = pace->try_reserve(side, rows);
        }
        if (mine) return;
        pace->check_open();
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
    }
}
