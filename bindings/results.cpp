#include "results.h"

#include <algorithm>
#include <iterator>
#include <new>
#include <string>
#include <type_traits>

#include "base/block_pool.h"
#include "errors.h"
#include "input_values.h"

namespace {

// Arrays below this come from NumPy's own allocator, which is as fast for them.
constexpr std::size_t kPooledFrom = 16 << 10;
// And array objects below this are given out again themselves.
constexpr std::size_t kSameArrayBelow = 64 << 10;

// Views and torch tensors keep an array's base alive, so its memory comes back only when the last of them is gone.
void give_back(PyObject* capsule) {
    const auto bytes = reinterpret_cast<std::size_t>(PyCapsule_GetContext(capsule));
    sharpwave::give_block(PyCapsule_GetPointer(capsule, nullptr), bytes);
}

PyArrayObject* new_array(PyArray_Descr* dtype, int dimensions, const npy_intp* shape, std::size_t bytes) {
    Py_INCREF(dtype);
    if (bytes < kPooledFrom) {
        PyObject* array = PyArray_NewFromDescr(&PyArray_Type, dtype, dimensions, shape, nullptr, nullptr, 0, nullptr);
        if (!array) throw nb::python_error();
        return reinterpret_cast<PyArrayObject*>(array);
    }
    void* memory = sharpwave::take_block(bytes);
    if (!memory) {
        Py_DECREF(dtype);
        PyErr_NoMemory();
        throw nb::python_error();
    }
    PyObject* array =
        PyArray_NewFromDescr(&PyArray_Type, dtype, dimensions, shape, nullptr, memory, NPY_ARRAY_CARRAY, nullptr);
    PyObject* base = array ? PyCapsule_New(memory, nullptr, give_back) : nullptr;
    if (!base) {
        Py_XDECREF(array);
        sharpwave::give_block(memory, bytes);
        throw nb::python_error();
    }
    PyCapsule_SetContext(base, reinterpret_cast<void*>(bytes));
    PyArray_SetBaseObject(reinterpret_cast<PyArrayObject*>(array), base);
    return reinterpret_cast<PyArrayObject*>(array);
}

PyArrayObject* last_or_new(LastArrays* last, std::size_t place, PyArray_Descr* dtype, int dimensions,
                           const npy_intp* shape, std::size_t bytes) {
    const bool is_small = last && bytes < kSameArrayBelow;
    if (is_small) {
        if (PyObject* array = last->take(place, dtype, dimensions, shape)) {
            return reinterpret_cast<PyArrayObject*>(array);
        }
    }
    PyArrayObject* array = new_array(dtype, dimensions, shape, bytes);
    if (is_small) last->keep(place, reinterpret_cast<PyObject*>(array));
    return array;
}

struct Names {
    PyObject* indices = PyUnicode_InternFromString("indices");
    PyObject* truncated = PyUnicode_InternFromString("truncated");
    PyObject* discount = PyUnicode_InternFromString("discount");
    PyObject* weights = PyUnicode_InternFromString("weights");
    PyObject* probabilities = PyUnicode_InternFromString("probabilities");
    PyObject* lengths = PyUnicode_InternFromString("lengths");
    PyObject* relabelled = PyUnicode_InternFromString("relabelled");
    PyObject* valid = PyUnicode_InternFromString("valid");
    PyObject* mask = PyUnicode_InternFromString("mask");
    PyObject* first = PyUnicode_InternFromString("first");
    PyObject* place_indices = PyUnicode_InternFromString("place_indices");
    PyArray_Descr* int64 = PyArray_DescrFromType(NPY_INT64);
    PyArray_Descr* float32 = PyArray_DescrFromType(NPY_FLOAT);
    PyArray_Descr* float64 = PyArray_DescrFromType(NPY_DOUBLE);
    PyArray_Descr* boolean = PyArray_DescrFromType(NPY_BOOL);
};

const Names& names() {
    static const Names* instance = new Names;
    return *instance;
}

// `window`: rows of an example, 0 where it has no axis for them.
nb::object new_leaf(const Leaf& leaf, npy_intp rows, npy_intp window, Batch& batch, std::size_t index,
                    LastArrays* last) {
    npy_intp shape[11] = {rows};  // a field has at most 8 dimensions, and a stack
    int at = 1;
    if (window) shape[at++] = window;
    for (npy_intp extent : leaf.batch_shape) shape[at++] = extent;
    PyArrayObject* array = last_or_new(last, index, leaf.dtype, at, shape,
                                       leaf.bytes * static_cast<std::size_t>(rows * std::max<npy_intp>(window, 1)));
    batch.flats[index] = static_cast<std::byte*>(PyArray_DATA(array));
    batch.lengths[index] = nullptr;
    batch.arrays[index] = reinterpret_cast<PyObject*>(array);
    return nb::steal(reinterpret_cast<PyObject*>(array));
}

nb::object new_node(const Tree& tree, const Node& node, npy_intp rows, npy_intp window, Batch& batch,
                    LastArrays* last) {
    if (node.leaf >= 0) {
        const auto index = static_cast<std::size_t>(node.leaf);
        return new_leaf(tree.leaves()[index], rows, window, batch, index, last);
    }
    if (node.is_tuple) {
        nb::object result = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(node.children.size())));
        for (std::size_t i = 0; i < node.children.size(); ++i) {
            PyTuple_SET_ITEM(result.ptr(), static_cast<Py_ssize_t>(i),
                             new_node(tree, node.children[i], rows, window, batch, last).release().ptr());
        }
        return result;
    }
    nb::dict result;
    for (const Node& child : node.children) {
        if (PyDict_SetItem(result.ptr(), child.key, new_node(tree, child, rows, window, batch, last).ptr()) != 0) {
            throw nb::python_error();
        }
    }
    return result;
}

