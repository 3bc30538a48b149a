// Values that users pass, as numbers in memory: where they lie, in which dtype and layout, and their conversion into
// the bytes of a field. The rules of conversion are those of `cast_value` in src/sharpwave/arrays.py, which words the
// refusals.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "numpy_api.h"

// Memory of one call: converted values, and the Python objects that they were read from. Small values lie in it, so on
// the stack; the rest comes from a block that the thread keeps for its next call.
class InputMemory {
public:
    InputMemory() {}  // not all of it cleared: that would cost as much as an add
    ~InputMemory() {
        if (more_) [[unlikely]]
            give_back();
    }
    InputMemory(const InputMemory&) = delete;
    InputMemory& operator=(const InputMemory&) = delete;

    // Aligned to 16 bytes; lives as long as this object. Throws std::bad_alloc.
    std::byte* room(std::size_t bytes) {
        const std::size_t aligned = (bytes + 15) / 16 * 16;
        if (aligned > kFewBytes - used_) [[unlikely]]
            return more_room(aligned);
        std::byte* place = few_ + used_;
        used_ += aligned;
        return place;
    }
    PyObject* keep(PyObject* owned);  // takes over the reference

private:
    struct More;
    static constexpr std::size_t kFewBytes = 4096;
    std::byte* more_room(std::size_t bytes);
    More& more();
    void give_back();

    More* more_ = nullptr;
    std::size_t used_ = 0;
    alignas(16) std::byte few_[kFewBytes];
};

// Numbers in memory that another object owns.
struct GivenArray {
    static constexpr int kMaxDimensions = 12;  // a field has 8 at most, a stack and two leading axes come before them
    const char* data;
    int type;        // of NumPy
    int item_bytes;  // of one number
    bool is_plain;   // native byte order, aligned, C-contiguous
    bool is_swapped;
    int dimensions;
    npy_intp shape[kMaxDimensions];
    npy_intp strides[kMaxDimensions];  // in bytes

    bool has_shape(const npy_intp* lead, int lead_count, const npy_intp* own, int own_count) const;
    std::size_t items() const;
};

// A masked array is an array too, but its data is not what it says. Other subclasses (memory-mapped files) are arrays
// like any.
inline bool is_plain_array(PyObject* value) {
    return PyArray_CheckExact(value) || (PyArray_Check(value) && !PyObject_HasAttrString(value, "_mask"));
}

// Python's float, int, bool and NumPy's scalars; by type, without running Python code.
bool read_number(PyObject* value, InputMemory& memory, GivenArray& given);

// An array, of any strides and byte order, whose dtype is of fixed size.
bool read_array(PyObject* value, GivenArray& given);

// A tensor of torch on the CPU, of a dtype that NumPy has and that is not complex. May run Python code.
bool read_tensor(PyObject* value, GivenArray& given);

// What read_number and read_array take, lists and tuples of numbers, tensors. May run Python code. False without an
// error set: not known here, or no numbers.
bool read_value(PyObject* value, InputMemory& memory, GivenArray& given);

// The numbers in C order in a dtype: where they lie, if nothing has to change, or in `memory`. Null where a value does
// not keep its meaning, or where the conversion is not known here: of half, long double and complex numbers only few
// are.
const std::byte* convert(const GivenArray& given, const PyArray_Descr* want, InputMemory& memory);

// A priority is the magnitude, as float32. False where one is not finite or no real number.
bool convert_priorities(const GivenArray& given, float* to, InputMemory& memory);
