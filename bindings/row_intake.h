// The arguments of add(): how its values are accepted, for a writer into a table and for a packer that has none.
//
// add() is the one call whose cost in Python matters to the nanosecond. It is a plain C function (vector call, no
// tuple, no dict) that reads exact arrays and numbers itself; other values are converted one by one (incoming.h,
// input_values.h), the rarest by `read_leaf`, a Python function. A call with a value that none of them accepts goes to
// `prepare`, which words the error. Nothing is taken before every value has been accepted.
//
// All of it is in the header, as templates over the taker: each of the two has its own copy, made for it.
#pragma once

#include <cmath>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "base/error.h"
#include "incoming.h"
#include "interpreter.h"
#include "numpy_api.h"
#include "table/row_batch.h"
#include "tree.h"

using sharpwave::RowBatch;

// What a taker of rows knows of them. A taker adds:
//
//   capacity(), width()       of the table that the rows go to
//   check_open()              throws where no rows can be taken any more; values may run Python code
//   Result                    what its add() returns: is_wanted says whether return_indices=True was given
//   take<Tells>(batch, incoming, result)     the rows of add_at_once()
//   take_with_care(batch, timeout, result)   those of add_with_care()
struct RowIntake {
    RowIntake(std::shared_ptr<Tree> of, nb::object prepare_function, nb::object read_leaf_function,
              bool takes_steps_axis, bool takes_one_row)
        : tree(std::move(of)),
          prepare(std::move(prepare_function)),
          read_leaf(std::move(read_leaf_function)),
          takes_steps(takes_steps_axis),
          one_row(takes_one_row) {
        const std::vector<Node>& top = tree->top();
        while (counted < top.size() && !find_leaf(top[counted], tree->rows_from(), counted_path)) ++counted;
        is_nested = !counted_path.empty();
    }
    RowIntake(const RowIntake&) = delete;
    RowIntake& operator=(const RowIntake&) = delete;

    std::shared_ptr<Tree> tree;
    nb::object prepare;
    nb::object read_leaf;
    bool takes_steps;  // num_envs was given: rows may come as (steps, num_envs)
    bool one_row;      // it was not, and rows depend on their order: several at once are a mistake
    bool is_nested = false;
    std::size_t counted = 0;                                        // which value tells the number of rows ...
    std::vector<std::pair<const Node*, std::size_t>> counted_path;  // ... and where in it, from the outside in

    // Appends the nested nodes down to the leaf, each with the number of its child; false: it is elsewhere.
    static bool find_leaf(const Node& node, int leaf, std::vector<std::pair<const Node*, std::size_t>>& path) {
        if (node.leaf >= 0) return node.leaf == leaf;
        for (std::size_t i = 0; i < node.children.size(); ++i) {
            path.emplace_back(&node, i);
            if (find_leaf(node.children[i], leaf, path)) return true;
            path.pop_back();
        }
        return false;
    }
};

