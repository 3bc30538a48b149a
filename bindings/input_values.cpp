#include "input_values.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

// ---- memory ----

namespace {

// A block that one thread keeps between its calls: new memory costs a page fault every 4 KB, more than the conversion.
constexpr std::size_t kKeptBytes = 8 << 20;
constexpr std::size_t kLeastBytes = 64 << 10;

struct Block {
    std::unique_ptr<std::byte[]> bytes;
    std::size_t size = 0;
};
thread_local Block kept;

}  // namespace

struct InputMemory::More {
    std::vector<Block> blocks;
    std::vector<PyObject*> objects;
    std::size_t used = 0;   // of the last block
    std::size_t total = 0;  // of all of them
};

InputMemory::More& InputMemory::more() {
    if (!more_) more_ = new More;
    return *more_;
}

std::byte* InputMemory::more_room(std::size_t bytes) {
    More& own = more();
    if (own.blocks.empty() && kept.size >= bytes) {
        own.blocks.push_back(std::exchange(kept, Block{}));
        own.total = own.blocks.back().size;
    } else if (own.blocks.empty() || own.blocks.back().size - own.used < bytes) {
        const std::size_t size = std::max({bytes, kLeastBytes, std::min(own.total, kKeptBytes)});
        own.blocks.reserve(own.blocks.size() + 1);
        own.blocks.push_back({std::unique_ptr<std::byte[]>(new std::byte[size]), size});
        own.used = 0;
        own.total += size;
    }
    std::byte* place = own.blocks.back().bytes.get() + own.used;
    own.used += bytes;
    return place;
}

PyObject* InputMemory::keep(PyObject* owned) {
    try {
        more().objects.push_back(owned);
    } catch (...) {
        Py_XDECREF(owned);
        throw;
    }
    return owned;
}

void InputMemory::give_back() {
    More* own = std::exchange(more_, nullptr);
    for (PyObject* object : own->objects) Py_DECREF(object);
    // The largest is kept. Blocks double, so a few calls make one that holds all that such a call needs.
    for (Block& block : own->blocks) {
        if (block.size <= kKeptBytes && block.size > kept.size) std::swap(block, kept);
    }
    delete own;
}

// ---- reading ----

bool GivenArray::has_shape(const npy_intp* lead, int lead_count, const npy_intp* own, int own_count) const {
    if (dimensions != lead_count + own_count) return false;
    return std::equal(lead, lead + lead_count, shape) && std::equal(own, own + own_count, shape + lead_count);
}

std::size_t GivenArray::items() const {
    std::size_t count = 1;
    for (int i = 0; i < dimensions; ++i) count *= static_cast<std::size_t>(shape[i]);
    return count;
}

