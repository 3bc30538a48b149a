#define SHARPWAVE_IMPORTS_NUMPY
#include "bind.h"
#include "errors.h"
#include "numpy_api.h"

void set_python_error(const sharpwave::Error& error) {
    if (error.kind() == sharpwave::ErrorKind::interrupted) return;  // a signal handler's exception is set already
    static constexpr const char* kNames[] = {"SchemaError", "NotReady",    "StorageError",
                                             "StaleHandle", "ClosedError", "BufferFull"};
    const char* name = kNames[static_cast<int>(error.kind())];
    PyObject* module = PyImport_ImportModule("sharpwave.errors");
    PyObject* type = module ? PyObject_GetAttrString(module, name) : nullptr;
    if (type) PyErr_SetString(type, error.what());
    Py_XDECREF(type);
    Py_XDECREF(module);
}

static int import_numpy() {
    import_array1(-1);
    return 0;
}

NB_MODULE(_core, m) {
    m.doc() = "The engine behind sharpwave. Private: use the names of the package.";
    if (import_numpy() < 0) throw nb::python_error();
    nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
        try {
            std::rethrow_exception(pointer);
        } catch (const sharpwave::Error& error) {
            set_python_error(error);
        }
    });
    // At exit, threads that sleep for ever (see interpreter.h) and reference cycles keep objects alive. The process
    // gives their memory back and users can mend nothing, so nothing is printed; tests turn the warnings on.
    nb::set_leak_warnings(false);
    m.def("set_leak_warnings", [](bool on) { nb::set_leak_warnings(on); }, nb::arg("on"));
    bind_settings(m);
    bind_tree(m);
    bind_table(m);
    bind_streams(m);
    bind_writer(m);
    bind_packer(m);
    bind_columns(m);
    bind_returns(m);
    bind_trajectories(m);
    bind_launch(m);
    bind_files(m);
    bind_sequences(m);
    bind_wire(m);
    bind_desk(m);
    set_up_waits();
}
