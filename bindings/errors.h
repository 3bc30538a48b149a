// Engine errors become the classes of sharpwave.errors, by kind.
#pragma once

#include "base/error.h"
#include "numpy_api.h"

// Sets the Python error for `error`; the caller returns its failure value.
void set_python_error(const sharpwave::Error& error);

// What a plain C function returns: the object that `call` gives, or null with the Python error set.
template <class Call>
PyObject* translating(const Call& call) {
    try {
        return call();
    } catch (const sharpwave::Error& error) {
        set_python_error(error);
    } catch (nb::python_error& error) {
        error.restore();
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return nullptr;
}
