#include "interpreter.h"

#include "base/error.h"
#include "base/wait.h"

namespace {

bool is_ending() {
#if PY_VERSION_HEX >= 0x030d0000
    return Py_IsFinalizing();
#else
    return _Py_IsFinalizing();
#endif
}

// Set in the thread that takes the interpreter down: it runs Python code while is_ending(), other threads never again.
thread_local bool takes_interpreter_down = false;

// Runs the handlers of signals that came during a wait; throws where one of them raised. Called without the lock.
void check_signals() {
    if (takes_interpreter_down) return;
    if (is_ending()) sleep_for_ever();
    const bool is_raised = outlast([] {
        const PyGILState_STATE state = PyGILState_Ensure();
        const bool raised = PyErr_CheckSignals() != 0;
        PyGILState_Release(state);
        return raised;
    });
    if (is_raised) throw sharpwave::Error(sharpwave::ErrorKind::interrupted, "interrupted");
}

}  // namespace

PyThreadState* let_go_of_interpreter() {
    // Only its own thread has the lock now.
    if (is_ending()) {
        takes_interpreter_down = true;
        return nullptr;
    }
    return PyEval_SaveThread();
}

void take_interpreter_back(PyThreadState* state) {
    if (is_ending()) sleep_for_ever();
    outlast([&] { PyEval_RestoreThread(state); });  // it may begin to end while we wait for the lock
}

void set_up_waits() {
    sharpwave::set_interrupt_check(&check_signals);
    sharpwave::set_yield(
        []() -> void* { return PyGILState_Check() ? static_cast<void*>(let_go_of_interpreter()) : nullptr; },
        [](void* state) { take_interpreter_back(static_cast<PyThreadState*>(state)); });
}
