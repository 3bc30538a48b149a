// Batches: dicts of arrays, new ones from recycled memory or the caller's own.
#pragma once

#include <vector>

#include "bind.h"

// The arrays of one batch while it is being filled.
struct Batch {
    nb::object dict;
    std::vector<sharpwave::FieldMove> fields;  // one a leaf
    std::uint64_t* indices = nullptr;          // the array under "indices"
    std::uint8_t* truncated = nullptr;         // the array under "truncated", where asked for
    std::vector<nb::object> held;              // the caller's arrays: nobody may free them while they are filled
};

// New arrays of `rows` rows. Large ones come from memory of batches that died: no page faults.
Batch new_batch(const Tree& tree, npy_intp rows, bool with_truncated = false);

// The caller's arrays, every one checked (dtype, shape, order, writable, no overlap) before anything is drawn.
Batch check_out(const Tree& tree, npy_intp rows, nb::handle out);

// Bytes that wait for reuse.
std::size_t pooled_bytes();
