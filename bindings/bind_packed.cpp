// Rows that a client packed (table/packed_rows.h) into a table, each once.
#include <nanobind/stl/optional.h>

#include <cstring>
#include <string>
#include <vector>

#include "bind.h"
#include "bound_writer.h"
#include "few.h"
#include "table/packed_rows.h"

using sharpwave::Error;
using sharpwave::ErrorKind;

sharpwave::ClientToken read_token(const char* where, const nb::bytes& token) {
    sharpwave::ClientToken read;
    if (token.size() != sizeof read) {
        throw Error(ErrorKind::schema, std::string(where) + ": expected 16 bytes, got " + std::to_string(token.size()));
    }
    std::memcpy(read.data(), token.c_str(), sizeof read);
    return read;
}

namespace {

// The bytes of a contiguous buffer, at a multiple of 8.
class Body {
public:
    explicit Body(nb::handle object) {
        if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nb::python_error();
        data = static_cast<const std::byte*>(view_.buf);
        bytes = static_cast<std::uint64_t>(view_.len);
        if (reinterpret_cast<std::uintptr_t>(data) % 8 == 0) return;
        try {
            copy_.resize(bytes / 8 + 1);
        } catch (...) {
            PyBuffer_Release(&view_);
            throw;
        }
        std::memcpy(copy_.data(), data, bytes);
        data = reinterpret_cast<const std::byte*>(copy_.data());
    }
    ~Body() { PyBuffer_Release(&view_); }
    Body(const Body&) = delete;
    Body& operator=(const Body&) = delete;

    const std::byte* data;
    std::uint64_t bytes;

private:
    Py_buffer view_;
    std::vector<std::uint64_t> copy_;
};

bool is_common(const PyArray_Descr* dtype) {
    const int type = dtype->type_num;
    return type == NPY_FLOAT || type == NPY_DOUBLE || PyTypeNum_ISBOOL(type) || PyTypeNum_ISINTEGER(type);
}

[[noreturn]] void refuse_nan(const Leaf& leaf) {
    throw Error(ErrorKind::schema, "add(): field '" + leaf.name + "': expected 0 or 1, or truth values, got NaN");
}

// Truth values by NumPy, for dtypes whose zeros are not all made of zero bytes: items one after the other.
std::vector<std::uint8_t> truths_by_numpy(const Leaf& leaf, const std::vector<std::byte>& items) {
    const auto count = static_cast<npy_intp>(items.size() / static_cast<std::size_t>(PyDataType_ELSIZE(leaf.dtype)));
    Py_INCREF(leaf.dtype);
    const nb::object array =
        nb::steal(PyArray_NewFromDescr(&PyArray_Type, leaf.dtype, 1, &count, nullptr, nullptr, 0, nullptr));
    if (!array.is_valid()) throw nb::python_error();
    std::memcpy(PyArray_DATA(reinterpret_cast<PyArrayObject*>(array.ptr())), items.data(), items.size());
    if (PyTypeNum_ISFLOAT(leaf.dtype->type_num) || PyTypeNum_ISCOMPLEX(leaf.dtype->type_num)) {
        const nb::object is_whole = array.attr("__eq__")(array).attr("all")();
        if (PyObject_IsTrue(is_whole.ptr()) != 1) refuse_nan(leaf);
    }
    const nb::object truths = nb::steal(PyArray_Cast(reinterpret_cast<PyArrayObject*>(array.ptr()), NPY_BOOL));
    if (!truths.is_valid()) throw nb::python_error();
    const auto* data = static_cast<const std::uint8_t*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(truths.ptr())));
    return {data, data + count};
}

