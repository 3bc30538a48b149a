#include "incoming.h"

#include <algorithm>
#include <cstring>

namespace {

// The value of a leaf by Python: an array in the field's dtype and shape, or in its own if no leading shape is told
// (and for a ragged leaf a pair). Null, without an error set: refused. The call then goes to prepare(), which says why.
PyObject* read_by_python(const Leaf& leaf, PyObject* value, PyObject* lead, Incoming& incoming) {
    const nb::object index = nb::steal(PyLong_FromSsize_t(&leaf - incoming.tree->leaves().data()));
    PyObject* args[] = {index.ptr(), value, lead};
    PyObject* read = index.is_valid() && lead ? PyObject_Vectorcall(incoming.read_leaf, args, 3, nullptr) : nullptr;
    if (read) return incoming.memory.keep(read);
    if (!PyErr_ExceptionMatches(PyExc_Exception)) throw nb::python_error();  // Ctrl-C
    PyErr_Clear();
    return nullptr;
}

nb::object lead_tuple(const Incoming& incoming) {
    nb::object tuple = nb::steal(PyTuple_New(incoming.lead));
    for (int i = 0; tuple.is_valid() && i < incoming.lead; ++i) {
        PyTuple_SET_ITEM(tuple.ptr(), i, PyLong_FromSsize_t(incoming.lead_shape[i]));
    }
    return tuple;
}

// An array of so many bytes, as read_leaf() promises.
const void* data_of(PyObject* object, std::uint64_t bytes) {
    auto* array = reinterpret_cast<PyArrayObject*>(object);
    if (!object || !PyArray_Check(object) || !PyArray_ISCARRAY_RO(array) ||
        static_cast<std::uint64_t>(PyArray_NBYTES(array)) != bytes) {
        throw nb::value_error("read_leaf() gave no array that fills its field");
    }
    return PyArray_DATA(array);
}

// The value of truncated=, mask= or priority=.
bool read_other(PyObject* value, Incoming& incoming, GivenArray& given) {
    incoming.hold();
    if (read_value(value, incoming.memory, given)) return true;
    // Any leaf's number would do: only the array of the value is asked for.
    PyObject* array = read_by_python(incoming.tree->leaves()[0], value, Py_None, incoming);
    return array && read_array(array, given);
}

}  // namespace

bool is_done(const PyArray_Descr* dtype, const std::byte* item, bool& done) {
    const auto size = static_cast<std::size_t>(PyDataType_ELSIZE(dtype));
    const auto real = [&](auto number) {
        std::memcpy(&number, item, sizeof number);
        done = number != 0;
        return number == number;
    };
    if (dtype->type_num == NPY_FLOAT) return real(float{});
    if (dtype->type_num == NPY_DOUBLE) return real(double{});
    done = std::any_of(item, item + size, [](std::byte part) { return part != std::byte{0}; });
    return PyTypeNum_ISBOOL(dtype->type_num) || PyTypeNum_ISINTEGER(dtype->type_num);
}

bool count_odd_rows(const Leaf& leaf, PyObject* value, Incoming& incoming) {
    if (leaf.is_ragged) return false;
    GivenArray& given = incoming.counted_given;
    if (!read_value(value, incoming.memory, given)) {
        PyObject* array = read_by_python(leaf, value, Py_None, incoming);
        if (!array || !read_array(array, given)) return false;
    }
    incoming.counted = value;
    incoming.lead = given.dimensions - static_cast<int>(leaf.shape.size());
    if (incoming.lead < 0 || incoming.lead > 2) return false;
    for (int i = 0; i < incoming.lead; ++i) {
        incoming.lead_shape[i] = given.shape[i];
        incoming.rows *= static_cast<std::size_t>(given.shape[i]);
    }
    return true;
}