std::string text_of(nb::handle object) { return nb::steal<nb::str>(PyObject_Str(object.ptr())).c_str(); }

[[noreturn]] void refuse(const std::string& where, const std::string& expected, nb::handle got) {
    std::string what = Py_TYPE(got.ptr())->tp_name;
    if (PyArray_Check(got.ptr())) {
        what = text_of(nb::object(got.attr("dtype"))) + " array of shape " + text_of(nb::object(got.attr("shape")));
        if (!PyArray_IS_C_CONTIGUOUS(reinterpret_cast<PyArrayObject*>(got.ptr()))) what += ", not C-contiguous";
        if (!PyArray_ISWRITEABLE(reinterpret_cast<PyArrayObject*>(got.ptr()))) what += ", read-only";
    }
    throw sharpwave::Error(sharpwave::ErrorKind::schema, "sample(): out" + where + ": expected " + expected + ", got " +
                                                             what + "; pass a batch of the same size");
}

// The shape of a leaf in a batch, without the axis of examples.
std::vector<npy_intp> shape_of(const Tree& tree, const Leaf& leaf) {
    std::vector<npy_intp> shape = leaf.batch_shape;
    if (tree.window()) shape.insert(shape.begin(), tree.window());
    return shape;
}

std::byte* check_array(const std::string& where, PyArray_Descr* dtype, const std::vector<npy_intp>& shape,
                       npy_intp rows, nb::handle value) {
    auto* array = reinterpret_cast<PyArrayObject*>(value.ptr());
    bool fits = PyArray_Check(value.ptr()) && PyArray_ISCARRAY(array) &&
                PyArray_NDIM(array) == static_cast<int>(shape.size()) + 1 && PyArray_DIM(array, 0) == rows &&
                std::equal(shape.begin(), shape.end(), PyArray_DIMS(array) + 1);
    if (fits && PyArray_DESCR(array) != dtype) fits = PyArray_EquivTypes(PyArray_DESCR(array), dtype);
    if (!fits) {
        std::string expected = text_of(reinterpret_cast<PyObject*>(dtype)) + " array of shape (" + std::to_string(rows);
        for (npy_intp extent : shape) expected += ", " + std::to_string(extent);
        refuse(where, expected + (shape.empty() ? ",)" : ")"), value);
    }
    return static_cast<std::byte*>(PyArray_DATA(array));
}

// The same without a word: what every call but a mistaken one takes.
bool fits_at_once(PyArray_Descr* dtype, const std::vector<npy_intp>& shape, npy_intp rows, PyObject* value) {
    if (!value || !PyArray_Check(value)) return false;
    auto* array = reinterpret_cast<PyArrayObject*>(value);
    return PyArray_DESCR(array) == dtype && PyArray_ISCARRAY(array) &&
           PyArray_NDIM(array) == static_cast<int>(shape.size()) + 1 && PyArray_DIM(array, 0) == rows &&
           std::equal(shape.begin(), shape.end(), PyArray_DIMS(array) + 1);
}