// Marks the rows of which one item is zero.
void mark_not_done(const Leaf& leaf, const FieldInput& input, std::size_t rows, std::uint8_t* not_done) {
    const auto size = static_cast<std::size_t>(PyDataType_ELSIZE(leaf.dtype));
    const std::size_t items = leaf.frame_bytes / size;
    if (!is_common(leaf.dtype)) {
        std::vector<std::byte> values(rows * leaf.frame_bytes);
        for (std::size_t i = 0; i < rows; ++i)
            std::memcpy(&values[i * leaf.frame_bytes], input.flat + i * input.stride, leaf.frame_bytes);
        const std::vector<std::uint8_t> truths = truths_by_numpy(leaf, values);
        for (std::size_t i = 0; i < truths.size(); ++i) not_done[i / items] |= !truths[i];
        return;
    }
    for (std::size_t i = 0; i < rows; ++i) {
        for (std::size_t k = 0; k < items; ++k) {
            bool done = false;
            if (!is_done(leaf.dtype, input.flat + i * input.stride + k * size, done)) refuse_nan(leaf);
            not_done[i] |= !done;
        }
    }
}

// kRowTerminated, from the values: what add() finds out before it sends rows is not sent with them.
void flag_dones(const Tree& tree, const RowBatch& batch, std::uint8_t* flags) {
    if (tree.dones().empty()) return;
    if (tree.done() >= 0) {
        const Leaf& leaf = tree.leaves()[static_cast<std::size_t>(tree.done())];
        const FieldInput& input = batch.fields[leaf.input];
        if (input.stride == leaf.frame_bytes && flag_terminated(leaf, input.flat, batch.rows, flags)) return;
    }
    Few<std::uint8_t, 64> not_done(batch.rows);
    std::memset(not_done.data(), 0, batch.rows);
    for (const std::size_t number : tree.dones()) {
        const Leaf& leaf = tree.leaves()[number];
        mark_not_done(leaf, batch.fields[leaf.input], batch.rows, not_done.data());
    }
    for (std::size_t i = 0; i < batch.rows; ++i) flags[i] |= not_done[i] ? 0 : sharpwave::kRowTerminated;
}

// New rows that the pace counts: those that were not accepted before and are not masked out.
std::uint64_t count_new(const RowBatch& batch, std::uint64_t skipped) {
    std::uint64_t rows = 0;
    for (std::size_t i = skipped; i < batch.rows; ++i) rows += !is_void(batch, i);
    return rows;
}

// The rows of a body, with kRowTerminated found from their values.
struct FlaggedRows {
    FlaggedRows(const Tree& tree, const sharpwave::Table& table, const std::byte* body, std::uint64_t bytes)
        : packed({table.layout(), table.width(), table.capacity(), table.given() != nullptr}, body, bytes),
          batch(packed.batch()),
          flags(batch.rows) {
        if (batch.flags) {
            std::memcpy(flags.data(), batch.flags, batch.rows);
        } else {
            std::memset(flags.data(), 0, batch.rows);
        }
        flag_dones(tree, batch, flags.data());
        std::uint8_t any = 0;
        for (std::size_t i = 0; i < batch.rows; ++i) any |= flags[i];
        batch.flags = any ? flags.data() : nullptr;
    }

    sharpwave::PackedRows packed;
    RowBatch batch;
    Few<std::uint8_t, 64> flags;
};

// Of rows that are counted when they are added: those that were accepted before are not.
std::uint64_t count_unknown(const sharpwave::Writer& writer, const RowBatch& batch, std::uint64_t first_row) {
    return count_new(batch, std::min<std::uint64_t>(writer.accepted() - first_row, batch.rows));
}

