// add() without a table: accepted rows are packed (table/packed_rows.h) for a server that has one.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "bind.h"
#include "errors.h"
#include "held.h"
#include "row_intake.h"
#include "table/packed_rows.h"
#include "table/stack_memory.h"

namespace {

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// What add() returns: None, or what `full` gave.
struct Answer {
    bool is_wanted = false;
    nb::object value;
    PyObject* release() { return value.is_valid() ? value.release().ptr() : Py_NewRef(Py_None); }
};

// The interpreter's lock guards it: rows are packed without letting go of it.
struct BoundPacker : RowIntake {
    BoundPacker(std::shared_ptr<Tree> of, const std::vector<sharpwave::Field>& fields, std::uint64_t table_capacity,
                std::uint64_t table_width, nb::object prepare_function, nb::object read_leaf_function,
                bool takes_steps_axis, bool takes_one_row, nb::object full_function, std::uint64_t rows_at_most,
                std::uint64_t bytes_at_most, double linger)
        : RowIntake(std::move(of), std::move(prepare_function), std::move(read_leaf_function), takes_steps_axis,
                    takes_one_row),
          full(std::move(full_function)),
          layout(fields),
          packer(met(*tree, layout)),
          memory(layout, table_width),
          there{table_capacity, table_width},
          max_rows(rows_at_most),
          max_bytes(bytes_at_most),
          linger_s(linger) {
        if (there.step == 0 || there.most < there.step)
            throw nb::value_error("Packer(): expected a width of at least 1, and a capacity");
    }

    static const sharpwave::RowLayout& met(Tree& tree, const sharpwave::RowLayout& layout) {
        tree.meet(layout);
        return layout;
    }

    using Result = Answer;
    struct Elsewhere {
        std::uint64_t capacity() const { return most; }
        std::uint64_t width() const { return step; }
        std::uint64_t most, step;
    };
    const Elsewhere& table() const { return there; }
    void check_open() const {}
    template <bool Tells>
    void take(const RowBatch& batch, const Incoming& incoming, Answer* answer) {
        pack(batch, incoming.timeout, *answer, incoming.sources, incoming.source_count);
    }
    void take_with_care(const RowBatch& batch, PyObject* timeout, Answer& answer) {
        pack(batch, timeout, answer, nullptr, 0);
    }
    void pack(const RowBatch& batch, PyObject* timeout, Answer& answer, PyObject* const* sources,
              std::size_t source_count);
    void make_room(const RowBatch& batch);
    nb::object send(const nb::object& timeout, bool wants_indices);

    nb::object full;
    const sharpwave::RowLayout layout;
    sharpwave::RowPacker packer;
    sharpwave::StackMemory memory;
    Elsewhere there;
    std::uint64_t max_rows, max_bytes;
    std::uint64_t last_rows = 0;   // of the newest add
    double linger_s, since_s = 0;  // since_s: when the first pending row came
};

nb::object BoundPacker::send(const nb::object& timeout, bool wants_indices) {
    try {
        return outlast([&] { return full(timeout, wants_indices); });
    } catch (...) {
        memory.forget();  // the caller may add the same rows again
        throw;
    }
}

// `full` sends what is pending. Other threads may add rows meanwhile, so it may be asked again.
void BoundPacker::make_room(const RowBatch& batch) {
    for (int asked = 0; packer.rows() != 0 && (!packer.fits(batch) || packer.rows() + batch.rows > there.most);
         ++asked) {
        if (asked == 1000) throw nb::value_error("full() left rows pending that it was called for");
        send(nb::none(), false);
    }
}

void BoundPacker::pack(const RowBatch& batch, PyObject* timeout, Answer& answer, PyObject* const* sources,
                       std::size_t source_count) {
    read_deadline(timeout);  // refuses what is no timeout
    if (packer.rows() != 0 && (!packer.fits(batch) || packer.rows() + batch.rows > there.most)) [[unlikely]] {
        const HeldObjects held(sources, source_count);  // Python code that runs meanwhile may drop them
        make_room(batch);
    }
    const double now = now_s();
    if (packer.rows() == 0) since_s = now;
    if (memory.has_stacks()) memory.check(batch);
    packer.add(batch);
    if (memory.has_stacks()) memory.remember(batch);
    last_rows = batch.rows;
    const bool has_timeout = timeout && timeout != Py_None;
    const bool is_due = packer.rows() >= max_rows || now - since_s >= linger_s || packer.bytes() >= max_bytes;
    if (!is_due && !has_timeout && !answer.is_wanted) return;
    const nb::object given = nb::borrow(has_timeout ? timeout : Py_None);
    answer.value = send(given, answer.is_wanted);
}

PyObject* add(PyObject* object, PyObject* const* args, Py_ssize_t count, PyObject* names) {
    BoundPacker& self = *nb::inst_ptr<BoundPacker>(object);
    const auto positional = static_cast<std::size_t>(count);
    return translating([&]() -> PyObject* {
        Answer answer;
        if (!add_at_once<false>(self, args, positional, names, &answer)) [[unlikely]]
            return add_otherwise(self, args, positional, names);
        return answer.release();
    });
}

// The rows behind `room` zero bytes; None while there are none.
nb::object take(BoundPacker& self, std::uint64_t room) {
    if (self.packer.rows() == 0) return nb::none();
    const std::uint64_t bytes = room + self.packer.bytes();
    nb::object message = nb::steal(PyByteArray_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(bytes)));
    if (!message.is_valid()) throw nb::python_error();
    char* data = PyByteArray_AS_STRING(message.ptr());
    std::memset(data, 0, room);
    self.packer.write(reinterpret_cast<std::byte*>(data) + room);
    self.packer.clear();
    return message;
}