void check_node(const Tree& tree, const Node& node, npy_intp rows, nb::handle value, const std::string& where,
                Batch& batch) {
    if (node.leaf >= 0) {
        const auto index = static_cast<std::size_t>(node.leaf);
        const Leaf& leaf = tree.leaves()[index];
        batch.flats[index] = check_array(where, leaf.dtype, shape_of(tree, leaf), rows, value);
        batch.lengths[index] = nullptr;
        batch.arrays[index] = value.ptr();
        return;
    }
    if (node.is_tuple ? !PyTuple_Check(value.ptr()) : !PyDict_Check(value.ptr())) {
        refuse(where, node.is_tuple ? "a tuple" : "a dict", value);
    }
    for (std::size_t i = 0; i < node.children.size(); ++i) {
        const Node& child = node.children[i];
        PyObject* item = nullptr;
        if (!node.is_tuple) {
            item = PyDict_GetItemWithError(value.ptr(), child.key);
        } else if (i < static_cast<std::size_t>(PyTuple_GET_SIZE(value.ptr()))) {
            item = PyTuple_GET_ITEM(value.ptr(), static_cast<Py_ssize_t>(i));
        }
        check_node(tree, child, rows, item ? item : Py_None, where + "['" + text_of(child.key) + "']", batch);
    }
}

struct Span {
    std::byte* start;
    std::size_t bytes;
};

bool have_overlap(Few<Span>& spans, std::size_t count) {
    for (std::size_t a = 1; a < count; ++a) {
        for (std::size_t b = 0; b < a; ++b) {
            if (spans[a].start < spans[b].start + spans[b].bytes && spans[b].start < spans[a].start + spans[a].bytes) {
                return true;
            }
        }
    }
    return false;
}

void refuse_overlap(Batch& batch) {
    Few<Span> spans(batch.array_count);
    for (std::size_t i = 0; i < batch.array_count; ++i) {
        auto* array = reinterpret_cast<PyArrayObject*>(batch.arrays[i]);
        spans[i] = {static_cast<std::byte*>(PyArray_DATA(array)), static_cast<std::size_t>(PyArray_NBYTES(array))};
    }
    if (have_overlap(spans, batch.array_count)) {
        throw sharpwave::Error(sharpwave::ErrorKind::schema,
                               "sample(): out: two of its arrays share memory; give each its own");
    }
}

// The memory of an array or a tensor that has this dtype and shape, and may be written to; null otherwise.
std::byte* lend(PyArray_Descr* dtype, npy_intp rows, npy_intp window, const std::vector<npy_intp>& shape,
                PyObject* value) {
    static PyObject* const requires_grad = PyUnicode_InternFromString("requires_grad");
    GivenArray given;
    if (!value) return nullptr;
    if (PyArray_Check(value)) {
        if (!read_array(value, given) || !PyArray_ISWRITEABLE(reinterpret_cast<PyArrayObject*>(value))) return nullptr;
    } else {
        if (!read_tensor(value, given)) return nullptr;
        const nb::object has_graph = nb::steal(PyObject_GetAttr(value, requires_grad));
        if (has_graph.ptr() != Py_False) {
            PyErr_Clear();
            return nullptr;
        }
    }
    const npy_intp lead[2] = {rows, window};
    if (given.type != dtype->type_num || !given.is_plain ||
        !given.has_shape(lead, window ? 2 : 1, shape.data(), static_cast<int>(shape.size()))) {
        return nullptr;
    }
    return reinterpret_cast<std::byte*>(const_cast<char*>(given.data));
}

bool lend_node(const Tree& tree, const Node& node, npy_intp rows, PyObject* value, Batch& batch, Few<Span>& spans) {
    if (node.leaf >= 0) {
        const auto index = static_cast<std::size_t>(node.leaf);
        const Leaf& leaf = tree.leaves()[index];
        batch.flats[index] = lend(leaf.dtype, rows, tree.window(), leaf.batch_shape, value);
        batch.lengths[index] = nullptr;
        batch.arrays[index] = value;
        const auto examples = static_cast<std::size_t>(rows * std::max<npy_intp>(tree.window(), 1));
        spans[index] = {batch.flats[index], examples * leaf.bytes};
        return batch.flats[index] != nullptr && !leaf.is_ragged;
    }
    if (!value || !(node.is_tuple ? PyTuple_CheckExact(value) : PyDict_CheckExact(value))) return false;
    if (node.is_tuple && static_cast<std::size_t>(PyTuple_GET_SIZE(value)) != node.children.size()) return false;
    for (std::size_t i = 0; i < node.children.size(); ++i) {
        PyObject* item = node.is_tuple ? PyTuple_GET_ITEM(value, static_cast<Py_ssize_t>(i))
                                       : PyDict_GetItemWithError(value, node.children[i].key);
        if (!lend_node(tree, node.children[i], rows, item, batch, spans)) return false;
    }
    return true;
}

