// Waiting for one's turn without holding the interpreter, and without missing Ctrl-C.
#include <algorithm>
#include <string>

#include "bind.h"
#include "errors.h"

using sharpwave::Pace;

namespace {

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

// Threads that redraw progress bars add no rows. `collect(progress=True)` has one.
bool draws_progress(nb::handle thread) {
    const std::string module = nb::cast<std::string>(thread.type().attr("__module__"));
    return module.starts_with("rich.") || module.starts_with("tqdm.");
}

// Whether this thread is the only one that could ever change anything.
bool is_alone(const Pace& pace) {
    if (!pace.is_alone()) return false;
    return outlast([] {
        const nb::list threads(nb::module_::import_("threading").attr("enumerate")());
        return std::count_if(threads.begin(), threads.end(), [](nb::handle one) { return !draws_progress(one); }) == 1;
    });
}

}  // namespace

sharpwave::Deadline read_deadline(PyObject* timeout) {
    if (!timeout || timeout == Py_None) return sharpwave::Deadline::never();
    return sharpwave::Deadline::in(read_timeout(timeout));
}

void take_turn(Pace* pace, Pace::Side side, std::uint64_t rows, PyObject* timeout, sharpwave::Deadline deadline) {
    if (!pace || rows == 0) return;
    std::uint32_t mark = pace->mark();
    if (pace->try_reserve(side, rows, deadline)) return;
    const auto refuse = [&](const std::string& how) {
        throw sharpwave::Error(sharpwave::ErrorKind::not_ready, pace->reason(side, rows) + how);
    };
    if (deadline.is_never() && is_alone(*pace)) {
        const std::string first = side == Pace::Side::add ? "sample first" : "add first";
        refuse("; this thread is the only one and waits for itself: " + first +
               (pace->is_shared() ? ", or give timeout= to wait for other processes" : ""));
    }
    for (;;) {
        if (deadline.is_over()) refuse("; timeout=" + std::string(nb::steal<nb::str>(PyObject_Repr(timeout)).c_str()));
        bool mine;
        {
            const PatientRelease release;
            pace->wait(mark, std::min(deadline.left_s(), sharpwave::kWaitSlice));
            mark = pace->mark();
            mine = pace->try_reserve(side, rows, deadline);
        }
        if (mine) return;
        pace->check_open();
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
    }
}
