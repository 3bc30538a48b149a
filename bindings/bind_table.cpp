#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "bind.h"
#include "errors.h"
#include "held.h"
#include "results.h"
#include "sampling/uniform.h"

using sharpwave::Table;

namespace {

// Below this the copy takes less time than letting other threads in.
constexpr std::uint64_t kReleaseBytes = 256 << 10;

// Holds the interpreter's lock for small work, lets it go for large.
class MaybeRelease {
public:
    explicit MaybeRelease(bool release) : state_(release ? PyEval_SaveThread() : nullptr) {}
    ~MaybeRelease() {
        if (state_) PyEval_RestoreThread(state_);
    }

private:
    PyThreadState* state_;
};

// A batch size: a whole number, not a truth value, that positions of 32 bits can count.
npy_intp read_batch_size(nb::handle value) {
    constexpr long long kMost = 0xffffffff;
    if (PyLong_CheckExact(value.ptr())) {
        int overflow;
        const long long size = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
        if (!overflow && size >= 1 && size <= kMost) return static_cast<npy_intp>(size);
    }
    const nb::object index = PyBool_Check(value.ptr()) ? nb::object() : nb::steal(PyNumber_Index(value.ptr()));
    long long size = 0;
    if (index.is_valid()) {
        int overflow;
        size = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
        if (overflow) size = 0;
    }
    PyErr_Clear();
    if (size < 1 || size > kMost) {
        const std::string given = nb::steal<nb::str>(PyObject_Repr(value.ptr())).c_str();
        throw sharpwave::Error(sharpwave::ErrorKind::schema, "sample(): batch_size: expected a whole number, 1 to " +
                                                                 std::to_string(kMost) + ", got " + given);
    }
    return static_cast<npy_intp>(size);
}

nb::object sample_rows(BoundTable& self, nb::handle batch_size, nb::handle out) {
    const std::shared_ptr<Table> table = self.open();
    const npy_intp rows = read_batch_size(batch_size);
    if (table->size() == 0) sharpwave::refuse_empty();
    Batch batch = out.is_none() ? new_batch(*self.tree, rows, self.last.get()) : check_out(*self.tree, rows, out);
    if (static_cast<std::uint64_t>(rows) * table->layout().payload_bytes() < kReleaseBytes) {
        sharpwave::sample_uniform(*table, static_cast<std::size_t>(rows), batch.fields.data(), batch.indices);
    } else {
        const Held held(batch.arrays.data(), batch.arrays.size());
        const nb::gil_scoped_release release;
        sharpwave::sample_uniform(*table, static_cast<std::size_t>(rows), batch.fields.data(), batch.indices);
    }
    return std::move(batch.dict);
}

void flag_truncated(const Batch& batch, const std::vector<std::uint64_t>& words) {
    for (std::size_t i = 0; i < words.size(); ++i) {
        batch.truncated[i] = (words[i] & sharpwave::format::kTruncated) != 0;
    }
}

// Rows by serial. With skip_gone, rows that left meanwhile are left out and the batch is shorter.
nb::object read_rows(BoundTable& self, nb::handle serials, bool skip_gone) {
    const std::shared_ptr<Table> table = self.open();
    auto* array = reinterpret_cast<PyArrayObject*>(serials.ptr());
    const npy_intp count = PyArray_SIZE(array);
    std::vector<std::uint64_t> wanted(static_cast<std::size_t>(count)), words(wanted.size());
    std::copy_n(static_cast<const std::uint64_t*>(PyArray_DATA(array)), count, wanted.begin());
    Batch batch = new_batch(*self.tree, count, nullptr, true);
    std::size_t skipped = 0;
    {
        const MaybeRelease release(wanted.size() * table->layout().payload_bytes() >= kReleaseBytes);
        table->read(wanted.data(), wanted.size(), batch.fields.data(), words.data(), skip_gone ? &skipped : nullptr);
    }
    if (skipped) {
        // Seldom: writers lapped the reader. Copy what is left into arrays of the right length.
        Batch shorter = new_batch(*self.tree, count - static_cast<npy_intp>(skipped), nullptr, true);
        const std::size_t left = wanted.size() - skipped;
        for (std::size_t f = 0; f < batch.fields.size(); ++f) {
            std::copy_n(batch.fields[f].flat, left * batch.fields[f].bytes, shorter.fields[f].flat);
        }
        batch = std::move(shorter);
        words.resize(left);
        wanted.resize(left);
    }
    std::copy(wanted.begin(), wanted.end(), batch.indices);
    flag_truncated(batch, words);
    return std::move(batch.dict);
}

nb::object live_serials(BoundTable& self) {
    const std::vector<std::uint64_t> serials = self.open()->live_serials();
    npy_intp count = static_cast<npy_intp>(serials.size());
    nb::object array = nb::steal(PyArray_SimpleNew(1, &count, NPY_INT64));
    if (!array.is_valid()) throw nb::python_error();
    std::copy(serials.begin(), serials.end(),
              static_cast<std::uint64_t*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(array.ptr()))));
    return array;
}

