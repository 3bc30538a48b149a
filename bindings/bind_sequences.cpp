// Many samples at once: what a put of a SequenceBuffer asks of each of them. A sample is a SequenceSample of one datum;
// src/sharpwave/sequences says what its attributes are.
#include <nanobind/stl/string.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "bind.h"

#if PY_VERSION_HEX < 0x030c0000
#include <structmember.h>
#define Py_T_OBJECT_EX T_OBJECT_EX
#endif

namespace {

enum Part { kLens, kData, kShape, kDtype, kParts };  // of a column, a tuple

// One sample's attributes. The sample keeps them alive: it is never changed.
struct Sample {
    PyObject* id;
    PyObject* columns;
    PyObject* metadata;
};

class Reader {
public:
    // The sample must have these attributes as __slots__: they stay when the references here are gone. Without an id
    // where it has several data.
    Sample read(nb::handle sample) const {
        const nb::object ids = get(sample, ids_), columns = get(sample, columns_), metadata = get(sample, metadata_);
        if (!PyList_Check(ids.ptr()) || !PyDict_Check(columns.ptr()) || !PyDict_Check(metadata.ptr())) {
            throw nb::type_error("expected samples");
        }
        const bool is_one = PyList_GET_SIZE(ids.ptr()) == 1;
        return {is_one ? PyList_GET_ITEM(ids.ptr(), 0) : nullptr, columns.ptr(), metadata.ptr()};
    }

    static PyObject* part(PyObject* column, Part number) {
        if (!PyTuple_Check(column) || PyTuple_GET_SIZE(column) != kParts) throw nb::type_error("expected columns");
        return PyTuple_GET_ITEM(column, number);
    }

    // Of the lengths of a datum's sequences.
    static Py_ssize_t sum(PyObject* row) {
        if (!PyList_Check(row)) throw nb::type_error("expected lengths");
        Py_ssize_t total = 0;
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(row); ++i) total += number(PyList_GET_ITEM(row, i));
        return total;
    }

    // Tokens of the key that has the most, and bytes of all.
    std::pair<Py_ssize_t, Py_ssize_t> weigh(const Sample& sample) const {
        Py_ssize_t most = 0, bytes = 0, at = 0;
        PyObject *key = nullptr, *column = nullptr;
        while (PyDict_Next(sample.columns, &at, &key, &column)) {
            PyObject* lens = part(column, kLens);
            if (!PyList_Check(lens) || PyList_GET_SIZE(lens) != 1) throw nb::type_error("expected one datum");
            most = std::max(most, sum(PyList_GET_ITEM(lens, 0)));
            PyObject* data = part(column, kData);
            if (PyArray_Check(data)) {
                bytes += PyArray_NBYTES(reinterpret_cast<PyArrayObject*>(data));
            } else if (data != Py_None) {
                bytes += number(get(data, nbytes_).ptr());
            }
        }
        return {most, bytes};
    }

    // Whether both have the same keys, shapes, dtypes and names of metadata.
    static bool are_alike(const Sample& one, const Sample& other) {
        if (PyDict_GET_SIZE(one.columns) != PyDict_GET_SIZE(other.columns) ||
            PyDict_GET_SIZE(one.metadata) != PyDict_GET_SIZE(other.metadata)) {
            return false;
        }
        Py_ssize_t at = 0;
        PyObject *key = nullptr, *value = nullptr;
        while (PyDict_Next(one.columns, &at, &key, &value)) {
            PyObject* column = PyDict_GetItemWithError(other.columns, key);
            if (!column) {
                if (PyErr_Occurred()) throw nb::python_error();
                return false;
            }
            if ((part(value, kData) == Py_None) != (part(column, kData) == Py_None) ||
                !are_equal(part(value, kDtype), part(column, kDtype)) ||
                !are_equal(part(value, kShape), part(column, kShape))) {
                return false;
            }
        }
        at = 0;
        while (PyDict_Next(one.metadata, &at, &key, &value)) {
            const int has = PyDict_Contains(other.metadata, key);
            if (has < 0) throw nb::python_error();
            if (!has) return false;
        }
        return true;
    }

private:
    static nb::object get(nb::handle object, const nb::object& name) {
        PyObject* found = PyObject_GetAttr(object.ptr(), name.ptr());
        if (!found) throw nb::python_error();
        return nb::steal(found);
    }