const std::vector<npy_intp> kNoAxes;

// The arrays that sampling adds to a batch, in the order of its keys: each(name, dtype, the axes after that of
// examples) gives their data.
template <class Each>
void over_extras(const Tree& tree, Batch& batch, bool is_read_back, Each each) {
    const Names& n = names();
    const auto at = [&](PyObject* name, PyArray_Descr* dtype, auto*& data,
                        const std::vector<npy_intp>& axes = kNoAxes) {
        data = static_cast<std::remove_reference_t<decltype(data)>>(each(name, dtype, axes));
    };
    if (is_read_back) {
        at(n.truncated, n.boolean, batch.truncated);
    } else {
        const std::vector<npy_intp>& window = tree.window_shape();
        if (tree.has_truncated()) at(n.truncated, n.boolean, batch.truncated, window);
        if (tree.has_discount()) at(n.discount, n.float32, batch.discounts, tree.discount_shape());
        if (tree.has_weights()) {
            at(n.weights, n.float32, batch.weights);
            at(n.probabilities, n.float64, batch.probabilities);
        }
        if (tree.has_relabelled()) at(n.relabelled, n.boolean, batch.relabelled);
        if (tree.window()) {
            at(n.valid, n.boolean, batch.masks.valid, window);
            at(n.mask, n.boolean, batch.masks.learn, window);
            at(n.first, n.boolean, batch.masks.first, window);
            if (tree.has_place_indices()) at(n.place_indices, n.int64, batch.masks.serials, window);
        }
    }
    at(n.indices, n.int64, batch.indices);
}

}  // namespace

LastArrays::~LastArrays() {
    for (Pair& pair : pairs_) {
        for (PyObject* array : pair.arrays) Py_XDECREF(array);
    }
}

PyObject* LastArrays::take(std::size_t place, PyArray_Descr* dtype, int dimensions, const npy_intp* shape) {
    if (place >= pairs_.size()) return nullptr;
    for (PyObject* object : pairs_[place].arrays) {
        // One reference is ours. Views, tensors and exported buffers hold another; so does a caller that kept the
        // array.
        if (!object || Py_REFCNT(object) != 1) continue;
        auto* array = reinterpret_cast<PyArrayObject*>(object);
        // Its last holder may have reshaped it or made it read-only.
        if (PyArray_DESCR(array) == dtype && PyArray_NDIM(array) == dimensions && PyArray_ISCARRAY(array) &&
            std::equal(shape, shape + dimensions, PyArray_DIMS(array))) {
            return Py_NewRef(object);
        }
    }
    return nullptr;
}

void LastArrays::keep(std::size_t place, PyObject* array) {
    if (place >= pairs_.size()) pairs_.resize(place + 1);
    Pair& pair = pairs_[place];
    PyObject* old = pair.arrays[pair.oldest];
    pair.arrays[pair.oldest] = Py_NewRef(array);
    pair.oldest ^= 1;
    Py_XDECREF(old);  // last: it may run code
}

nb::object pooled_array(PyArray_Descr* dtype, int dimensions, const npy_intp* shape) {
    auto bytes = static_cast<std::size_t>(PyDataType_ELSIZE(dtype));
    for (int i = 0; i < dimensions; ++i) bytes *= static_cast<std::size_t>(shape[i]);
    return nb::steal(reinterpret_cast<PyObject*>(new_array(dtype, dimensions, shape, bytes)));
}

std::size_t pooled_bytes() { return sharpwave::pooled_block_bytes(); }

