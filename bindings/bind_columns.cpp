// One step of all environments into the columns of a rollout. What the usual step brings is copied here; for the rest,
// and for every error, src/sharpwave/rows/columns.py looks at the values.
#include <nanobind/stl/vector.h>

#include <cstring>
#include <vector>

#include "bind.h"
#include "input_values.h"

namespace {

struct Column {
    PyArrayObject* array = nullptr;  // (steps, environments, ...), C-contiguous; null: the value must be None
    bool is_flag = false;            // numbers count as truth values
};

class StepWriter {
public:
    // columns: one a value of put(): (array, whether it holds flags), or None.
    StepWriter(nb::list columns, bool takes_tensors) : takes_tensors_(takes_tensors) {
        for (nb::handle item : columns) {
            Column column;
            if (!item.is_none()) {
                const nb::tuple pair = nb::cast<nb::tuple>(item);
                const nb::object array = pair[0];
                column.array = reinterpret_cast<PyArrayObject*>(array.ptr());
                if (!PyArray_Check(array.ptr()) || !PyArray_ISCARRAY(column.array) || PyArray_NDIM(column.array) < 2) {
                    throw nb::value_error("StepWriter() takes C-contiguous arrays");
                }
                column.is_flag = nb::cast<bool>(pair[1]);
                held_.push_back(array);
            }
            columns_.push_back(column);
        }
    }

    // False: nothing was written, and the careful way must look.
    bool put(npy_intp step, nb::handle values) {
        if (!PyTuple_CheckExact(values.ptr()) ||
            static_cast<std::size_t>(PyTuple_GET_SIZE(values.ptr())) != columns_.size()) {
            throw nb::value_error("put() takes one value a column");
        }
        InputMemory memory;
        const std::byte** staged = reinterpret_cast<const std::byte**>(memory.room(columns_.size() * sizeof(void*)));
        for (std::size_t i = 0; i < columns_.size(); ++i) {
            PyObject* value = PyTuple_GET_ITEM(values.ptr(), static_cast<Py_ssize_t>(i));
            if (!columns_[i].array) {
                if (value != Py_None) return false;
            } else if (step < 0 || step >= PyArray_DIM(columns_[i].array, 0)) {
                throw nb::value_error("put() got a step that the columns do not have");
            } else if (!(staged[i] = stage(columns_[i], value, memory))) {
                return false;
            }
        }
        for (std::size_t i = 0; i < columns_.size(); ++i) {
            if (!columns_[i].array) continue;
            const auto bytes = static_cast<std::size_t>(PyArray_STRIDE(columns_[i].array, 0));
            auto* to =
                static_cast<std::byte*>(PyArray_DATA(columns_[i].array)) + static_cast<std::size_t>(step) * bytes;
            std::memmove(to, staged[i], bytes);  // a value may be a view of its own column
        }
        return true;
    }

private:
    // The value's bytes in the column's dtype; null: not the usual.
    const std::byte* stage(const Column& column, PyObject* value, InputMemory& memory) const {
        GivenArray given;
        if (!read_array(value, given) && !(takes_tensors_ && read_tensor(value, given))) return nullptr;
        const npy_intp* shape = PyArray_DIMS(column.array) + 1;
        const int dimensions = PyArray_NDIM(column.array) - 1;
        const npy_intp one = 1;  // a number for each environment may also have the shape (environments, 1)
        if (!given.has_shape(shape, dimensions, nullptr, 0) &&
            !(dimensions == 1 && given.has_shape(shape, 1, &one, 1))) {
            return nullptr;
        }
        const PyArray_Descr* dtype = PyArray_DESCR(column.array);
        if (given.type == dtype->type_num && !column.is_flag) return convert(given, dtype, memory);
        if (column.is_flag) {
            static const PyArray_Descr* const truth = PyArray_DescrFromType(NPY_BOOL);
            const std::byte* truths = convert(given, truth, memory);
            if (!truths || dtype->type_num == NPY_BOOL) return truths;
            given.data = reinterpret_cast<const char*>(truths);
            given.type = NPY_BOOL;
            given.item_bytes = 1;
            given.is_plain = true;
            return convert(given, dtype, memory);
        }
        return PyTypeNum_ISFLOAT(dtype->type_num) ? convert(given, dtype, memory) : nullptr;
    }

    std::vector<Column> columns_;
    std::vector<nb::object> held_;
    bool takes_tensors_;
};

}  // namespace

void bind_columns(nb::module_& m) {
    nb::class_<StepWriter>(m, "StepWriter", "Copies one step of all environments into the columns of a rollout.")
        .def(nb::init<nb::list, bool>(), nb::arg("columns"), nb::arg("takes_tensors"),
             nb::sig("def __init__(self, columns: list[typing.Any], takes_tensors: bool) -> None"))
        .def("put", &StepWriter::put, nb::arg("step"), nb::arg("values"),
             nb::sig("def put(self, step: int, values: tuple[typing.Any, ...]) -> bool"));
}