PyMethodDef packer_methods[] = {
    {"add", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(add)), METH_FASTCALL | METH_KEYWORDS,
     "add($self, /, *args, **kwargs)\n--\n\nPacks one row, or n rows with a leading axis, in the schema's order or by "
     "name."},
    {nullptr, nullptr, 0, nullptr}};

// `full` mostly belongs to an object that has this one.
int traverse(PyObject* object, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(object));
    if (!nb::inst_ready(object)) return 0;
    const BoundPacker& self = *nb::inst_ptr<BoundPacker>(object);
    Py_VISIT(self.full.ptr());
    Py_VISIT(self.prepare.ptr());
    Py_VISIT(self.read_leaf.ptr());
    return 0;
}

int clear(PyObject* object) {
    if (nb::inst_ready(object)) nb::inst_ptr<BoundPacker>(object)->full = nb::none();
    return 0;
}

PyType_Slot packer_slots[] = {{Py_tp_methods, packer_methods},
                              {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                              {Py_tp_clear, reinterpret_cast<void*>(clear)},
                              {0, nullptr}};

}  // namespace

void bind_packer(nb::module_& m) {
    nb::class_<BoundPacker>(m, "Packer", nb::type_slots(packer_slots), "Rows on their way to a table elsewhere.")
        .def(nb::init<std::shared_ptr<Tree>, const std::vector<sharpwave::Field>&, std::uint64_t, std::uint64_t,
                      nb::object, nb::object, bool, bool, nb::object, std::uint64_t, std::uint64_t, double>(),
             nb::arg("tree"), nb::arg("fields"), nb::arg("capacity"), nb::arg("width"), nb::arg("prepare"),
             nb::arg("read_leaf"), nb::arg("takes_steps"), nb::arg("one_row"), nb::arg("full"), nb::arg("max_rows"),
             nb::arg("max_bytes"), nb::arg("linger_s"))
        .def("take", &take, nb::arg("room"), nb::sig("def take(self, room: int) -> bytearray | None"),
             "The body of all pending rows behind so many free bytes; None if there are none. None is pending then.")
        .def(
            "drop_last",
            [](BoundPacker& self) {
                self.packer.drop(std::min(self.last_rows, self.packer.rows()));
                self.memory.forget();
                self.last_rows = 0;
            },
            "Takes back the rows of the newest add, if they are pending.")
        .def_rw("max_rows", &BoundPacker::max_rows, "So many pending rows call full().")
        .def_prop_ro(
            "rows", [](const BoundPacker& self) { return self.packer.rows(); }, "Pending rows.")
        .def_prop_ro(
            "last_rows", [](const BoundPacker& self) { return self.last_rows; },
            "Rows of the newest add, masked ones too.")
        .def_prop_ro("bytes", [](const BoundPacker& self) { return self.packer.bytes(); }, "Bytes of their body.");
}