    static Py_ssize_t number(PyObject* value) {
        const Py_ssize_t read = PyLong_AsSsize_t(value);
        if (read == -1 && PyErr_Occurred()) throw nb::python_error();
        return read;
    }

    static bool are_equal(PyObject* one, PyObject* other) {
        if (one == other) return true;  // NumPy and torch mostly have one object a dtype
        const int equal = PyObject_RichCompareBool(one, other, Py_EQ);
        if (equal < 0) throw nb::python_error();
        return equal != 0;
    }

    static nb::object interned(const char* name) { return nb::steal(PyUnicode_InternFromString(name)); }

    nb::object ids_ = interned("_ids"), columns_ = interned("_columns"), metadata_ = interned("_metadata"),
               nbytes_ = interned("nbytes");
};

nb::object survey(const nb::list& samples, const nb::type_object& type) {
    const Reader reader;
    nb::list ids, tokens, bytes, ends;
    Sample first{};
    Py_ssize_t count = 0;
    for (; count < PyList_GET_SIZE(samples.ptr()); ++count) {
        PyObject* object = PyList_GET_ITEM(samples.ptr(), count);
        if (!PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(type.ptr()))) return nb::none();
        const Sample sample = reader.read(object);
        if (!sample.id) return nb::none();
        ids.append(nb::handle(sample.id));
        const auto [most, size] = reader.weigh(sample);
        tokens.append(most);
        bytes.append(size);
        if (count && Reader::are_alike(sample, first)) continue;
        if (count) ends.append(count);
        first = sample;
    }
    if (count) ends.append(count);
    return nb::make_tuple(ids, tokens, bytes, ends);
}

// Text without what JSON escapes is copied; json.encoder writes the rest.
void append_text(std::string& text, PyObject* value) {
    if (PyUnicode_IS_COMPACT_ASCII(value)) {
        const auto* chars = static_cast<const char*>(PyUnicode_DATA(value));
        const char* end = chars + PyUnicode_GET_LENGTH(value);
        const auto is_plain = [](char c) { return c >= ' ' && c < 0x7f && c != '"' && c != '\\'; };
        if (std::all_of(chars, end, is_plain)) {
            text += '"';
            text.append(chars, end);
            text += '"';
            return;
        }
    }
    const nb::object encode = nb::module_::import_("json.encoder").attr("encode_basestring_ascii");
    text += nb::cast<std::string>(encode(nb::handle(value)));
}

void append_json(std::string& text, PyObject* value) {
    if (PyUnicode_Check(value)) {
        append_text(text, value);
    } else if (value == Py_None) {
        text += "null";
    } else if (PyList_CheckExact(value)) {
        text += '[';
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(value); ++i) {
            if (i) text += ',';
            append_json(text, PyList_GET_ITEM(value, i));
        }
        text += ']';
    } else if (PyLong_CheckExact(value)) {
        int overflows = 0;
        const long long number = PyLong_AsLongLongAndOverflow(value, &overflows);
        text += overflows ? nb::cast<std::string>(nb::str(nb::handle(value))) : std::to_string(number);
    } else {
        throw nb::type_error("expected whole numbers, text, None, or lists of them");
    }
}

std::string to_json(nb::handle value) {
    std::string text;
    append_json(text, value.ptr());
    return text;
}

nb::tuple pieces_of(const nb::list& columns, const nb::callable& raw) {
    std::string lens = "[";
    Py_ssize_t tokens = 0;
    nb::list pieces;
    for (const nb::handle column : columns) {
        PyObject* rows = Reader::part(column.ptr(), kLens);
        if (!PyList_Check(rows)) throw nb::type_error("expected lengths");
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(rows); ++i) {
            PyObject* row = PyList_GET_ITEM(rows, i);
            if (lens.size() > 1) lens += ',';
            append_json(lens, row);
            tokens += Reader::sum(row);
        }
        PyObject* data = Reader::part(column.ptr(), kData);
        auto* array = reinterpret_cast<PyArrayObject*>(data);
        if (PyArray_CheckExact(data) && PyArray_IS_C_CONTIGUOUS(array) &&
            (PyArray_ISNUMBER(array) || PyArray_ISBOOL(array))) {
            pieces.append(nb::handle(data));
        } else if (data != Py_None) {
            pieces.append(raw(nb::handle(data)));
        }
    }
    return nb::make_tuple(lens + ']', tokens, pieces);
}