namespace {

bool one_number(GivenArray& given, const void* data, int type, int item_bytes) {
    given.data = static_cast<const char*>(data);
    given.type = type;
    given.item_bytes = item_bytes;
    given.is_plain = true;
    given.is_swapped = false;
    given.dimensions = 0;
    return true;
}

template <class Number>
bool one_number(GivenArray& given, InputMemory& memory, int type, Number number) {
    std::byte* place = memory.room(sizeof number);
    std::memcpy(place, &number, sizeof number);
    return one_number(given, place, type, sizeof number);
}

struct ScalarType {
    PyTypeObject* type;
    int number, bytes;
    std::size_t offset;
};

const ScalarType* scalar_type(PyTypeObject* type) {
#define SHARPWAVE_SCALAR(Name, NUMBER)                                                            \
    {                                                                                             \
        &Py##Name##ArrType_Type, NUMBER, static_cast<int>(sizeof(Py##Name##ScalarObject::obval)), \
            offsetof(Py##Name##ScalarObject, obval)                                               \
    }
    static const ScalarType known[] = {
        SHARPWAVE_SCALAR(Double, NPY_DOUBLE),
        SHARPWAVE_SCALAR(Float, NPY_FLOAT),
        SHARPWAVE_SCALAR(Long, NPY_LONG),
        SHARPWAVE_SCALAR(Bool, NPY_BOOL),
        SHARPWAVE_SCALAR(Int, NPY_INT),
        SHARPWAVE_SCALAR(LongLong, NPY_LONGLONG),
        SHARPWAVE_SCALAR(Short, NPY_SHORT),
        SHARPWAVE_SCALAR(Byte, NPY_BYTE),
        SHARPWAVE_SCALAR(UByte, NPY_UBYTE),
        SHARPWAVE_SCALAR(UShort, NPY_USHORT),
        SHARPWAVE_SCALAR(UInt, NPY_UINT),
        SHARPWAVE_SCALAR(ULong, NPY_ULONG),
        SHARPWAVE_SCALAR(ULongLong, NPY_ULONGLONG),
        SHARPWAVE_SCALAR(Half, NPY_HALF),
        SHARPWAVE_SCALAR(LongDouble, NPY_LONGDOUBLE),
        SHARPWAVE_SCALAR(CFloat, NPY_CFLOAT),
        SHARPWAVE_SCALAR(CDouble, NPY_CDOUBLE),
        SHARPWAVE_SCALAR(CLongDouble, NPY_CLONGDOUBLE),
    };
#undef SHARPWAVE_SCALAR
    for (const ScalarType& each : known) {
        if (each.type == type) return &each;
    }
    return nullptr;
}

// What a list of Python's numbers has become so far. NumPy makes int64 of whole numbers and float64 as soon as one is a
// float; bool stays only among its own.
struct ListReader {
    int dimensions = 0;
    npy_intp shape[GivenArray::kMaxDimensions];
    double* reals = nullptr;         // of the same memory
    std::int64_t* wholes = nullptr;  // until there is a float
    bool has_real = false, has_whole = false, has_truth = false;
    std::size_t count = 0;

    // The shape by the first item of each list; false where an item is not a number of Python's.
    bool measure(PyObject* value) {
        while (PyList_CheckExact(value) || PyTuple_CheckExact(value)) {
            if (dimensions == GivenArray::kMaxDimensions) return false;
            const Py_ssize_t length = PySequence_Fast_GET_SIZE(value);
            shape[dimensions++] = length;
            if (length == 0) return true;
            value = PySequence_Fast_GET_ITEM(value, 0);
        }
        return PyFloat_CheckExact(value) || PyLong_CheckExact(value) || PyBool_Check(value);
    }

    bool put(PyObject* item) {
        if (PyFloat_CheckExact(item)) {
            if (!has_real) {
                for (std::size_t i = 0; i < count; ++i) reals[i] = static_cast<double>(wholes[i]);
                has_real = true;
            }
            reals[count++] = PyFloat_AS_DOUBLE(item);
            return true;
        }
        std::int64_t whole = item == Py_True;
        if (PyBool_Check(item)) {
            has_truth = true;
        } else if (PyLong_CheckExact(item)) {
            int overflow = 0;
            whole = PyLong_AsLongLongAndOverflow(item, &overflow);
            if (overflow) return false;
            has_whole = true;
        } else {
            return false;
        }
        if (has_real) {
            reals[count++] = static_cast<double>(whole);
        } else {
            wholes[count++] = whole;
        }
        return true;
    }

    bool fill(PyObject* value, int at) {
        if (at == dimensions) return put(value);
        if (!PyList_CheckExact(value) && !PyTuple_CheckExact(value)) return false;
        if (PySequence_Fast_GET_SIZE(value) != shape[at]) return false;
        PyObject** items = PySequence_Fast_ITEMS(value);  // nothing here runs Python code
        for (npy_intp i = 0; i < shape[at]; ++i) {
            if (!fill(items[i], at + 1)) return false;
        }
        return true;
    }
};

void set_c_strides(GivenArray& given) {
    npy_intp bytes = given.item_bytes;
    for (int i = given.dimensions; i-- > 0; bytes *= given.shape[i]) given.strides[i] = bytes;
}

bool read_list(PyObject* value, InputMemory& memory, GivenArray& given) {
    ListReader reader;
    if (!reader.measure(value)) return false;
    std::size_t items = 1;
    for (int i = 0; i < reader.dimensions; ++i) {
        // Lists may hold one list many times, so the product can be larger than what was allocated.
        if (__builtin_mul_overflow(items, static_cast<std::size_t>(reader.shape[i]), &items)) return false;
    }
    if (items > std::numeric_limits<std::size_t>::max() / 16) return false;
    std::byte* place = memory.room(items * 8);
    reader.reals = reinterpret_cast<double*>(place);
    reader.wholes = reinterpret_cast<std::int64_t*>(place);
    if (items ? !reader.fill(value, 0) : reader.dimensions > 1) return false;
    const bool are_truths = reader.has_truth && !reader.has_whole && !reader.has_real;
    if (are_truths) {
        for (std::size_t i = 0; i < items; ++i) place[i] = static_cast<std::byte>(reader.wholes[i]);
    }
    const bool are_real = reader.has_real || items == 0;  // NumPy's dtype of an empty list
    one_number(given, place, are_truths ? NPY_BOOL : are_real ? NPY_DOUBLE : NPY_INT64, are_truths ? 1 : 8);
    given.dimensions = reader.dimensions;
    std::copy_n(reader.shape, reader.dimensions, given.shape);
    set_c_strides(given);
    return true;
}

// The part of the DLPack interface (version 1) that is used here. A tensor lends its address without being packed into
// a capsule: a tenth of the time of Tensor.numpy().
struct LentTensor {
    void* data;
    std::int32_t device, device_number, dimensions;
    std::uint8_t code, bits;
    std::uint16_t lanes;
    std::int64_t* shape;
    std::int64_t* strides;  // in items
    std::uint64_t byte_offset;
};
struct TensorLender {
    std::uint32_t major, minor;
    void* older;
    void* allocate;
    void* pack;
    void* unpack;
    int (*lend)(void* object, LentTensor* tensor);
    void* stream;
};
constexpr std::int32_t kOnCpu = 1;
enum : std::uint8_t { kCodeInt = 0, kCodeUint = 1, kCodeFloat = 2, kCodeBool = 6 };

// torch's Tensor, once one was seen: found by its name, so torch is never imported from here. `lend` stays null with
// versions of torch that have no such interface.
struct TensorType {
    PyTypeObject* type = nullptr;
    int (*lend)(void* object, LentTensor* tensor) = nullptr;
    PyObject* is_neg = nullptr;
};
TensorType tensors;

bool meet_tensors(PyTypeObject* type) {
    if (tensors.type || std::strcmp(type->tp_name, "Tensor") != 0) return false;
    auto* object = reinterpret_cast<PyObject*>(type);
    const nb::object module = nb::steal(PyObject_GetAttrString(object, "__module__"));
    if (!module.is_valid() || !PyUnicode_Check(module.ptr()) ||
        PyUnicode_CompareWithASCIIString(module.ptr(), "torch") != 0) {
        PyErr_Clear();
        return false;
    }
    const nb::object capsule = nb::steal(PyObject_GetAttrString(object, "__dlpack_c_exchange_api__"));
    nb::object is_neg = nb::steal(PyObject_GetAttrString(object, "is_neg"));
    const auto* lender =
        capsule.is_valid()
            ? static_cast<const TensorLender*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"))
            : nullptr;
    PyErr_Clear();
    Py_INCREF(object);  // for good: it is compared with the types of later values
    tensors.type = type;
    tensors.is_neg = is_neg.release().ptr();
    if (lender && lender->major == 1 && tensors.is_neg) tensors.lend = lender->lend;
    return true;
}

int type_of(const LentTensor& tensor) {
    if (tensor.lanes != 1) return -1;
    if (tensor.code == kCodeBool) return tensor.bits == 8 ? NPY_BOOL : -1;
    const int size = tensor.bits == 8 ? 0 : tensor.bits == 16 ? 1 : tensor.bits == 32 ? 2 : tensor.bits == 64 ? 3 : -1;
    if (size < 0 || tensor.code > kCodeFloat) return -1;  // bfloat16 and others that NumPy lacks; complex numbers
    static constexpr int types[3][4] = {{NPY_INT8, NPY_INT16, NPY_INT32, NPY_INT64},
                                        {NPY_UINT8, NPY_UINT16, NPY_UINT32, NPY_UINT64},
                                        {-1, NPY_HALF, NPY_FLOAT, NPY_DOUBLE}};
    return types[tensor.code][size];
}

}  // namespace

bool read_tensor(PyObject* value, GivenArray& given) {
    if (Py_TYPE(value) != tensors.type && !meet_tensors(Py_TYPE(value))) return false;
    if (!tensors.lend) return false;
    LentTensor tensor;
    // A tensor may stand for the negative of its memory: Tensor.numpy() refuses that.
    PyObject* is_negative = PyObject_CallOneArg(tensors.is_neg, value);
    Py_XDECREF(is_negative);
    if (is_negative != Py_False || tensors.lend(value, &tensor) != 0) {
        PyErr_Clear();
        return false;
    }
    const int type = type_of(tensor);
    if (type < 0 || tensor.device != kOnCpu || tensor.dimensions > GivenArray::kMaxDimensions) return false;
    one_number(given, static_cast<const char*>(tensor.data) + tensor.byte_offset, type, tensor.bits / 8);
    given.dimensions = tensor.dimensions;
    npy_intp bytes = given.item_bytes;
    for (int i = given.dimensions; i-- > 0;) {
        given.shape[i] = tensor.shape[i];
        given.strides[i] = tensor.strides ? tensor.strides[i] * given.item_bytes : bytes;
        given.is_plain &= given.strides[i] == bytes || given.shape[i] == 1;
        bytes *= given.shape[i];
    }
    return true;
}

bool read_number(PyObject* value, InputMemory& memory, GivenArray& given) {
    if (PyFloat_CheckExact(value)) return one_number(given, memory, NPY_DOUBLE, PyFloat_AS_DOUBLE(value));
    if (PyBool_Check(value)) return one_number(given, memory, NPY_BOOL, static_cast<npy_bool>(value == Py_True));
    if (PyLong_CheckExact(value)) {
        int overflow = 0;
        const long long whole = PyLong_AsLongLongAndOverflow(value, &overflow);
        if (!overflow) return one_number(given, memory, NPY_INT64, static_cast<npy_int64>(whole));
        if (overflow < 0) return false;
        const unsigned long long large = PyLong_AsUnsignedLongLong(value);
        if (!PyErr_Occurred()) return one_number(given, memory, NPY_UINT64, static_cast<npy_uint64>(large));
        PyErr_Clear();
        return false;
    }
    const ScalarType* scalar = scalar_type(Py_TYPE(value));
    return scalar &&
           one_number(given, reinterpret_cast<const char*>(value) + scalar->offset, scalar->number, scalar->bytes);
}

bool read_array(PyObject* value, GivenArray& given) {
    if (!is_plain_array(value)) return false;
    auto* array = reinterpret_cast<PyArrayObject*>(value);
    if (PyArray_NDIM(array) > GivenArray::kMaxDimensions || PyDataType_REFCHK(PyArray_DESCR(array))) return false;
    one_number(given, PyArray_DATA(array), PyArray_TYPE(array), static_cast<int>(PyArray_ITEMSIZE(array)));
    given.is_plain = PyArray_ISCARRAY_RO(array);
    given.is_swapped = PyArray_ISBYTESWAPPED(array);
    given.dimensions = PyArray_NDIM(array);
    std::copy_n(PyArray_DIMS(array), given.dimensions, given.shape);
    std::copy_n(PyArray_STRIDES(array), given.dimensions, given.strides);
    return true;
}

bool read_value(PyObject* value, InputMemory& memory, GivenArray& given) {
    if (!PyList_CheckExact(value) && !PyTuple_CheckExact(value)) {
        return read_tensor(value, given) || read_array(value, given) || read_number(value, memory, given);
    }
    if (read_list(value, memory, given)) return true;
    PyObject* array = PyArray_FROM_O(value);
    if (!array) {
        if (!PyErr_ExceptionMatches(PyExc_Exception)) throw nb::python_error();  // Ctrl-C
        PyErr_Clear();
        return false;
    }
    return read_array(memory.keep(array), given);
}
