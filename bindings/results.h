// Batches: dicts of arrays, new ones from recycled memory or the caller's own.
#pragma once

#include <vector>

#include "few.h"
#include "numpy_api.h"
#include "tree.h"
#include "views/windows.h"

// The arrays of one batch while it is being filled.
struct Batch {
    static constexpr std::size_t kExtras = 10;
    explicit Batch(std::size_t leaves) : flats(leaves), lengths(leaves), arrays(leaves + kExtras) {}
    nb::object dict;
    Few<std::byte*> flats;       // one a leaf
    Few<std::int64_t*> lengths;  // one a leaf; null where it is not ragged
    Few<PyObject*> arrays;       // one a leaf, then those of the extras; borrowed from the dict
    std::size_t array_count = 0;
    std::uint64_t* indices = nullptr;   // the array under "indices"
    std::uint8_t* truncated = nullptr;  // and so on, where asked for
    float* discounts = nullptr;
    float* weights = nullptr;
    double* probabilities = nullptr;
    std::uint8_t* relabelled = nullptr;
    sharpwave::WindowMasks masks;
    bool is_ragged = false;

    sharpwave::Outputs outputs() {
        return {flats.data(), is_ragged ? lengths.data() : nullptr, discounts, nullptr, truncated};
    }
};

// The small arrays of the last two batches. One without another reference is given out again as it is: for them
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
// died: no page faults. Rows read back carry "truncated" instead of what sampling adds. A batch with ragged leaves has
// their lengths under "lengths", a list.
Batch new_batch(const Tree& tree, npy_intp rows, LastArrays* last, bool is_read_back = false);

// The caller's arrays, every one checked (dtype, shape, order, writable, no overlap) before anything is drawn.
Batch check_out(const Tree& tree, npy_intp rows, nb::handle out);

// The same for torch tensors on the CPU, among which arrays may be. False, without an error: something does not fit.
bool lend_out(const Tree& tree, npy_intp rows, nb::handle out, Batch& batch);

// One array by itself, its memory recycled as that of batches.
nb::object pooled_array(PyArray_Descr* dtype, int dimensions, const npy_intp* shape);

// Bytes that wait for reuse.
std::size_t pooled_bytes();
