// The usual values of an add, accepted as they lie: exact arrays, numbers, dicts and tuples of them. A part of
// row_intake.h. Each function returns false where incoming.h must look at the value, or the careful way.
#pragma once

#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "incoming.h"
#include "numpy_api.h"
#include "table/row_batch.h"
#include "tree.h"

namespace {

// Told by one comparison; whether it is an array, or a number of NumPy's, takes a walk through its type's bases.
bool is_python_number(PyObject* value) {
    return PyFloat_CheckExact(value) || PyBool_Check(value) || PyLong_CheckExact(value);
}

bool is_number(PyObject* value) { return is_python_number(value) || PyArray_IsScalar(value, Generic); }

// What comes most: a float for a float, a bool for a bool.
bool number_into(PyObject* value, int type, std::byte* to) {
    const auto put = [&](auto item) {
        std::memcpy(to, &item, sizeof item);
        return true;
    };
    if (PyFloat_CheckExact(value)) {
        const double real = PyFloat_AS_DOUBLE(value);
        if (type == NPY_DOUBLE) return put(real);
        const float narrow = static_cast<float>(real);
        return type == NPY_FLOAT && std::isinf(narrow) == std::isinf(real) && put(narrow);
    }
    return type == NPY_BOOL && PyBool_Check(value) && put(static_cast<std::uint8_t>(value == Py_True));
}

// (Inlined by order: two ways of calling it would make it a call of its own, which every add pays for.)
inline __attribute__((always_inline)) bool count_rows(const Leaf& leaf, PyObject* value, Incoming& incoming) {
    if (leaf.shape.empty() && is_number(value)) return true;
    if (!is_plain_array(value)) return count_odd_rows(leaf, value, incoming);
    auto* array = reinterpret_cast<PyArrayObject*>(value);
    incoming.lead = PyArray_NDIM(array) - static_cast<int>(leaf.shape.size());
    if (incoming.lead < 0 || incoming.lead > 2) return false;
    for (int i = 0; i < incoming.lead; ++i) {
        incoming.lead_shape[i] = PyArray_DIM(array, i);
        incoming.rows *= static_cast<std::size_t>(incoming.lead_shape[i]);
    }
    return true;
}

// A value of fewer items than the field has at most; one row at a time.
bool accept_ragged(const Leaf& leaf, PyObject* value, Incoming& incoming, FieldInput& input) {
    if (incoming.lead != 0 || !is_plain_array(value)) return accept_odd_ragged(leaf, value, incoming, input);
    auto* array = reinterpret_cast<PyArrayObject*>(value);
    if (PyArray_NDIM(array) != static_cast<int>(leaf.shape.size()) || !PyArray_ISCARRAY_RO(array) ||
        PyArray_TYPE(array) != leaf.dtype->type_num || PyArray_DIM(array, 0) > leaf.shape[0]) {
        return accept_odd_ragged(leaf, value, incoming, input);
    }
    for (std::size_t i = 1; i < leaf.shape.size(); ++i) {
        if (PyArray_DIM(array, static_cast<int>(i)) != leaf.shape[i]) return false;
    }
    if (!PyTypeNum_ISNUMBER(leaf.dtype->type_num) && !PyTypeNum_ISBOOL(leaf.dtype->type_num)) {
        return accept_odd_ragged(leaf, value, incoming, input);
    }
    auto* starts = reinterpret_cast<std::uint64_t*>(incoming.memory.room(16));
    starts[0] = 0;
    starts[1] = static_cast<std::uint64_t>(PyArray_NBYTES(array));
    input = {static_cast<const std::byte*>(PyArray_DATA(array)), 0, 1, starts};
    return true;
}

bool accept_leaf(const Leaf& leaf, PyObject* value, Incoming& incoming, FieldInput& input) {
    if (leaf.is_ragged) return accept_ragged(leaf, value, incoming, input);
    input.stride = leaf.frame_bytes;
    input.frames = 1;
    input.starts = nullptr;
    const int type = leaf.dtype->type_num;
    if (is_python_number(value)) {
        if (incoming.lead != 0 || !leaf.shape.empty()) return false;
        std::byte* to = incoming.memory.room(leaf.frame_bytes);
        input.flat = to;
        if (number_into(value, type, to)) return true;
        return accept_odd_leaf(leaf, value, incoming, input);
    }
    if (!is_plain_array(value)) return accept_odd_leaf(leaf, value, incoming, input);
    auto* array = reinterpret_cast<PyArrayObject*>(value);
    const int own = static_cast<int>(leaf.shape.size());
    const npy_intp* shape = PyArray_DIMS(array);
    int at = incoming.lead;
    if (PyArray_NDIM(array) != own + at) {
        // A whole stack: the newest frame is what is kept.
        if (leaf.stack == 1 || PyArray_NDIM(array) != own + at + 1 || shape[at] != static_cast<npy_intp>(leaf.stack)) {
            return false;
        }
        input.frames = leaf.stack;
        ++at;
    }
    for (int i = 0; i < incoming.lead; ++i) {
        if (shape[i] != incoming.lead_shape[i]) return false;
    }
    for (int i = 0; i < own; ++i) {
        if (shape[at + i] != leaf.shape[static_cast<std::size_t>(i)]) return false;
    }
    if (PyArray_TYPE(array) != type || !PyArray_ISCARRAY_RO(array) ||
        (!PyTypeNum_ISNUMBER(type) && !PyTypeNum_ISBOOL(type))) {
        return accept_odd_leaf(leaf, value, incoming, input);
    }
    input.flat = static_cast<const std::byte*>(PyArray_DATA(array)) + (input.frames - 1) * leaf.frame_bytes;
    input.stride = input.frames * leaf.frame_bytes;
    return true;
}

bool is_tuple_like(PyObject* value, std::size_t length) {
    if (PyList_CheckExact(value)) return static_cast<std::size_t>(PyList_GET_SIZE(value)) == length;
    // A named tuple, but no subclass that gives items of its own.
    return PyTuple_Check(value) && static_cast<std::size_t>(PyTuple_GET_SIZE(value)) == length &&
           Py_TYPE(value)->tp_as_mapping->mp_subscript == PyTuple_Type.tp_as_mapping->mp_subscript;
}

bool accept_node(const Tree& tree, const Node& node, PyObject* value, Incoming& incoming) {
    if (node.leaf >= 0) {
        const auto index = static_cast<std::size_t>(node.leaf);
        incoming.sources[incoming.source_count++] = value;
        const Leaf& leaf = tree.leaves()[index];
        FieldInput& input = leaf.is_next() ? incoming.next[leaf.input] : incoming.fields[leaf.input];
        return accept_leaf(leaf, value, incoming, input);
    }
    const nb::object held = nb::borrow(value);  // Python code that an item runs may drop it
    if (node.is_tuple) {
        for (std::size_t i = 0; i < node.children.size(); ++i) {
            if (!is_tuple_like(value, node.children.size())) return false;  // each time: Python code may have run
            PyObject* item = PySequence_Fast_GET_ITEM(value, static_cast<Py_ssize_t>(i));
            if (!accept_node(tree, node.children[i], item, incoming)) return false;
        }
        return true;
    }
    if (!PyDict_Check(value) && !(value = read_mapping(value, incoming))) return false;
    if (static_cast<std::size_t>(PyDict_GET_SIZE(value)) != node.children.size()) return false;
    for (const Node& child : node.children) {
        PyObject* item = PyDict_GetItemWithError(value, child.key);
        if (!item || !accept_node(tree, child, item, incoming)) return false;
    }
    return true;
}

// False for dtypes whose zeros are not all made of zero bytes, but for the two that everybody uses; and for NaN, which
// is neither yes nor no.
inline __attribute__((always_inline)) bool flag_terminated(const Leaf& leaf, const std::byte* data, std::size_t rows,
                                                           std::uint8_t* flags) {
    const int type = leaf.dtype->type_num;
    const auto each = [&](auto zero) {
        bool is_told = true;
        for (std::size_t i = 0; i < rows; ++i) {
            auto item = zero;
            std::memcpy(&item, data + i * sizeof item, sizeof item);
            flags[i] |= item != zero ? sharpwave::kRowTerminated : 0;
            is_told &= item == item;
        }
        return is_told;
    };
    if (type == NPY_FLOAT) return each(0.0f);
    if (type == NPY_DOUBLE) return each(0.0);
    if (!PyTypeNum_ISBOOL(type) && !PyTypeNum_ISINTEGER(type)) return false;
    if (leaf.frame_bytes == 1) return each(std::uint8_t{0});
    if (leaf.frame_bytes == 2) return each(std::uint16_t{0});
    return leaf.frame_bytes == 4 ? each(std::uint32_t{0}) : each(std::uint64_t{0});
}

// The value under a path of dicts and tuples; null: there is none, and the careful way says so.
[[gnu::noinline, maybe_unused]] PyObject* nested_value(PyObject* value,
                                                       const std::vector<std::pair<const Node*, std::size_t>>& path) {
    for (const auto& [node, child] : path) {
        if (node->is_tuple) {
            if (!is_tuple_like(value, node->children.size())) return nullptr;
            value = PySequence_Fast_GET_ITEM(value, static_cast<Py_ssize_t>(child));
        } else {
            value = PyDict_Check(value) ? PyDict_GetItemWithError(value, node->children[child].key) : nullptr;
            if (!value) return nullptr;
        }
    }
    return value;
}

}  // namespace
