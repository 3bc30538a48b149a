// add() into a table: what becomes of rows that were accepted (row_intake.h).
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>

#include "bind.h"
#include "bound_writer.h"
#include "errors.h"
#include "held.h"
#include "table/writer.h"

namespace {

template <bool Tells>
void append(const std::shared_ptr<sharpwave::Writer>& writer, const RowBatch& batch, std::uint64_t* serials,
            sharpwave::Deadline deadline, PyObject* const* sources = nullptr, std::size_t source_count = 0) {
    const bool is_small = batch.rows * writer->table().layout().payload_bytes() < kReleaseBytes;
    if (is_small && (Tells ? writer->try_append(batch, serials) : writer->try_append(batch))) return;
    const std::shared_ptr<sharpwave::Writer> own = writer;  // close() in another thread must not take it away
    const HeldObjects held(sources, source_count);
    const PatientRelease release;
    if (Tells) return own->append(batch, serials, deadline);
    own->append(batch, deadline);
}

// The same when it is its turn.
void append_in_turn(const BoundWriter& self, const RowBatch& batch, std::uint64_t* serials, PyObject* timeout,
                    PyObject* const* sources = nullptr, std::size_t source_count = 0) {
    const std::shared_ptr<sharpwave::Writer> writer = self.writer;  // prepare() ran Python, which may have closed it
    if (!writer) throw sharpwave::Error(sharpwave::ErrorKind::closed, "add(): this writer is closed");
    std::uint64_t rows = batch.rows;
    for (std::size_t i = 0; batch.flags && i < batch.rows; ++i) rows -= (batch.flags[i] & sharpwave::kRowVoid) != 0;
    const HeldObjects held(sources, source_count);  // a wait lets other threads in
    const sharpwave::Deadline deadline = read_deadline(timeout);
    PaceTurn turn(self.pace, sharpwave::Pace::Side::add, rows, timeout, deadline);
    if (serials) {
        append<true>(writer, batch, serials, deadline, sources, source_count);
    } else {
        append<false>(writer, batch, nullptr, deadline, sources, source_count);
    }
    turn.done = true;
}

}  // namespace

template <bool Tells>
inline __attribute__((always_inline)) void BoundWriter::take(const RowBatch& batch, const Incoming& incoming,
                                                             Indices* indices) {
    std::uint64_t* serials = Tells ? indices->make(incoming.rows) : nullptr;
    if (pace || incoming.timeout) [[unlikely]] {
        append_in_turn(*this, batch, serials, incoming.timeout, incoming.sources, incoming.source_count);
    } else {
        append<Tells>(writer, batch, serials, sharpwave::Deadline::never(), incoming.sources, incoming.source_count);
    }
}

void BoundWriter::take_with_care(const RowBatch& batch, PyObject* timeout, Indices& indices) {
    append_in_turn(*this, batch, indices.make(batch.rows), timeout);
}

namespace {

PyObject* add(PyObject* object, PyObject* const* args, Py_ssize_t count, PyObject* names) {
    BoundWriter& self = *nb::inst_ptr<BoundWriter>(object);
    const auto positional = static_cast<std::size_t>(count);
    return translating([&]() -> PyObject* {
        if (!self.writer) throw sharpwave::Error(sharpwave::ErrorKind::closed, "add(): this writer is closed");
        self.writer->table().check_open();
        if (!add_at_once<false>(self, args, positional, names, nullptr)) [[unlikely]]
            return add_otherwise(self, args, positional, names);
        Py_RETURN_NONE;
    });
}

PyMethodDef writer_methods[] = {
    {"add", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(add)), METH_FASTCALL | METH_KEYWORDS,
     "add($self, /, *args, **kwargs)\n--\n\nAdds one row, or n rows with a leading axis, in the schema's order or by "
     "name."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot writer_slots[] = {{Py_tp_methods, writer_methods}, {0, nullptr}};

}  // namespace

void bind_writer(nb::module_& m) {
    nb::class_<BoundWriter> writer(m, "Writer", nb::type_slots(writer_slots), "One stream of rows into a table.");
    bind_packed(writer);
    writer
        .def(nb::init<const BoundTable&, nb::object, nb::object, bool, bool, const std::optional<nb::bytes>&>(),
             nb::arg("table"), nb::arg("prepare"), nb::arg("read_leaf"), nb::arg("takes_steps"), nb::arg("one_row"),
             nb::arg("client") = nb::none())
        .def(
            "go_on", [](BoundWriter& self, std::uint64_t env) { self.writer->go_on(env); }, nb::arg("env"))
        .def("close", [](BoundWriter& self) {
            std::shared_ptr<sharpwave::Writer> writer = self.writer;
            if (!writer) return;
            {
                const PatientRelease release;  // another thread may be in the middle of an add
                writer->close();
            }
            self.writer.reset();
            const PatientRelease release;  // its table may be the last one: see BoundTable
            writer.reset();
        });
}