bool accept_odd_ragged(const Leaf& leaf, PyObject* value, Incoming& incoming, FieldInput& input) {
    incoming.hold();
    const auto own = static_cast<int>(leaf.shape.size());
    GivenArray given;
    if (incoming.lead == 0 && read_value(value, incoming.memory, given)) {
        const bool is_empty = given.dimensions == 1 && given.shape[0] == 0;  // of items of any shape
        if (!is_empty && (given.dimensions != own || given.shape[0] > leaf.shape[0] ||
                          !std::equal(given.shape + 1, given.shape + own, leaf.shape.begin() + 1))) {
            return false;
        }
        const std::byte* data = convert(given, leaf.dtype, incoming.memory);
        if (data) {
            auto* starts = reinterpret_cast<std::uint64_t*>(incoming.memory.room(16));
            starts[0] = 0;
            starts[1] = given.items() * static_cast<std::uint64_t>(PyDataType_ELSIZE(leaf.dtype));
            input = {data, 0, 1, starts};
            return true;
        }
    }
    PyObject* pair = read_by_python(leaf, value, lead_tuple(incoming).ptr(), incoming);
    if (!pair) return false;
    const auto* starts = static_cast<const std::uint64_t*>(data_of(PyTuple_GetItem(pair, 1), (incoming.rows + 1) * 8));
    const void* values = data_of(PyTuple_GetItem(pair, 0), starts[incoming.rows]);
    input = {static_cast<const std::byte*>(values), 0, 1, starts};
    return true;
}

bool accept_odd_leaf(const Leaf& leaf, PyObject* value, Incoming& incoming, FieldInput& input) {
    GivenArray other;
    const bool is_counted = value == incoming.counted;
    GivenArray& given = is_counted ? incoming.counted_given : other;
    const std::byte* data = nullptr;
    if (is_counted || read_array(value, given) || read_number(value, incoming.memory, given) ||
        (incoming.hold(), read_value(value, incoming.memory, given))) {
        const auto own = static_cast<int>(leaf.shape.size());
        input.frames = 1;
        if (!given.has_shape(incoming.lead_shape, incoming.lead, leaf.shape.data(), own)) {
            if (leaf.stack == 1 ||
                !given.has_shape(incoming.lead_shape, incoming.lead, leaf.batch_shape.data(), own + 1)) {
                return false;
            }
            input.frames = leaf.stack;
        }
        data = convert(given, leaf.dtype, incoming.memory);
    }
    if (!data) {
        incoming.hold();
        PyObject* fitted = read_by_python(leaf, value, lead_tuple(incoming).ptr(), incoming);
        if (!fitted) return false;
        const int dimensions = PyArray_Check(fitted) ? PyArray_NDIM(reinterpret_cast<PyArrayObject*>(fitted)) : 0;
        input.frames = dimensions > incoming.lead + static_cast<int>(leaf.shape.size()) ? leaf.stack : 1;
        data = static_cast<const std::byte*>(data_of(fitted, incoming.rows * input.frames * leaf.frame_bytes));
    }
    input.flat = data + (input.frames - 1) * leaf.frame_bytes;
    input.stride = input.frames * leaf.frame_bytes;
    return true;
}

PyObject* read_mapping(PyObject* value, Incoming& incoming) {
    static PyObject* const mapping = nb::module_::import_("collections.abc").attr("Mapping").inc_ref().ptr();
    incoming.hold();
    nb::object items = nb::steal(PyDict_New());
    const int is_mapping = PyObject_IsInstance(value, mapping);
    if (is_mapping > 0 && items.is_valid() && PyDict_Update(items.ptr(), value) == 0) {
        return incoming.memory.keep(items.release().ptr());
    }
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) throw nb::python_error();  // Ctrl-C
    PyErr_Clear();
    return nullptr;
}

const float* accept_priorities(PyObject* value, Incoming& incoming) {
    GivenArray given;
    if (!read_array(value, given) && !read_number(value, incoming.memory, given) &&
        !read_other(value, incoming, given)) {
        return nullptr;
    }
    if (!given.has_shape(incoming.lead_shape, incoming.lead, nullptr, 0)) return nullptr;
    auto* to = reinterpret_cast<float*>(incoming.memory.room(incoming.rows * 4));
    return convert_priorities(given, to, incoming.memory) ? to : nullptr;
}

bool flag_rows(PyObject* value, std::uint8_t flag, bool when, Incoming& incoming, std::uint8_t* flags) {
    if (incoming.lead == 0 && PyBool_Check(value)) {
        if ((value == Py_True) == when) flags[0] |= flag;
        return true;
    }
    GivenArray given;
    if (!read_array(value, given) && !read_number(value, incoming.memory, given) &&
        !read_other(value, incoming, given)) {
        return false;
    }
    static PyArray_Descr* const truth = PyArray_DescrFromType(NPY_BOOL);
    if (!given.has_shape(incoming.lead_shape, incoming.lead, nullptr, 0)) return false;
    const auto* truths = reinterpret_cast<const std::uint8_t*>(convert(given, truth, incoming.memory));
    for (std::size_t i = 0; truths && i < incoming.rows; ++i) {
        if ((truths[i] != 0) == when) flags[i] |= flag;
    }
    return truths != nullptr;
}

