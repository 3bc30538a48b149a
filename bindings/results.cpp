#include "results.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <string>

#include "errors.h"

namespace {

// Arrays below this come from NumPy's own allocator, which is as fast for them.
constexpr std::size_t kPooledFrom = 16 << 10;
constexpr std::size_t kPoolLimit = std::size_t{256} << 20;
constexpr std::size_t kHugePage = 2 << 20;

// Memory of dead arrays, by size. Only ever touched with the interpreter's lock held.
class Pool {
public:
    void* take(std::size_t bytes) {
        const auto found = free_.find(bytes);
        if (found != free_.end() && !found->second.empty()) {
            void* memory = found->second.back();
            found->second.pop_back();
            held_ -= bytes;
            return memory;
        }
        void* memory = std::aligned_alloc(bytes >= kHugePage ? kHugePage : 64, bytes);
#if defined(__linux__)
        if (memory && bytes >= kHugePage) madvise(memory, bytes, MADV_HUGEPAGE);
#endif
        return memory;
    }

    void give(void* memory, std::size_t bytes) {
        if (held_ + bytes > kPoolLimit) return std::free(memory);
        free_[bytes].push_back(memory);
        held_ += bytes;
    }

    std::size_t held() const { return held_; }

private:
    std::map<std::size_t, std::vector<void*>> free_;
    std::size_t held_ = 0;
};

Pool& pool() {
    static Pool* instance = new Pool;  // arrays may die after static destructors have run
    return *instance;
}

// Views and torch tensors keep an array's base alive, so its memory comes back only when the last of them is gone.
void give_back(PyObject* capsule) {
    const auto bytes = reinterpret_cast<std::size_t>(PyCapsule_GetContext(capsule));
    pool().give(PyCapsule_GetPointer(capsule, nullptr), bytes);
}

PyArrayObject* new_array(PyArray_Descr* dtype, int dimensions, const npy_intp* shape, std::size_t bytes) {
    Py_INCREF(dtype);
    if (bytes < kPooledFrom) {
        PyObject* array = PyArray_NewFromDescr(&PyArray_Type, dtype, dimensions, shape, nullptr, nullptr, 0, nullptr);
        if (!array) throw nb::python_error();
        return reinterpret_cast<PyArrayObject*>(array);
    }
    const std::size_t unit = bytes >= kHugePage ? kHugePage : 4096;
    bytes = (bytes + unit - 1) / unit * unit;
    void* memory = pool().take(bytes);
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
        pool().give(memory, bytes);
        throw nb::python_error();
    }
    PyCapsule_SetContext(base, reinterpret_cast<void*>(bytes));
    PyArray_SetBaseObject(reinterpret_cast<PyArrayObject*>(array), base);
    return reinterpret_cast<PyArrayObject*>(array);
}

struct Names {
    PyObject* indices = PyUnicode_InternFromString("indices");
    PyObject* truncated = PyUnicode_InternFromString("truncated");
    PyArray_Descr* int64 = PyArray_DescrFromType(NPY_INT64);
    PyArray_Descr* boolean = PyArray_DescrFromType(NPY_BOOL);
};

const Names& names() {
    static const Names* instance = new Names;
    return *instance;
}

nb::object new_leaf(const Leaf& leaf, npy_intp rows, sharpwave::FieldMove& move) {
    npy_intp shape[9] = {rows};  // a field has at most 8 dimensions
    std::copy(leaf.shape.begin(), leaf.shape.end(), shape + 1);
    PyArrayObject* array = new_array(leaf.dtype, static_cast<int>(leaf.shape.size()) + 1, shape,
                                     leaf.bytes * static_cast<std::size_t>(rows));
    move = {leaf.offset, leaf.bytes, static_cast<std::byte*>(PyArray_DATA(array))};
    return nb::steal(reinterpret_cast<PyObject*>(array));
}

