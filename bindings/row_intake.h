// The arguments of add(): how its values are accepted, for a writer into a table and for a packer that has none.
//
// add() is the one call whose cost in Python matters to the nanosecond. It is a plain C function (vector call, no
// tuple, no dict) that reads exact arrays and numbers itself (leaf_intake.h); other values are converted one by one
// (incoming.h, input_values.h), the rarest by `read_leaf`, a Python function. A call with a value that none of them
// accepts goes to `prepare`, which words the error. Nothing is taken before every value has been accepted.
//
// All of it is in the header, as templates over the taker: each of the two has its own copy, made for it.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "base/error.h"
#include "incoming.h"
#include "interpreter.h"
#include "leaf_intake.h"
#include "numpy_api.h"
#include "table/row_batch.h"
#include "tree.h"

using sharpwave::RowBatch;

// What a taker of rows knows of them. A taker adds:
//
//   table()                   where the rows go: capacity() and width()
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
    const auto& table = self.table();
    if (incoming.rows == 0 || incoming.rows > table.capacity() || (self.one_row && incoming.rows > 1)) return false;
    if (table.width() != 1 && incoming.rows % table.width() != 0) return false;
    if (incoming.lead == 2 && (!self.takes_steps || incoming.lead_shape[1] != static_cast<npy_intp>(table.width()))) {
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