// Where an object of this type, which has __slots__, keeps an attribute.
Py_ssize_t slot_offset(const nb::handle type, const nb::handle name) {
    const nb::object slot = nb::getattr(type, name);
    if (Py_TYPE(slot.ptr()) != &PyMemberDescr_Type) throw nb::type_error("expected names in __slots__");
    const PyMemberDef* member = reinterpret_cast<PyMemberDescrObject*>(slot.ptr())->d_member;
    if (member->type != Py_T_OBJECT_EX) throw nb::type_error("expected names in __slots__");
    return member->offset;
}

// Values of slots for many objects of one type.
class Slots {
public:
    Slots(nb::handle type, std::size_t count, const nb::kwargs& values) {
        for (const auto& [name, value] : values) {
            const bool is_list = PyList_CheckExact(value.ptr());
            if (is_list && static_cast<std::size_t>(PyList_GET_SIZE(value.ptr())) != count) {
                throw nb::value_error("expected lists with one value an object");
            }
            slots_.push_back({slot_offset(type, name), value.ptr(), is_list});
        }
    }

    void set(PyObject* object, std::size_t number) const {
        for (const Slot& slot : slots_) {
            PyObject* value = slot.is_list ? PyList_GET_ITEM(slot.value, static_cast<Py_ssize_t>(number)) : slot.value;
            auto* place = reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + slot.offset);
            PyObject* old = *place;
            Py_INCREF(value);
            *place = value;
            Py_XDECREF(old);
        }
    }

private:
    struct Slot {
        Py_ssize_t offset;
        PyObject* value;
        bool is_list;
    };
    std::vector<Slot> slots_;
};

nb::list make_all(const nb::type_object& type, std::size_t count, const nb::kwargs& values) {
    const Slots slots(type, count, values);
    auto* made_type = reinterpret_cast<PyTypeObject*>(type.ptr());
    nb::list made;
    for (std::size_t i = 0; i < count; ++i) {
        const nb::object object = nb::steal(made_type->tp_alloc(made_type, 0));
        if (!object.is_valid()) throw nb::python_error();
        slots.set(object.ptr(), i);
        made.append(object);
    }
    return made;
}

void set_all(const nb::type_object& type, const nb::list& objects, const nb::kwargs& values) {
    const auto count = static_cast<std::size_t>(PyList_GET_SIZE(objects.ptr()));
    const Slots slots(type, count, values);
    for (std::size_t i = 0; i < count; ++i) {
        PyObject* object = PyList_GET_ITEM(objects.ptr(), static_cast<Py_ssize_t>(i));
        if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != type.ptr()) throw nb::type_error("expected that type");
        slots.set(object, i);
    }
}

}  // namespace

void bind_sequences(nb::module_& m) {
    m.def(
        "survey_samples", &survey, nb::arg("samples"), nb::arg("type"),
        nb::sig("def survey_samples(samples: list[typing.Any], type: type) -> "
                "tuple[list[str], list[int], list[int], list[int]] | None"),
        "Of samples of one datum each: their ids, tokens and bytes; and the ends of runs of samples that have the same "
        "keys, shapes, dtypes and names of metadata. None where one has several data or another type.");
    m.def("pieces_of_columns", &pieces_of, nb::arg("columns"), nb::arg("raw"),
          nb::sig("def pieces_of_columns(columns: list[typing.Any], raw: typing.Callable[[typing.Any], typing.Any]) -> "
                  "tuple[str, int, list[typing.Any]]"),
          "All lengths as JSON, their sum, and the arrays: what is no contiguous array of numbers becomes what `raw` "
          "makes of it.");
    m.def("to_json", &to_json, nb::arg("value").none(),
          "What json.dumps makes, without spaces, of whole numbers, text, None and lists of them, in a quarter of the "
          "time.");
    m.def(
        "make_all", &make_all, nb::arg("type"), nb::arg("count"), nb::arg("values"),
        nb::sig("def make_all(type: type, count: int, **values: typing.Any) -> list[typing.Any]"),
        "So many objects of a type with __slots__, without its __init__. A list has one value an object; anything else "
        "is the value of each.");
    m.def("set_all", &set_all, nb::arg("type"), nb::arg("objects"), nb::arg("values"),
          nb::sig("def set_all(type: type, objects: list[typing.Any], **values: typing.Any) -> None"),
          "Sets attributes of objects that make_all() made, with values as there.");
}
