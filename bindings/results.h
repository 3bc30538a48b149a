// Batches: dicts of arrays, new ones from recycled memory or the caller's own.
#pragma once

#include <vector>

#include "few.h"
#include "numpy_api.h"
#include "tree.h"

// The arrays of one batch while it is being filled.
struct Batch {
    explicit Batch(std::size_t leaves) : fields(leaves), arrays(leaves + 1) {}
    nb::object dict;
    Few<sharpwave::FieldMove> fields;   // one a leaf
    Few<PyObject*> arrays;              // one a leaf, and that of the indices; borrowed from the dict
    std::uint64_t* indices = nullptr;   // the array under "indices"
    std::uint8_t* truncated = nullptr;  // the array under "truncated", where asked for
};

// The small arrays of the last two batches. One that nobody else holds any more is given out again as it is: for them
// making and freeing the array object costs more than filling it. (While the caller draws the next batch it still holds
// the last one, hence two.)
class LastArrays {
public:
    ~LastArrays();
    PyObject* take(std::size_t place, PyArray_Descr* dtype, int dimensions, const npy_intp* shape);  // new reference
    void keep(std::size_t place, PyObject* array);

private:
    struct Pair {
        PyObject* arrays[2] = {};
        int oldest = 0;
    };
    std::vector<Pair> pairs_;
};

// New arrays of `rows` rows, small ones by way of `last` if it is given. Large ones come from memory of batches that
// died: no page faults.
Batch new_batch(const Tree& tree, npy_intp rows, LastArrays* last, bool with_truncated = false);

// The caller's arrays, every one checked (dtype, shape, order, writable, no overlap) before anything is drawn.
Batch check_out(const Tree& tree, npy_intp rows, nb::handle out);

// Bytes that wait for reuse.
std::size_t pooled_bytes();
