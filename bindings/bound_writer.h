// A writer into a table, with what its add() must know.
#pragma once

#include <cstring>
#include <memory>
#include <optional>

#include "base/error.h"
#include "bind.h"
#include "held.h"
#include "row_intake.h"
#include "sampling/pace.h"
#include "table/table.h"
#include "table/writer.h"

// From this many bytes on, other threads of the interpreter run meanwhile.
inline constexpr std::uint64_t kReleaseBytes = 256 << 10;

// 16 bytes; other lengths are ErrorKind::schema.
sharpwave::ClientToken read_token(const char* where, const nb::bytes& token);

// What add(return_indices=True) gives: one serial a row, -1 where a row was masked out.
struct Indices {
    bool is_wanted = false;
    nb::object array;

    // Before anything is written: the memory may not be there.
    std::uint64_t* make(std::size_t rows) {
        if (!is_wanted) return nullptr;
        const auto count = static_cast<npy_intp>(rows);
        array = nb::steal(PyArray_SimpleNew(1, &count, NPY_INT64));
        if (!array.is_valid()) throw nb::python_error();
        return static_cast<std::uint64_t*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(array.ptr())));
    }
    PyObject* release() { return is_wanted ? array.release().ptr() : Py_NewRef(Py_None); }
};

struct BoundWriter : RowIntake {
    BoundWriter(const BoundTable& bound, nb::object prepare_function, nb::object read_leaf_function,
                bool takes_steps_axis, bool takes_one_row, const std::optional<nb::bytes>& client)
        : RowIntake(bound.tree, std::move(prepare_function), std::move(read_leaf_function), takes_steps_axis,
                    takes_one_row),
          writer(new_writer(bound, client)),
          pace(bound.pace) {}
    ~BoundWriter() {
        const PatientRelease release(writer != nullptr);  // its table may be the last one: see BoundTable
        writer.reset();
        pace.reset();
    }

    // Giving back what dead writers held may wait for a process that is at it.
    static std::shared_ptr<sharpwave::Writer> new_writer(const BoundTable& bound,
                                                         const std::optional<nb::bytes>& client) {
        const std::shared_ptr<sharpwave::Table> table = bound.open();
        std::optional<sharpwave::ClientToken> token;
        if (client) token = read_token("writer(): client", *client);
        const PatientRelease release;
        return token ? table->writer(*token) : table->writer();
    }

    using Result = Indices;
    const sharpwave::Table& table() const { return writer->table(); }
    void check_open() const {
        if (!writer) [[unlikely]]  // values ran Python code, which closed it
            throw sharpwave::Error(sharpwave::ErrorKind::closed, "add(): this writer is closed");
    }
    template <bool Tells>
    void take(const RowBatch& batch, const Incoming& incoming, Indices* indices);
    void take_with_care(const RowBatch& batch, PyObject* timeout, Indices& indices);

    std::shared_ptr<sharpwave::Writer> writer;  // null after close()
    std::shared_ptr<sharpwave::Pace> pace;      // null: an add never waits
};

// Whether the ends of episodes are found in this tree's rows without Python code.
bool flags_without_python(const Tree& tree);

// Rows that a client packed, without the interpreter and without a wait; see Writer::append_once(). False: it would
// have to wait, and nothing was added. `body` lies at a multiple of 8.
bool append_at_once(sharpwave::Writer& writer, const Tree& tree, sharpwave::Pace* pace, const std::byte* body,
                    std::uint64_t bytes, std::uint64_t first_row, std::uint64_t& accepted);

// Calls that take rows which a client packed; bind_packed.cpp.
void bind_packed(nb::class_<BoundWriter>& writer);