nb::object new_node(const Tree& tree, const Node& node, npy_intp rows, Batch& batch) {
    if (node.leaf >= 0) {
        return new_leaf(tree.leaves()[static_cast<std::size_t>(node.leaf)], rows,
                        batch.fields[static_cast<std::size_t>(node.leaf)]);
    }
    if (node.is_tuple) {
        nb::object result = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(node.children.size())));
        for (std::size_t i = 0; i < node.children.size(); ++i) {
            PyTuple_SET_ITEM(result.ptr(), static_cast<Py_ssize_t>(i),
                             new_node(tree, node.children[i], rows, batch).release().ptr());
        }
        return result;
    }
    nb::dict result;
    for (const Node& child : node.children) {
        if (PyDict_SetItem(result.ptr(), child.key, new_node(tree, child, rows, batch).ptr()) != 0) {
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

void check_node(const Tree& tree, const Node& node, npy_intp rows, nb::handle value, const std::string& where,
                Batch& batch) {
    if (node.leaf >= 0) {
        const Leaf& leaf = tree.leaves()[static_cast<std::size_t>(node.leaf)];
        batch.fields[static_cast<std::size_t>(node.leaf)] = {leaf.offset, leaf.bytes,
                                                             check_array(where, leaf.dtype, leaf.shape, rows, value)};
        batch.held.push_back(nb::borrow(value));
        return;
    }
    if (node.is_tuple ? !PyTuple_Check(value.ptr()) : !PyDict_Check(value.ptr())) {
        refuse(where, node.is_tuple ? "a tuple" : "a dict", value);
    }
    for (std::size_t i = 0; i < node.children.size(); ++i) {
        const Node& child = node.children[i];
        const std::string name = text_of(child.key);
        PyObject* item;
        if (node.is_tuple) {
            item = i < static_cast<std::size_t>(PyTuple_GET_SIZE(value.ptr()))
                       ? PyTuple_GET_ITEM(value.ptr(), static_cast<Py_ssize_t>(i))
                       : Py_None;
        } else {
            item = PyDict_GetItem(value.ptr(), child.key);
        }
        check_node(tree, child, rows, item ? item : Py_None, where + "['" + name + "']", batch);
    }
}

void refuse_overlap(const Batch& batch, npy_intp rows) {
    std::vector<std::pair<const std::byte*, std::size_t>> spans;
    for (const auto& field : batch.fields) spans.emplace_back(field.flat, field.bytes * static_cast<std::size_t>(rows));
    spans.emplace_back(reinterpret_cast<const std::byte*>(batch.indices), static_cast<std::size_t>(rows) * 8);
    for (std::size_t a = 0; a < spans.size(); ++a) {
        for (std::size_t b = 0; b < a; ++b) {
            if (spans[a].first < spans[b].first + spans[b].second &&
                spans[b].first < spans[a].first + spans[a].second) {
                throw sharpwave::Error(sharpwave::ErrorKind::schema,
                                       "sample(): out: two of its arrays share memory; give each its own");
            }
        }
    }
}

}  // namespace

std::size_t pooled_bytes() { return pool().held(); }

Batch new_batch(const Tree& tree, npy_intp rows, bool with_truncated) {
    Batch batch;
    nb::dict dict;
    batch.fields.resize(tree.leaves().size());
    for (const Node& node : tree.top()) {
        if (PyDict_SetItem(dict.ptr(), node.key, new_node(tree, node, rows, batch).ptr()) != 0)
            throw nb::python_error();
    }
    const auto extra = [&](PyObject* name, PyArray_Descr* dtype, std::size_t item) {
        PyArrayObject* array = new_array(dtype, 1, &rows, static_cast<std::size_t>(rows) * item);
        const nb::object owner = nb::steal(reinterpret_cast<PyObject*>(array));
        if (PyDict_SetItem(dict.ptr(), name, owner.ptr()) != 0) throw nb::python_error();
        return PyArray_DATA(array);
    };
    if (with_truncated) {
        batch.truncated = static_cast<std::uint8_t*>(extra(names().truncated, names().boolean, 1));
    }
    batch.indices = static_cast<std::uint64_t*>(extra(names().indices, names().int64, 8));
    batch.dict = std::move(dict);
    return batch;
}

Batch check_out(const Tree& tree, npy_intp rows, nb::handle out) {
    if (!PyDict_Check(out.ptr())) refuse("", "a dict of arrays, as sample() gives", out);
    Batch batch;
    batch.fields.resize(tree.leaves().size());
    batch.held.reserve(tree.leaves().size() + 1);
    for (const Node& node : tree.top()) {
        PyObject* value = PyDict_GetItem(out.ptr(), node.key);
        if (node.leaf >= 0 && value && PyArray_Check(value)) {
            // The common case without building the text of where we are.
            auto* array = reinterpret_cast<PyArrayObject*>(value);
            const Leaf& leaf = tree.leaves()[static_cast<std::size_t>(node.leaf)];
            if (PyArray_DESCR(array) == leaf.dtype && PyArray_ISCARRAY(array) &&
                PyArray_NDIM(array) == static_cast<int>(leaf.shape.size()) + 1 && PyArray_DIM(array, 0) == rows &&
                std::equal(leaf.shape.begin(), leaf.shape.end(), PyArray_DIMS(array) + 1)) {
                batch.fields[static_cast<std::size_t>(node.leaf)] = {leaf.offset, leaf.bytes,
                                                                     static_cast<std::byte*>(PyArray_DATA(array))};
                batch.held.push_back(nb::borrow(value));
                continue;
            }
        }
        const std::string name = text_of(node.key);
        check_node(tree, node, rows, value ? value : Py_None, "['" + name + "']", batch);
    }
    PyObject* indices = PyDict_GetItem(out.ptr(), names().indices);
    batch.indices = reinterpret_cast<std::uint64_t*>(
        check_array("['indices']", names().int64, {}, rows, indices ? indices : Py_None));
    batch.held.push_back(nb::borrow(indices));
    refuse_overlap(batch, rows);
    batch.dict = nb::borrow(out);
    return batch;
}
