// Keeps objects alive while the interpreter is left to other threads: one of them may empty a dict that held them.
#pragma once

#include "numpy_api.h"

class HeldObjects {
public:
    HeldObjects(PyObject* const* objects, std::size_t count) : objects_(objects), count_(count) {
        for (std::size_t i = 0; i < count_; ++i) Py_INCREF(objects_[i]);
    }
    ~HeldObjects() {
        for (std::size_t i = 0; i < count_; ++i) Py_DECREF(objects_[i]);
    }
    HeldObjects(const HeldObjects&) = delete;
    HeldObjects& operator=(const HeldObjects&) = delete;

private:
    PyObject* const* objects_;
    std::size_t count_;
};