nb::object append_packed(const BoundWriter& self, nb::handle object, std::uint64_t first_row, bool wants_indices,
                         nb::handle timeout) {
    const std::shared_ptr<sharpwave::Writer> writer = self.writer;  // close() in another thread must not take it away
    if (!writer) throw Error(ErrorKind::closed, "append_packed(): this writer is closed");
    const sharpwave::Table& table = writer->table();
    table.check_open();
    const sharpwave::Deadline deadline = read_deadline(timeout.ptr());
    const Body body(object);
    const bool is_large = body.bytes >= kReleaseBytes;
    const FlaggedRows rows(*self.tree, table, body.data, body.bytes);
    writer->check_once(rows.batch, first_row);  // before it waits for a turn
    Indices indices{wants_indices, {}};
    std::uint64_t* serials = indices.make(rows.batch.rows);
    PaceTurn turn(self.pace, sharpwave::Pace::Side::add, count_unknown(*writer, rows.batch, first_row), timeout.ptr(),
                  deadline);
    std::uint64_t accepted = 0;
    if (is_large || !writer->try_append_once(rows.batch, first_row, serials, accepted)) {
        const PatientRelease release;
        accepted = writer->append_once(rows.batch, first_row, serials, deadline);
    }
    turn.done = true;
    if (!wants_indices) return nb::int_(accepted);
    return nb::make_tuple(accepted, indices.array);
}

}  // namespace

bool flags_without_python(const Tree& tree) {
    for (const std::size_t number : tree.dones()) {
        if (!is_common(tree.leaves()[number].dtype)) return false;
    }
    return true;
}

bool append_at_once(sharpwave::Writer& writer, const Tree& tree, sharpwave::Pace* pace, const std::byte* body,
                    std::uint64_t bytes, std::uint64_t first_row, std::uint64_t& accepted) {
    writer.table().check_open();
    const FlaggedRows rows(tree, writer.table(), body, bytes);
    writer.check_once(rows.batch, first_row);
    const std::uint64_t counted = pace ? count_unknown(writer, rows.batch, first_row) : 0;
    const auto side = sharpwave::Pace::Side::add;
    if (counted && !pace->try_reserve(side, counted, sharpwave::Deadline::in(0))) return false;
    bool done = false;
    try {
        done = writer.try_append_once(rows.batch, first_row, nullptr, accepted);
    } catch (...) {
        if (counted) pace->settle(side, counted, false);
        throw;
    }
    if (counted) pace->settle(side, counted, done);
    return done;
}

void bind_packed(nb::class_<BoundWriter>& writer) {
    writer
        .def("append_packed", &append_packed, nb::arg("body"), nb::arg("first_row"), nb::arg("wants_indices"),
             nb::arg("timeout").none() = nb::none(),
             nb::sig("def append_packed(self, body: object, first_row: int, wants_indices: bool, timeout: float | None "
                     "= None) -> typing.Any"),
             "Adds rows that a Packer packed, numbered from first_row on; those accepted before are skipped. Returns "
             "how many rows are accepted now, and if asked for the handle of each row of the body, -1 for skipped and "
             "masked ones.")
        .def_prop_ro(
            "accepted",
            [](const BoundWriter& self) {
                if (!self.writer) throw Error(ErrorKind::closed, "accepted: this writer is closed");
                return self.writer->accepted();
            },
            "How many rows of its client were accepted; 0 without a client.");
}

void bind_clients(nb::class_<BoundTable>& table) {
    table
        .def(
            "client_rows",
            [](const BoundTable& self, const nb::bytes& token) {
                const sharpwave::ClientToken client = read_token("client_rows(): token", token);
                const std::shared_ptr<sharpwave::Table> opened = self.open();
                const PatientRelease release;  // a process that looks after the dead may be at it
                return opened->accepted(client);
            },
            nb::arg("token"), "How many rows of a client were accepted; None: its token is not known here.")
        .def(
            "clients",
            [](const BoundTable& self) {
                const std::shared_ptr<sharpwave::Table> opened = self.open();
                std::vector<std::pair<sharpwave::ClientToken, std::uint64_t>> clients;
                {
                    const PatientRelease release;
                    clients = opened->clients();
                }
                nb::list result;
                for (const auto& [token, accepted] : clients)
                    result.append(nb::make_tuple(nb::bytes(token.data(), sizeof token), accepted));
                return result;
            },
            nb::sig("def clients(self) -> list[tuple[bytes, int]]"),
            "The clients whose tokens are known here, and how many rows of each were accepted.");
}