nb::dict stats(BoundTable& self) {
    const sharpwave::TableStats s = self.open()->stats();
    nb::dict result;
    const auto put = [&](const char* name, std::uint64_t value) { result[name] = value; };
    put("size", s.size);
    put("capacity", s.capacity);
    put("rows_added", s.rows_added);
    put("rows_voided", s.rows_voided);
    put("episodes", s.episodes);
    put("rows_sampled", s.rows_sampled);
    put("sample_calls", s.sample_calls);
    put("redraws", s.redraws);
    put("writers", s.writers_taken);
    put("max_writers", s.max_writers);
    put("blocks", s.blocks);
    put("block_rows", s.block_rows);
    put("row_bytes", s.row_bytes);
    put("payload_bytes", s.payload_bytes);
    put("storage_bytes", s.storage_bytes);
    put("huge_page_bytes", s.huge_page_bytes);
    put("pooled_bytes", pooled_bytes());
    put("incarnation", s.incarnation);
    put("recoveries", s.recoveries);
    put("rows_lost", s.rows_lost);
    put("seed", s.seed);
    result["copy_kernel"] = s.copy_kernel;
    return result;
}

using FieldTuple = std::tuple<std::string, std::string, std::uint32_t, std::vector<std::int64_t>>;

BoundTable create(const std::vector<FieldTuple>& fields, std::uint64_t capacity, std::uint64_t width,
                  std::uint64_t writers, std::uint64_t seed, bool checksums, const std::string& description,
                  const std::string& path, bool replace) {
    sharpwave::TableConfig config;
    for (const auto& [name, dtype, item_bytes, shape] : fields)
        config.fields.push_back({name, dtype, item_bytes, shape});
    config.capacity = capacity;
    config.width = width;
    config.max_writers = writers;
    config.seed = seed;
    config.checksums = checksums;
    config.description = description;
    const nb::gil_scoped_release release;
    return {Table::create(config, path, replace), nullptr, {}};
}

}  // namespace

void bind_table(nb::module_& m) {
    nb::class_<BoundTable>(m, "Table", "Rows over a storage.")
        .def_static("create", &create, nb::arg("fields"), nb::arg("capacity"), nb::arg("width"), nb::arg("writers"),
                    nb::arg("seed"), nb::arg("checksums"), nb::arg("description"), nb::arg("path"), nb::arg("replace"))
        .def_static(
            "attach", [](const std::string& path) { return BoundTable{Table::attach(path), nullptr, {}}; },
            nb::arg("path"), nb::call_guard<nb::gil_scoped_release>())
        .def_static(
            "load", [](const std::string& path) { return BoundTable{Table::load(path), nullptr, {}}; }, nb::arg("path"),
            nb::call_guard<nb::gil_scoped_release>())
        .def(
            "bind",
            [](BoundTable& self, std::shared_ptr<Tree> tree) {
                tree->meet(self.table->layout());
                self.tree = std::move(tree);
                self.last = std::make_shared<LastArrays>();
            },
            nb::arg("tree"), "Gives the table the shape that its rows have in Python.")
        .def("sample", &sample_rows, nb::arg("batch_size").none(), nb::arg("out").none() = nb::none(),
             nb::sig("def sample(self, batch_size: int, out: object | None = None) -> dict[str, typing.Any]"))
        .def("read", &read_rows, nb::arg("serials"), nb::arg("skip_gone"),
             nb::sig("def read(self, serials: object, skip_gone: bool) -> dict[str, typing.Any]"))
        .def("live_serials", &live_serials, nb::sig("def live_serials(self) -> typing.Any"))
        .def("stats", &stats, nb::sig("def stats(self) -> dict[str, typing.Any]"))
        .def("size", [](BoundTable& self) { return self.open()->size(); })
        .def("clear", [](BoundTable& self) { self.open()->clear(); })
        .def(
            "save",
            [](BoundTable& self, const std::string& path) {
                const std::shared_ptr<Table> table = self.open();
                const nb::gil_scoped_release release;
                table->save(path);
            },
            nb::arg("path"))
        .def("flush",
             [](BoundTable& self) {
                 const std::shared_ptr<Table> table = self.open();
                 const nb::gil_scoped_release release;
                 table->flush();
             })
        .def("close",
             [](BoundTable& self) {
                 if (self.table) self.table->close();
                 self.table.reset();
             })
        .def_prop_ro("closed", [](BoundTable& self) { return !self.table; })
        .def_prop_ro("capacity", [](BoundTable& self) { return self.open()->capacity(); })
        .def_prop_ro("width", [](BoundTable& self) { return self.open()->width(); })
        .def_prop_ro("path", [](BoundTable& self) { return self.open()->path(); })
        .def_prop_ro("description", [](BoundTable& self) { return self.open()->description(); });
    m.attr("shared_memory_folder") = sharpwave::shared_memory_folder();
}
