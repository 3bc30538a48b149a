// Keeps objects alive while the interpreter is left to other threads: one of them may empty a dict that held them.
#pragma once

#include "numpy_api.h"

class Held {
public:
    Held(PyObject* const* objects, std::size_t count) : objects_(objects), count_(count) {
        for (std::size_t i = 0; i < count_; ++i) Py_INCREF(objects_[i]);
    }
    ~Held() {
        for (std::size_t i = 0; i < count_; ++i) Py_DECREF(objects_[i]);
    }
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;

private:
    PyObject* const* objects_;
    std::size_t count_;
};