namespace {

struct Keywords {
    PyObject* terminated = PyUnicode_InternFromString("terminated");
    PyObject* done = PyUnicode_InternFromString("done");
    PyObject* truncated = PyUnicode_InternFromString("truncated");
    PyObject* mask = PyUnicode_InternFromString("mask");
    PyObject* priority = PyUnicode_InternFromString("priority");
    PyObject* timeout = PyUnicode_InternFromString("timeout");
    PyObject* return_indices = PyUnicode_InternFromString("return_indices");
};

inline const Keywords& keywords() {
    static const Keywords* instance = new Keywords;
    return *instance;
}

// Here and below `Tells` is for a call that has return_indices=: the others do not look for it.
template <bool Tells, class IsSame>
PyObject** place_of(const Tree& tree, PyObject* name, Incoming& incoming, IsSame is_same) {
    const Keywords& words = keywords();
    if (is_same(name, words.truncated)) return &incoming.truncated;
    if (is_same(name, words.mask)) return &incoming.mask;
    if (tree.has_weights() && is_same(name, words.priority)) return &incoming.priority;
    if (is_same(name, words.timeout)) return &incoming.timeout;
    if (tree.done_node() && is_same(name, words.terminated)) name = words.done;
    const std::vector<Node>& top = tree.top();
    for (std::size_t i = 0; i < top.size(); ++i) {
        if (is_same(top[i].key, name)) return &incoming.sorted[i];
    }
    if (Tells && is_same(name, words.return_indices)) return &incoming.return_indices;
    return nullptr;
}

template <bool Tells>
bool match_arguments(const Tree& tree, PyObject* const* args, std::size_t positional, PyObject* names,
                     Incoming& incoming) {
    const std::vector<Node>& top = tree.top();
    if (positional > top.size() || top.size() > Incoming::kMaxFields) return false;
    const std::size_t named = names ? static_cast<std::size_t>(PyTuple_GET_SIZE(names)) : 0;
    if (positional == top.size() && named == 0) {
        incoming.values = args;
        return true;
    }
    incoming.values = incoming.sorted;
    for (std::size_t i = 0; i < top.size(); ++i) incoming.sorted[i] = i < positional ? args[i] : nullptr;
    for (std::size_t k = 0; k < named; ++k) {
        PyObject* name = PyTuple_GET_ITEM(names, static_cast<Py_ssize_t>(k));
        PyObject* value = args[positional + k];
        PyObject** place = nullptr;
        // Names in code are interned, and mostly stand in the schema's order: one comparison of pointers.
        const std::size_t guess = positional + k;
        if (guess < top.size() && top[guess].key == name) {
            place = &incoming.sorted[guess];
        } else {
            place = place_of<Tells>(tree, name, incoming, [](PyObject* a, PyObject* b) { return a == b; });
            if (!place) [[unlikely]] {  // a name that was put together when the program ran
                if (!Tells && name == keywords().return_indices) return false;
                place = place_of<Tells>(tree, name, incoming,
                                        [](PyObject* a, PyObject* b) { return PyUnicode_Compare(a, b) == 0; });
            }
        }
        if (!place || *place) return false;
        *place = value;
    }
    for (std::size_t i = 0; i < top.size(); ++i) {
        if (!incoming.sorted[i]) return false;
    }
    return true;
}

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
[[gnu::noinline]] PyObject* nested_value(PyObject* value,
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

// Returns false when the careful way must look at the call. The writer gives no `result` unless `Tells`.
template <bool Tells, class Taker>
bool add_at_once(Taker& self, PyObject* const* args, std::size_t positional, PyObject* names,
                 typename Taker::Result* result) {
    const Tree& tree = *self.tree;
    if (tree.leaves().size() > Incoming::kMaxFields) return false;
    Incoming incoming(tree, self.read_leaf.ptr());
    if (Tells) incoming.return_indices = nullptr;
    if (!match_arguments<Tells>(tree, args, positional, names, incoming)) return false;

    const std::vector<Node>& top = tree.top();
    const Leaf& counted = tree.leaves()[static_cast<std::size_t>(tree.rows_from())];
    if (self.counted < top.size()) {
        PyObject* value = incoming.values[self.counted];
        if (self.is_nested) [[unlikely]]
            value = nested_value(value, self.counted_path);
        if (!value || !count_rows(counted, value, incoming)) return false;
    }
    if (incoming.rows == 0 || incoming.rows > self.capacity() || (self.one_row && incoming.rows > 1)) return false;
    if (self.width() != 1 && incoming.rows % self.width() != 0) return false;
    if (incoming.lead == 2 && (!self.takes_steps || incoming.lead_shape[1] != static_cast<npy_intp>(self.width()))) {
        return false;
    }
    for (std::size_t i = 0; i < top.size(); ++i) {
        if (!accept_node(tree, top[i], incoming.values[i], incoming)) return false;
    }

    std::uint8_t few[64] = {};
    std::vector<std::uint8_t> many;
    std::uint8_t* flags = few;
    if (incoming.rows > sizeof few) flags = (many.resize(incoming.rows), many.data());
    if (tree.done() >= 0) {
        const auto done = static_cast<std::size_t>(tree.done());
        if (!flag_terminated(tree.leaves()[done], incoming.fields[tree.leaves()[done].input].flat, incoming.rows,
                             flags))
            return false;
    } else if (tree.is_by_agent()) {
        if (!flag_agents(incoming, flags)) return false;
        incoming.truncated = nullptr;  // has been read
    }
    if (incoming.truncated && incoming.truncated != Py_None &&
        !flag_rows(incoming.truncated, sharpwave::kRowTruncated, true, incoming, flags)) {
        return false;
    }
    if (incoming.mask && incoming.mask != Py_None &&
        !flag_rows(incoming.mask, sharpwave::kRowVoid, false, incoming, flags)) {
        return false;
    }
    const float* priorities = nullptr;
    if (incoming.priority && incoming.priority != Py_None) {
        priorities = accept_priorities(incoming.priority, incoming);
        if (!priorities) return false;
    }
    // Mostly nothing ends: say so once, and the writer looks at no row's flags.
    std::uint8_t any = 0;
    for (std::size_t i = 0; i < incoming.rows; ++i) any |= flags[i];
    self.check_open();
    const RowBatch batch{incoming.fields, incoming.rows, any ? flags : nullptr, incoming.next, priorities};
    self.template take<Tells>(batch, incoming, result);
    return true;
}

// prepare(args, kwargs) -> (arrays, rows, flags, priorities): what src/sharpwave/arrays.py says.
template <class Taker>
void add_with_care(Taker& self, PyObject* const* args, std::size_t positional, PyObject* names,
                   typename Taker::Result& result) {
    nb::object tuple = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(positional)));
    for (std::size_t i = 0; i < positional; ++i) {
        PyTuple_SET_ITEM(tuple.ptr(), static_cast<Py_ssize_t>(i), Py_NewRef(args[i]));
    }
    nb::dict named;
    PyObject* timeout = nullptr;
    for (Py_ssize_t k = 0; names && k < PyTuple_GET_SIZE(names); ++k) {
        if (PyUnicode_Compare(PyTuple_GET_ITEM(names, k), keywords().timeout) == 0) {
            timeout = args[positional + static_cast<std::size_t>(k)];
            continue;
        }
        if (result.is_wanted && PyUnicode_Compare(PyTuple_GET_ITEM(names, k), keywords().return_indices) == 0) continue;
        if (PyDict_SetItem(named.ptr(), PyTuple_GET_ITEM(names, k), args[positional + static_cast<std::size_t>(k)])) {
            throw nb::python_error();
        }
    }
    const nb::tuple ready = outlast([&] { return nb::cast<nb::tuple>(self.prepare(tuple, named)); });
    const nb::list arrays = nb::cast<nb::list>(ready[0]);
    const auto rows = nb::cast<std::size_t>(ready[1]);
    const nb::object flags = ready[2], priorities = ready[3];
    std::vector<FieldInput> fields(self.tree->leaves().size()), next(self.tree->leaves().size());
    const auto bytes_of = [](nb::handle object) -> std::uint64_t {
        auto* array = reinterpret_cast<PyArrayObject*>(object.ptr());
        if (!PyArray_Check(object.ptr()) || !PyArray_ISCARRAY_RO(array))
            throw nb::value_error("prepare() gave no array");
        return static_cast<std::uint64_t>(PyArray_NBYTES(array));
    };
    const auto data_of = [](nb::handle object) { return PyArray_DATA(reinterpret_cast<PyArrayObject*>(object.ptr())); };
    for (std::size_t i = 0; i < self.tree->leaves().size(); ++i) {
        const Leaf& leaf = self.tree->leaves()[i];
        FieldInput& input = leaf.is_next() ? next[leaf.input] : fields[leaf.input];
        nb::object value = arrays[i];
        if (leaf.is_ragged) {
            const nb::object starts = value[1];
            value = value[0];
            if (bytes_of(starts) != (rows + 1) * 8) throw nb::value_error("prepare() gave no starts");
            input = {static_cast<const std::byte*>(data_of(value)), 0, 1,
                     static_cast<const std::uint64_t*>(data_of(starts))};
            if (bytes_of(value) != input.starts[rows]) throw nb::value_error("prepare() gave an array of another size");
            continue;
        }
        const std::uint64_t bytes = bytes_of(value);
        const std::uint32_t frames = leaf.stack > 1 && bytes == rows * leaf.bytes ? leaf.stack : 1;
        if (bytes != rows * leaf.frame_bytes * frames) {
            throw nb::value_error("prepare() returned an array that does not fill its field");
        }
        input = {static_cast<const std::byte*>(data_of(value)) + (frames - 1) * leaf.frame_bytes,
                 frames * leaf.frame_bytes, frames, nullptr};
    }
    const float* given = nullptr;
    if (!priorities.is_none()) {
        if (bytes_of(priorities) != rows * 4) throw nb::value_error("prepare() returned priorities of another size");
        given = static_cast<const float*>(data_of(priorities));
    }
    if (bytes_of(flags) != rows) throw nb::value_error("prepare() returned flags of another size");
    self.take_with_care({fields.data(), rows, static_cast<const std::uint8_t*>(data_of(flags)), next.data(), given},
                        timeout, result);
}

// A call that is not the usual one: with return_indices=, or with values that must be looked at with care.
template <class Taker>
PyObject* add_otherwise(Taker& self, PyObject* const* args, std::size_t positional, PyObject* names) {
    typename Taker::Result result;
    for (Py_ssize_t k = 0; names && k < PyTuple_GET_SIZE(names); ++k) {
        if (PyUnicode_Compare(PyTuple_GET_ITEM(names, k), keywords().return_indices) != 0) continue;
        PyObject* value = args[positional + static_cast<std::size_t>(k)];
        result.is_wanted = value == Py_True;
        // What is no truth value is left to prepare(), which has the words for it.
        if (PyBool_Check(value) && add_at_once<true>(self, args, positional, names, &result)) return result.release();
    }
    add_with_care(self, args, positional, names, result);
    return result.release();
}

}  // namespace
