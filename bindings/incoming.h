// The rows of one add on their way from Python to the engine. The usual values are accepted in row_intake.h; here
// are those that must be converted.
#pragma once

#include "input_values.h"
#include "table/row_batch.h"
#include "tree.h"

using sharpwave::FieldInput;

// One add on its way: the values as they came, and where their bytes are.
struct Incoming {
    static constexpr std::size_t kMaxFields = 64;  // wider rows take the careful way
    const Tree* tree;
    PyObject* read_leaf;           // the Python function for single values, borrowed
    PyObject* const* values;       // one a top-level name: the call's own arguments, or `sorted`
    PyObject* sorted[kMaxFields];  // match_arguments() clears as many as there are
    PyObject* truncated = nullptr;
    PyObject* mask = nullptr;
    PyObject* priority = nullptr;
    PyObject* timeout = nullptr;
    PyObject* return_indices;  // raw: only an add that was called with it sets and reads it
    // Raw: only those of the schema are ever filled, and clearing all of them would cost as much as the add.
    union {
        FieldInput fields[kMaxFields];
    };
    union {
        FieldInput next[kMaxFields];
    };
    PyObject* sources[kMaxFields];  // the values behind the leaves, in the order they were met; borrowed
    std::size_t source_count = 0;
    std::size_t held_count = 0;  // how many of them are held, see hold()
    npy_intp lead_shape[2];
    int lead = 0;  // leading axes: 0 is one row, 1 is (rows,), 2 is (steps, num_envs)
    std::size_t rows = 1;
    PyObject* counted = nullptr;  // the value that told the number of rows, where it is behind `counted_given`
    GivenArray counted_given;
    InputMemory memory;

    Incoming(const Tree& of, PyObject* reader) : tree(&of), read_leaf(reader) {}
    ~Incoming() {
        for (std::size_t i = 0; i < held_count; ++i) Py_DECREF(sources[i]);
    }
    Incoming(const Incoming&) = delete;
    Incoming& operator=(const Incoming&) = delete;

    // Before Python code runs, which could take accepted values out of the dict that holds them.
    void hold() {
        for (; held_count < source_count; ++held_count) Py_INCREF(sources[held_count]);
    }
};

// Each of these returns false (or null) without an error set where the careful way must look at the call: it has the
// words for what is wrong. All of them may run Python code.

// The number of rows, from the value of the leaf that tells it.
bool count_odd_rows(const Leaf& leaf, PyObject* value, Incoming& incoming);

bool accept_odd_leaf(const Leaf& leaf, PyObject* value, Incoming& incoming, FieldInput& input);
bool accept_odd_ragged(const Leaf& leaf, PyObject* value, Incoming& incoming, FieldInput& input);

// The items of a mapping that is no dict, as a dict.
PyObject* read_mapping(PyObject* value, Incoming& incoming);

// One priority a row, by magnitude.
const float* accept_priorities(PyObject* value, Incoming& incoming);

// Whether an item of this dtype is anything but zero. False: a dtype whose zeros are not all made of zero bytes, or
// NaN; the careful way knows them.
bool is_done(const PyArray_Descr* dtype, const std::byte* item, bool& done);

// The row flags that a value holds, ORed in, where its truth is `when`.
bool flag_rows(PyObject* value, std::uint8_t flag, bool when, Incoming& incoming, std::uint8_t* flags);

// The same where each agent has its own end: from the dones, which have been accepted, and from truncated=, which has
// their form or one truth value for each row. A row is terminated when all agents are done, truncated when all are over
// and one is truncated, and cut when one is truncated and another goes on.
bool flag_agents(Incoming& incoming, std::uint8_t* flags);