namespace {

// What the agents of each row are, gathered leaf by leaf.
enum AgentState : std::uint8_t { kNotDone = 1, kGoesOn = 2, kTold = 4 };

// `told`: one truth value for each agent of the leaf, or null.
bool gather_states(const Leaf& leaf, const std::uint8_t* told, const Incoming& incoming, std::uint8_t* states) {
    const auto size = static_cast<std::size_t>(PyDataType_ELSIZE(leaf.dtype));
    const std::size_t agents = leaf.frame_bytes / size;
    const std::byte* item = incoming.fields[leaf.input].flat;
    for (std::size_t i = 0; i < incoming.rows * agents; ++i, item += size) {
        bool done = false;
        if (!is_done(leaf.dtype, item, done)) return false;
        const bool is_told = told && told[i];
        states[i / agents] |= (done ? 0 : kNotDone) | (done || is_told ? 0 : kGoesOn) | (is_told ? kTold : 0);
    }
    return true;
}

// `told`: the part of truncated= that belongs to the node; null where it was given by row, or not at all.
bool gather_node(const Node& node, PyObject* told, Incoming& incoming, std::uint8_t* states) {
    if (node.leaf >= 0) {
        static PyArray_Descr* const truth = PyArray_DescrFromType(NPY_BOOL);
        const Leaf& leaf = incoming.tree->leaves()[static_cast<std::size_t>(node.leaf)];
        const std::uint8_t* truths = nullptr;
        if (told) {
            GivenArray given;
            if (!read_array(told, given) && !read_number(told, incoming.memory, given) &&
                !read_other(told, incoming, given)) {
                return false;
            }
            const auto own = static_cast<int>(leaf.shape.size());
            if (!given.has_shape(incoming.lead_shape, incoming.lead, leaf.shape.data(), own)) return false;
            truths = reinterpret_cast<const std::uint8_t*>(convert(given, truth, incoming.memory));
            if (!truths) return false;
        }
        return gather_states(leaf, truths, incoming, states);
    }
    const std::size_t count = node.children.size();
    if (told && (node.is_tuple ? static_cast<std::size_t>(PyTuple_GET_SIZE(told)) != count
                               : static_cast<std::size_t>(PyDict_GET_SIZE(told)) != count)) {
        return false;
    }
    for (std::size_t i = 0; i < count; ++i) {
        const Node& child = node.children[i];
        PyObject* part = nullptr;
        if (told) {
            part = node.is_tuple ? PyTuple_GET_ITEM(told, static_cast<Py_ssize_t>(i))
                                 : PyDict_GetItemWithError(told, child.key);
            if (!part || (child.leaf < 0 && !(child.is_tuple ? PyTuple_CheckExact(part) : PyDict_CheckExact(part))))
                return false;
        }
        const nb::object held = nb::borrow(part);  // Python code that another one runs may drop it
        if (!gather_node(child, part, incoming, states)) return false;
    }
    return true;
}

// Whether truncated= has one truth value for each agent.
bool is_told_by_agent(const Node& done, PyObject* value, Incoming& incoming) {
    if (done.leaf < 0) return done.is_tuple ? PyTuple_CheckExact(value) : PyDict_CheckExact(value);
    GivenArray given;
    if (!read_array(value, given) && !read_other(value, incoming, given)) return false;
    return given.dimensions > incoming.lead;
}

}  // namespace

bool flag_agents(Incoming& incoming, std::uint8_t* flags) {
    const Node& done = *incoming.tree->done_node();
    PyObject* told = incoming.truncated == Py_None ? nullptr : incoming.truncated;
    if (told && !is_told_by_agent(done, told, incoming)) {
        if (!flag_rows(told, sharpwave::kRowTruncated, true, incoming, flags)) return false;
        told = nullptr;
    }
    std::uint8_t few[64] = {};
    std::vector<std::uint8_t> many;
    std::uint8_t* states = few;
    if (incoming.rows > sizeof few) states = (many.resize(incoming.rows), many.data());
    if (!gather_node(done, told, incoming, states)) return false;
    for (std::size_t i = 0; i < incoming.rows; ++i) {
        if (!(states[i] & kNotDone)) flags[i] |= sharpwave::kRowTerminated;
        if (states[i] & kTold) flags[i] |= states[i] & kGoesOn ? sharpwave::kRowCut : sharpwave::kRowTruncated;
    }
    return true;
}