Batch new_batch(const Tree& tree, npy_intp rows, LastArrays* last, bool is_read_back) {
    Batch batch(tree.leaves().size());
    // A copy of a dict with the same keys: its table has the right size at once.
    nb::object dict = nb::steal(is_read_back ? PyDict_New() : PyDict_Copy(tree.batch_template()));
    if (!dict.is_valid()) throw nb::python_error();
    const auto put = [&](PyObject* name, const nb::object& value) {
        if (PyDict_SetItem(dict.ptr(), name, value.ptr()) != 0) throw nb::python_error();
    };
    const npy_intp window = is_read_back ? 0 : tree.window();
    for (const Node& node : tree.top()) put(node.key, new_node(tree, node, rows, window, batch, last));
    batch.array_count = tree.leaves().size();
    over_extras(tree, batch, is_read_back, [&](PyObject* name, PyArray_Descr* dtype, const auto& axes) {
        npy_intp shape[9] = {rows}, bytes = rows * PyDataType_ELSIZE(dtype);
        for (std::size_t i = 0; i < axes.size(); ++i) bytes *= shape[i + 1] = axes[i];
        PyArrayObject* array = last_or_new(last, batch.array_count, dtype, static_cast<int>(axes.size()) + 1, shape,
                                           static_cast<std::size_t>(bytes));
        put(name, nb::steal(reinterpret_cast<PyObject*>(array)));
        batch.arrays[batch.array_count++] = reinterpret_cast<PyObject*>(array);
        return PyArray_DATA(array);
    });
    if (tree.has_ragged()) {
        nb::list lengths;
        batch.is_ragged = true;
        for (std::size_t i = 0; i < tree.leaves().size(); ++i) {
            if (!tree.leaves()[i].is_ragged) continue;
            const npy_intp count = rows * std::max<npy_intp>(window, 1);
            PyArrayObject* array = new_array(names().int64, 1, &count, static_cast<std::size_t>(count) * 8);
            batch.lengths[i] = static_cast<std::int64_t*>(PyArray_DATA(array));
            lengths.append(nb::steal(reinterpret_cast<PyObject*>(array)));
        }
        put(names().lengths, lengths);
    }
    batch.dict = std::move(dict);
    return batch;
}

Batch check_out(const Tree& tree, npy_intp rows, nb::handle out) {
    if (!PyDict_Check(out.ptr())) refuse("", "a dict of arrays, as sample() gives", out);
    Batch batch(tree.leaves().size());
    for (const Node& node : tree.top()) {
        PyObject* value = PyDict_GetItemWithError(out.ptr(), node.key);
        if (node.leaf >= 0) {
            const auto index = static_cast<std::size_t>(node.leaf);
            const Leaf& leaf = tree.leaves()[index];
            if (!tree.window() && fits_at_once(leaf.dtype, leaf.batch_shape, rows, value)) {
                batch.flats[index] = static_cast<std::byte*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(value)));
                batch.lengths[index] = nullptr;
                batch.arrays[index] = value;
                continue;
            }
        }
        check_node(tree, node, rows, value ? value : Py_None, "['" + text_of(node.key) + "']", batch);
    }
    batch.array_count = tree.leaves().size();
    over_extras(tree, batch, false, [&](PyObject* name, PyArray_Descr* dtype, const auto& axes) {
        PyObject* value = PyDict_GetItemWithError(out.ptr(), name);
        if (!fits_at_once(dtype, axes, rows, value))
            check_array("['" + text_of(name) + "']", dtype, axes, rows, value ? value : Py_None);
        batch.arrays[batch.array_count++] = value;
        return PyArray_DATA(reinterpret_cast<PyArrayObject*>(value));
    });
    refuse_overlap(batch);
    batch.dict = nb::borrow(out);
    return batch;
}

bool lend_out(const Tree& tree, npy_intp rows, nb::handle out, Batch& batch) {
    if (!PyDict_Check(out.ptr())) return false;
    Few<Span> spans(tree.leaves().size() + Batch::kExtras);
    for (const Node& node : tree.top()) {
        PyObject* value = PyDict_GetItemWithError(out.ptr(), node.key);
        if (!lend_node(tree, node, rows, value, batch, spans)) return false;
    }
    batch.array_count = tree.leaves().size();
    bool is_lent = true;
    over_extras(tree, batch, false, [&](PyObject* name, PyArray_Descr* dtype, const auto& axes) {
        PyObject* value = PyDict_GetItemWithError(out.ptr(), name);
        std::byte* data = is_lent ? lend(dtype, rows, 0, axes, value) : nullptr;
        is_lent = is_lent && data;
        npy_intp bytes = rows * PyDataType_ELSIZE(dtype);
        for (npy_intp extent : axes) bytes *= extent;
        spans[batch.array_count] = {data, static_cast<std::size_t>(bytes)};
        batch.arrays[batch.array_count++] = value;
        return static_cast<void*>(data);
    });
    batch.dict = nb::borrow(out);
    return is_lent && !have_overlap(spans, batch.array_count);
}
