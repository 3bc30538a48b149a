#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "batches/batch_maker.h"
#include "bind.h"
#include "errors.h"
#include "held.h"
#include "input_values.h"
#include "results.h"
#include "sampling/uniform.h"
#include "settings.h"
#include "table/geometry.h"

using sharpwave::Table;

void put_odds(nb::handle array, const sharpwave::DrawOdds& odds) {
    if (array.is_none()) return;
    auto* numpy = reinterpret_cast<PyArrayObject*>(array.ptr());
    if (!PyArray_Check(array.ptr()) || PyArray_TYPE(numpy) != NPY_DOUBLE || PyArray_SIZE(numpy) != 2 ||
        !PyArray_ISCARRAY(numpy))
        throw nb::value_error("odds are put into an array of two float64");
    auto* to = static_cast<double*>(PyArray_DATA(numpy));
    to[0] = odds.rows;
    to[1] = odds.scale;
}

namespace {

// Below this the copy takes less time than letting other threads in.
constexpr std::uint64_t kReleaseBytes = 256 << 10;

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

void draw(BoundTable& self, std::size_t count, Batch& batch, const sharpwave::GoalOutputs& goals,
          sharpwave::Deadline deadline, sharpwave::DrawOdds* odds = nullptr) {
    const sharpwave::BatchExtras drawn{batch.indices, batch.weights, batch.probabilities, batch.masks, goals, odds};
    const bool is_large = count * self.batches->example_bytes() >= kReleaseBytes;
    if (!is_large && !self.batches->index()) return self.batches->sample(count, batch.outputs(), drawn);  // never waits
    // While we work or wait without the interpreter's lock, another thread may close the table or empty `out`.
    const std::shared_ptr<sharpwave::BatchMaker> batches = self.batches;
    const HeldObjects held(batch.arrays.data(), batch.array_count);
    const PatientRelease release(is_large);
    batches->sample(count, batch.outputs(), drawn, deadline);
}

// What no wait can ever bring.
[[noreturn]] void refuse_size(const BoundTable& self, npy_intp rows) {
    const bool is_small = rows < self.newest;
    throw sharpwave::Error(sharpwave::ErrorKind::schema, std::string("sample(): batch_size: expected at ") +
                                                             (is_small ? "least newest=" : "most capacity=") +
                                                             std::to_string(is_small ? self.newest : self.most) +
                                                             ", got " + std::to_string(rows) +
                                                             (is_small ? "" : ": each row is given once"));
}

nb::object sample_rows(BoundTable& self, nb::handle batch_size, nb::handle out) {
    const std::shared_ptr<Table> table = self.open();
    const npy_intp rows = read_batch_size(batch_size);
    if (rows < self.newest || rows > self.most) refuse_size(self, rows);
    if (table->size() == 0) sharpwave::refuse_empty();
    Batch batch = out.is_none() ? new_batch(*self.tree, rows, self.last.get()) : check_out(*self.tree, rows, out);
    draw(self, static_cast<std::size_t>(rows), batch, {}, sharpwave::Deadline::never());
    return std::move(batch.dict);
}

// The same into tensors; false: nothing was drawn, and the careful way must look at `out`.
bool sample_tensors(BoundTable& self, nb::handle batch_size, nb::handle out) {
    const std::shared_ptr<Table> table = self.open();
    const npy_intp rows = read_batch_size(batch_size);
    if (rows < self.newest || rows > self.most || table->size() == 0) return false;
    Batch batch(self.tree->leaves().size());
    if (!lend_out(*self.tree, rows, out, batch)) return false;
    draw(self, static_cast<std::size_t>(rows), batch, {}, sharpwave::Deadline::never());
    return true;
}

// sample() without a step in Python, as a plain C function: a batch size, and `out` perhaps. Every other call goes to
// `careful`, the method of the rows.
struct TableDraw {
    nb::object table;
    nb::object careful;
};

PyObject* sample_at_once(PyObject* object, PyObject* const* args, Py_ssize_t count, PyObject* names) {
    static PyObject* const kOut = PyUnicode_InternFromString("out");
    const TableDraw& self = *nb::inst_ptr<TableDraw>(object);
    const Py_ssize_t named = names ? PyTuple_GET_SIZE(names) : 0;
    const bool has_out = named == 1 && PyTuple_GET_ITEM(names, 0) == kOut;
    BoundTable& table = *nb::inst_ptr<BoundTable>(self.table);
    // In a forked child the rows open their file again.
    const bool is_foreign = table.table && table.table->is_from_another_process();
    if (count != 1 || (named && !has_out) || is_foreign)
        return PyObject_Vectorcall(self.careful.ptr(), args, static_cast<std::size_t>(count), names);
    return translating([&] { return sample_rows(table, args[0], has_out ? args[1] : Py_None).release().ptr(); });
}

PyMethodDef draw_methods[] = {
    {"sample", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(sample_at_once)),
     METH_FASTCALL | METH_KEYWORDS, "sample($self, batch_size, /, **kwargs)\n--\n\nSee ReplayBuffer.sample."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot draw_slots[] = {{Py_tp_methods, draw_methods}, {0, nullptr}};

// The same in turn. With deliver=False the rows stay reserved until settle() says what became of them.
Batch draw_in_turn(BoundTable& self, nb::handle batch_size, nb::handle out, nb::handle timeout, bool deliver,
                   sharpwave::GoalOutputs* goals, nb::handle odds) {
    const std::shared_ptr<Table> table = self.open();
    const npy_intp rows = read_batch_size(batch_size);
    if (rows < self.newest || rows > self.most) refuse_size(self, rows);
    if (!self.pace && table->size() == 0) sharpwave::refuse_empty();
    const auto count = static_cast<std::size_t>(rows);
    Batch batch = out.is_none() ? new_batch(*self.tree, rows, self.last.get()) : check_out(*self.tree, rows, out);
    if (goals) goals->relabelled = batch.relabelled;
    const HeldObjects held(batch.arrays.data(), batch.array_count);  // a wait lets other threads in
    const sharpwave::Deadline deadline = read_deadline(timeout.ptr());
    PaceTurn turn(self.pace, sharpwave::Pace::Side::sample, count, timeout.ptr(), deadline);
    if (!self.batches) throw sharpwave::Error(sharpwave::ErrorKind::closed, "the buffer is closed");
    sharpwave::DrawOdds found;
    draw(self, count, batch, goals ? *goals : sharpwave::GoalOutputs{}, deadline, odds.is_none() ? nullptr : &found);
    put_odds(odds, found);
    turn.done = true;
    if (!deliver) turn.keep();
    return batch;
}

nb::object sample_in_turn(BoundTable& self, nb::handle batch_size, nb::handle out, nb::handle timeout, bool deliver,
                          nb::handle odds) {
    return std::move(draw_in_turn(self, batch_size, out, timeout, deliver, nullptr, odds).dict);
}

// What became of a batch that was left open.
void settle(const BoundTable& self, const std::uint64_t* serials, std::size_t count, bool delivered) {
    // A wait lets other threads in, close() too.
    const std::shared_ptr<sharpwave::BatchMaker> batches = self.batches;
    const std::shared_ptr<sharpwave::Pace> pace = self.pace;
    if (!delivered && batches->index()) batches->index()->give_back(serials, count);
    if (pace) pace->settle(sharpwave::Pace::Side::sample, count, delivered);
}

// Of a batch with hindsight: the positions that got another goal, those goals and what was achieved there.
nb::tuple relabelled_parts(const BoundTable& self, Batch& batch, nb::handle goals, std::size_t leaf) {
    const auto data = [](nb::handle array) { return PyArray_DATA(reinterpret_cast<PyArrayObject*>(array.ptr())); };
    auto* all = reinterpret_cast<PyArrayObject*>(goals.ptr());
    const npy_intp count = PyArray_DIM(all, 0);
    npy_intp changed = 0;
    for (npy_intp i = 0; i < count; ++i) changed += batch.relabelled[i];
    nb::object rows = nb::steal(PyArray_SimpleNew(1, &changed, NPY_INT64));
    std::vector<npy_intp> shape(PyArray_DIMS(all), PyArray_DIMS(all) + PyArray_NDIM(all));
    shape[0] = changed;
    Py_INCREF(PyArray_DESCR(all));
    nb::object there = nb::steal(PyArray_NewFromDescr(&PyArray_Type, PyArray_DESCR(all), PyArray_NDIM(all),
                                                      shape.data(), nullptr, nullptr, 0, nullptr));
    if (!rows.is_valid() || !there.is_valid()) throw nb::python_error();
    auto* positions = static_cast<std::int64_t*>(data(rows));
    auto* to = static_cast<std::byte*>(data(there));
    const std::uint64_t bytes = self.tree->leaves().at(leaf).bytes;
    for (npy_intp i = 0; i < count; ++i) {
        if (!batch.relabelled[i]) continue;
        *positions++ = i;
        std::memcpy(to, batch.flats[leaf] + static_cast<std::uint64_t>(i) * bytes, bytes);
        to += bytes;
    }
    nb::object chosen = goals[nb::slice(nb::int_(0), nb::int_(changed), nb::none())];
    return nb::make_tuple(batch.dict, rows, chosen, there);
}

// With hindsight, undelivered. The arrays are the caller's, of a batch's length: goals, and of n-step examples what was
// achieved after each step, and the number of steps. Returns the batch, the positions that got another goal, those
// goals and what was achieved there, `leaf` of the batch.
nb::tuple sample_goals(BoundTable& self, nb::handle batch_size, nb::handle out, nb::handle timeout, nb::handle goals,
                       nb::handle achieved, nb::handle steps, std::size_t leaf, nb::handle odds) {
    const auto data = [](nb::handle array) {
        if (!PyArray_Check(array.ptr())) return static_cast<void*>(nullptr);
        return PyArray_DATA(reinterpret_cast<PyArrayObject*>(array.ptr()));
    };
    sharpwave::GoalOutputs places;
    places.goals = static_cast<std::byte*>(data(goals));
    places.achieved = static_cast<std::byte*>(data(achieved));
    places.steps = static_cast<std::uint32_t*>(data(steps));
    Batch batch = draw_in_turn(self, batch_size, out, timeout, false, &places, odds);
    try {
        return relabelled_parts(self, batch, goals, leaf);
    } catch (...) {  // no memory: the caller does not get the batch
        settle(self, batch.indices,
               static_cast<std::size_t>(PyArray_DIM(reinterpret_cast<PyArrayObject*>(goals.ptr()), 0)), false);
        throw;
    }
}

// A reference of the caller's own, as BoundTable::open() gives.
std::shared_ptr<sharpwave::BatchMaker> batches_of(BoundTable& self) {
    self.open();
    return self.batches;
}

// Serials and priorities are contiguous arrays of int64 and float32 of one length, checked by the caller.
std::pair<std::uint64_t, std::uint64_t> update_priorities(BoundTable& self, nb::handle serials, nb::handle priorities,
                                                          nb::handle timeout) {
    const std::shared_ptr<Table> table = self.open();
    auto* names = reinterpret_cast<PyArrayObject*>(serials.ptr());
    auto* values = reinterpret_cast<PyArrayObject*>(priorities.ptr());
    const auto fits = [](PyArrayObject* array, int type) {
        return PyArray_Check(reinterpret_cast<PyObject*>(array)) && PyArray_TYPE(array) == type &&
               PyArray_NDIM(array) == 1 && PyArray_ISCARRAY_RO(array);
    };
    if (!fits(names, NPY_INT64) || !fits(values, NPY_FLOAT) || PyArray_SIZE(names) != PyArray_SIZE(values)) {
        throw nb::value_error("update_priorities() takes int64 and float32 arrays of one length");
    }
    const auto count = static_cast<std::size_t>(PyArray_SIZE(names));
    const auto* from = static_cast<const std::uint64_t*>(PyArray_DATA(names));
    const auto* with = static_cast<const float*>(PyArray_DATA(values));
    const std::shared_ptr<sharpwave::BatchMaker> batches = self.batches;
    const sharpwave::Deadline deadline = read_deadline(timeout.ptr());
    const PatientRelease release(count > 8192);
    const auto updated = batches->index()->update(from, with, count, deadline);
    return {updated.applied, updated.stale};
}

// Without a step in Python: arrays as sample() and NumPy give them, tensors, lists. None: the careful way must look.
nb::object update_at_once(BoundTable& self, nb::handle serials, nb::handle priorities, nb::handle timeout) {
    InputMemory memory;
    GivenArray names, values;
    if (!read_value(serials.ptr(), memory, names) || !read_value(priorities.ptr(), memory, values)) return nb::none();
    const bool is_flat = values.dimensions == 1 || (values.dimensions == 2 && values.shape[1] == 1);  // as of critics
    if (names.dimensions != 1 || !is_flat || names.shape[0] != values.shape[0]) return nb::none();
    const auto count = static_cast<std::size_t>(names.shape[0]);
    if (count > 8192 || !PyTypeNum_ISINTEGER(names.type)) return nb::none();
    static const PyArray_Descr* const whole = PyArray_DescrFromType(NPY_INT64);
    const auto* rows = reinterpret_cast<const std::uint64_t*>(convert(names, whole, memory));
    auto* magnitudes = reinterpret_cast<float*>(memory.room(count * sizeof(float)));
    if (!rows || !convert_priorities(values, magnitudes, memory)) return nb::none();
    const std::shared_ptr<sharpwave::BatchMaker> batches =
        batches_of(self);  // a wait lets other threads in, close() too
    const auto updated = batches->index()->update(rows, magnitudes, count, read_deadline(timeout.ptr()));
    nb::dict result;
    result["applied"] = updated.applied;
    result["stale"] = updated.stale;
    return result;
}

void flag_truncated(const Batch& batch, const std::vector<std::uint64_t>& words) {
    for (std::size_t i = 0; i < words.size(); ++i) {
        batch.truncated[i] = (words[i] & sharpwave::format::kTruncated) != 0;
    }
}

// Rows by serial. With skip_gone, rows that left meanwhile are left out and the batch is shorter. With streams, serials
// come in their order, over all calls.
nb::object read_rows(BoundTable& self, nb::handle serials, bool skip_gone, BoundStreams* streams) {
    const std::shared_ptr<Table> table = self.open();
    const std::shared_ptr<sharpwave::BatchMaker> batches = self.batches;
    auto* array = reinterpret_cast<PyArrayObject*>(serials.ptr());
    const npy_intp count = PyArray_SIZE(array);
    std::vector<std::uint64_t> wanted(static_cast<std::size_t>(count)), words(wanted.size());
    std::copy_n(static_cast<const std::uint64_t*>(PyArray_DATA(array)), count, wanted.begin());
    Batch batch = new_batch(*self.tree, count, nullptr, true);
    std::size_t skipped = 0;
    {
        const PatientRelease release(wanted.size() * batches->view().example_bytes() >= kReleaseBytes);
        sharpwave::Outputs outputs = batch.outputs();
        outputs.truncated = nullptr;  // flag_truncated() tells it once it is known which rows are left
        batches->read(wanted.data(), wanted.size(), outputs, words.data(), skip_gone ? &skipped : nullptr);
    }
    if (skipped) {
        // Seldom: writers lapped the reader. Copy what is left into arrays of the right length.
        Batch shorter = new_batch(*self.tree, count - static_cast<npy_intp>(skipped), nullptr, true);
        const std::size_t left = wanted.size() - skipped;
        for (std::size_t f = 0; f < batch.flats.size(); ++f) {
            std::copy_n(batch.flats[f], left * self.tree->leaves()[f].bytes, shorter.flats[f]);
            if (batch.is_ragged && batch.lengths[f]) std::copy_n(batch.lengths[f], left, shorter.lengths[f]);
        }
        batch = std::move(shorter);
        words.resize(left);
        wanted.resize(left);
    }
    std::copy(wanted.begin(), wanted.end(), batch.indices);
    flag_truncated(batch, words);
    if (streams) streams->number(wanted, words, batch.dict);
    return std::move(batch.dict);
}

nb::object live_serials(BoundTable& self) {
    const std::shared_ptr<Table> table = self.open();
    std::vector<std::uint64_t> serials;
    {
        const PatientRelease release;
        serials = table->live_serials();
    }
    npy_intp count = static_cast<npy_intp>(serials.size());
    nb::object array = nb::steal(PyArray_SimpleNew(1, &count, NPY_INT64));
    if (!array.is_valid()) throw nb::python_error();
    std::copy(serials.begin(), serials.end(),
              static_cast<std::uint64_t*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(array.ptr()))));
    return array;
}

nb::dict stats(BoundTable& self) {
    const std::shared_ptr<Table> table = self.open();
    const std::shared_ptr<sharpwave::BatchMaker> batches = self.batches;
    const std::shared_ptr<sharpwave::Pace> pace = self.pace;
    sharpwave::TableStats s;
    {
        // The records of dead writers are given back, which may wait for another process that does it already.
        const PatientRelease release;
        s = table->stats();
    }
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
    put("pooled_bytes", pooled_bytes());
    put("incarnation", s.incarnation);
    put("recoveries", s.recoveries);
    put("writers_reclaimed", s.writers_reclaimed);
    put("index_takeovers", s.index_takeovers);
    put("rows_lost", s.rows_lost);
    put("seed", s.seed);
    put("resets_unflagged", s.resets_unflagged);
    put("rows_retired", s.rows_retired);
    put("heap_bytes", s.heap_bytes);
    put("updates_applied", s.updates_applied);
    put("updates_stale", s.updates_stale);
    if (pace) {
        const sharpwave::Pace::Counts counts = pace->counts();
        put("pace_inserts", counts.inserts);
        put("pace_samples", counts.samples);
        put("pace_waiting", counts.waiting);
    }
    if (table->has_index()) {
        put("epoch", s.shuffle_epoch);
        put("rows_consumed", s.rows_consumed);
    }
    if (table->header().sampler == 1 && batches) {  // else nobody has said yet how to draw: see bind()
        result["alpha"] = batches->index()->alpha();
        result["beta"] = batches->index()->beta();
    }
    result["copy_kernel"] = s.copy_kernel;
    return result;
}

// How many blocks a table has, and rows of a block: serials follow from it.
std::pair<std::uint64_t, std::uint64_t> plan_blocks(const std::vector<sharpwave::Field>& fields, std::uint64_t capacity,
                                                    std::uint64_t width, std::uint64_t writers) {
    sharpwave::TableConfig config;
    config.fields = fields;
    config.capacity = capacity;
    config.width = width;
    config.max_writers = writers;
    const sharpwave::format::Header header = sharpwave::plan(config, sharpwave::RowLayout(config.fields));
    return {header.blocks, header.block_rows};
}

BoundTable create(const std::vector<sharpwave::Field>& fields, std::uint64_t capacity, std::uint64_t width,
                  std::uint64_t writers, std::uint64_t seed, bool checksums, const std::optional<IndexSetup>& index,
                  const std::string& description, const std::string& path, bool replace) {
    sharpwave::TableConfig config;
    config.fields = fields;
    config.capacity = capacity;
    config.width = width;
    config.max_writers = writers;
    config.seed = seed;
    config.checksums = checksums;
    if (index) {
        config.index = index->columns;
        config.set_counters = index->exponents.writer();
    }
    config.description = description;
    std::shared_ptr<Table> table;
    {
        const PatientRelease release;
        table = Table::create(config, path, replace);
    }
    return BoundTable(std::move(table));
}

void check_goals(const Tree& tree, const GoalSettings& goals) {
    const std::vector<Leaf>& leaves = tree.leaves();
    bool fits = goals.achieved < leaves.size();
    for (std::size_t other : goals.desired)
        fits = fits && other < leaves.size() && leaves[other].bytes == leaves[goals.achieved].bytes;
    if (!fits) throw nb::value_error("the view and the table differ");
}

// The settings are those that src/sharpwave/settings.py makes of a sampler, a view and a pace.
void bind_tree_to(BoundTable& self, std::shared_ptr<Tree> tree, const BatchSettings& settings) {
    const Table& table = *self.table;
    tree->meet(table.layout());
    sharpwave::BatchConfig config{sharpwave::ViewConfig{settings.n_step, settings.gamma, {}}};
    for (const Leaf& leaf : tree->leaves()) config.view.leaves.push_back(leaf.place);
    for (const auto& [done, reward] : settings.agents) {
        if (done >= tree->leaves().size() || reward >= tree->leaves().size())
            throw nb::value_error("the view and the table differ");
        config.view.agents.push_back({done, reward});
        config.view.leaves[done].role = sharpwave::Role::reward;  // made of all steps, as the rewards are
    }
    config.newest = settings.newest;
    config.index = settings.index;
    config.windows = settings.windows;
    bool fits = settings.index.has_value() == table.has_index();
    if (const auto& index = settings.index; index && fits) {
        fits = (index->max_reads > 1) == (table.reads() != nullptr) &&
               !index->starts.is_any() == (table.episodes() != nullptr);
    }
    if (!fits) throw nb::value_error("the sampler and the table differ");
    if (const auto& goals = settings.goals) {
        check_goals(*tree, *goals);
        config.goals = {goals->strategy, goals->ratio, tree->leaves()[goals->achieved].place, settings.n_step,
                        goals->desired};
    }
    self.newest = static_cast<npy_intp>(settings.newest);
    if (const auto& index = settings.index;
        index && index->order != sharpwave::Order::weighted && index->order != sharpwave::Order::recent) {
        self.most = static_cast<npy_intp>(table.capacity());
    }
    self.batches = std::make_shared<sharpwave::BatchMaker>(self.table, std::move(config));
    if (settings.pace) {
        self.pace = std::make_shared<sharpwave::Pace>(self.table, self.batches->shared_index(), *settings.pace);
    }
    self.tree = std::move(tree);
    self.last = std::make_shared<LastArrays>();
}

}  // namespace

void bind_table(nb::module_& m) {
    nb::class_<BoundTable> table(m, "Table", "Rows over a storage.");
    nb::class_<TableDraw>(m, "Draw", nb::type_slots(draw_slots), "The sample() of a table.")
        .def(
            "__init__",
            [](TableDraw* self, nb::object of, nb::object careful) {
                if (!nb::isinstance<BoundTable>(of)) throw nb::type_error("Draw() takes a Table");
                new (self) TableDraw{std::move(of), std::move(careful)};
            },
            nb::arg("table"), nb::arg("careful"), nb::sig("def __init__(self, table: Table, careful: object) -> None"));
    bind_direct(m, table);
    bind_write(table);
    bind_clients(table);
    table
        .def_static("create", &create, nb::arg("fields"), nb::arg("capacity"), nb::arg("width"), nb::arg("writers"),
                    nb::arg("seed"), nb::arg("checksums"), nb::arg("index").none(), nb::arg("description"),
                    nb::arg("path"), nb::arg("replace"))
        .def_static(
            "attach",
            [](const std::string& path, bool recover, bool verify, double timeout) {
                const Table::Opening opening{recover, verify, sharpwave::Deadline::in(timeout)};
                std::shared_ptr<Table> table;
                {
                    const PatientRelease release;
                    table = Table::attach(path, opening);
                }
                return BoundTable(std::move(table));
            },
            nb::arg("path"), nb::arg("recover") = false, nb::arg("verify") = true, nb::arg("timeout") = 1e18)
        .def_static(
            "holders",
            [](const std::string& path) {
                const PatientRelease release;
                return Table::holders(path);
            },
            nb::arg("path"), "Process ids of those who have a live file open.")
        .def_static(
            "load",
            [](const std::string& path, bool recover) {
                std::shared_ptr<Table> table;
                {
                    const PatientRelease release;
                    table = Table::load(path, recover);
                }
                return BoundTable(std::move(table));
            },
            nb::arg("path"), nb::arg("recover") = false)
        .def("bind", &bind_tree_to, nb::arg("tree"), nb::arg("settings"),
             "Gives the table the shape that its rows have in Python, its view and its sampler.")
        .def("update_priorities", &update_priorities, nb::arg("serials"), nb::arg("priorities"),
             nb::arg("timeout").none() = nb::none(),
             nb::sig("def update_priorities(self, serials: object, priorities: object, timeout: float | None = None) "
                     "-> tuple[int, int]"))
        .def("update_at_once", &update_at_once, nb::arg("serials").none(), nb::arg("priorities").none(),
             nb::arg("timeout").none() = nb::none(),
             nb::sig("def update_at_once(self, serials: object, priorities: object, timeout: float | None = None) "
                     "-> dict[str, int] | None"))
        .def(
            "set_alpha",
            [](BoundTable& self, double alpha) {
                const std::shared_ptr<sharpwave::BatchMaker> batches = batches_of(self);
                const PatientRelease release;
                batches->index()->set_alpha(alpha);
            },
            nb::arg("alpha"))
        .def(
            "set_beta",
            [](BoundTable& self, double start, double end, double steps) {
                const std::shared_ptr<sharpwave::BatchMaker> batches = batches_of(self);
                const PatientRelease release;
                batches->index()->set_beta(start, end, steps);
            },
            nb::arg("start"), nb::arg("end"), nb::arg("steps"))
        .def("exponents",
             [](BoundTable& self) {
                 const std::shared_ptr<sharpwave::BatchMaker> batches = batches_of(self);
                 return batches->index()->exponents();
             })
        .def("sample", &sample_rows, nb::arg("batch_size").none(), nb::arg("out").none() = nb::none(),
             nb::sig("def sample(self, batch_size: int, out: object | None = None) -> dict[str, typing.Any]"))
        .def("sample_tensors", &sample_tensors, nb::arg("batch_size").none(), nb::arg("out").none(),
             nb::sig("def sample_tensors(self, batch_size: int, out: object) -> bool"))
        .def("sample_in_turn", &sample_in_turn, nb::arg("batch_size").none(), nb::arg("out").none(),
             nb::arg("timeout").none(), nb::arg("deliver"), nb::arg("odds").none() = nb::none(),
             nb::sig("def sample_in_turn(self, batch_size: int, out: object | None, timeout: float | None, "
                     "deliver: bool, odds: object | None = None) -> dict[str, typing.Any]"))
        .def("sample_goals", &sample_goals, nb::arg("batch_size").none(), nb::arg("out").none(),
             nb::arg("timeout").none(), nb::arg("goals"), nb::arg("achieved").none(), nb::arg("steps").none(),
             nb::arg("leaf"), nb::arg("odds").none() = nb::none(),
             nb::sig("def sample_goals(self, batch_size: int, out: object | None, timeout: float | None, "
                     "goals: object, achieved: object | None, steps: object | None, leaf: int, "
                     "odds: object | None = None) "
                     "-> tuple[dict[str, typing.Any], typing.Any, typing.Any, typing.Any]"))
        .def(
            "settle",
            [](BoundTable& self, nb::handle serials, bool delivered) {
                if (!self.table || self.table->is_closed()) return;
                auto* array = reinterpret_cast<PyArrayObject*>(serials.ptr());
                if (!PyArray_Check(serials.ptr()) || PyArray_TYPE(array) != NPY_INT64 || !PyArray_ISCARRAY_RO(array))
                    throw nb::value_error("settle() takes the serials of a batch");
                const auto count = static_cast<std::size_t>(PyArray_SIZE(array));
                settle(self, static_cast<const std::uint64_t*>(PyArray_DATA(array)), count, delivered);
            },
            nb::arg("serials"), nb::arg("delivered"),
            nb::sig("def settle(self, serials: object, delivered: bool) -> None"),
            "What became of a batch that sample_in_turn() left open.")
        .def("pace_mark", [](BoundTable& self) { return self.pace ? self.pace->mark() : 0u; })
        .def(
            "pace_wait",
            [](BoundTable& self, std::uint32_t mark, double seconds) {
                const std::shared_ptr<sharpwave::Pace> pace = self.pace;
                if (!pace) throw sharpwave::Error(sharpwave::ErrorKind::closed, "the buffer is closed");
                const PatientRelease release;
                pace->wait(mark, seconds);
                return pace->mark();
            },
            nb::arg("mark"), nb::arg("seconds"))
        .def("read", &read_rows, nb::arg("serials"), nb::arg("skip_gone"), nb::arg("streams").none() = nb::none(),
             nb::sig("def read(self, serials: object, skip_gone: bool, streams: Streams | None = None) "
                     "-> dict[str, typing.Any]"))
        .def("live_serials", &live_serials, nb::sig("def live_serials(self) -> typing.Any"))
        .def("stats", &stats, nb::sig("def stats(self) -> dict[str, typing.Any]"))
        .def("huge_page_bytes",
             [](BoundTable& self) {
                 const std::shared_ptr<Table> table = self.open();
                 const PatientRelease release;  // for milliseconds
                 return table->huge_page_bytes();
             })
        .def("size", [](BoundTable& self) { return self.open()->size(); })
        .def("clear",
             [](BoundTable& self) {
                 self.open()->clear();
                 if (self.pace) self.pace->ring();
             })
        .def(
            "save",
            [](BoundTable& self, const std::string& path, bool incremental) {
                const std::shared_ptr<Table> table = self.open();
                const PatientRelease release;
                table->save(path, incremental);
            },
            nb::arg("path"), nb::arg("incremental") = false)
        .def("flush",
             [](BoundTable& self) {
                 const std::shared_ptr<Table> table = self.open();
                 const PatientRelease release;
                 table->flush();
             })
        .def("close",
             [](BoundTable& self) {
                 if (self.table) self.table->close();
                 if (self.pace) self.pace->ring();
                 self.let_go();
             })
        .def_prop_ro("closed", [](BoundTable& self) { return !self.table; })
        .def_prop_ro("capacity", [](BoundTable& self) { return self.open()->capacity(); })
        .def_prop_ro("lost_at_open", [](BoundTable& self) { return self.open()->lost_at_open(); })
        .def_prop_ro("width", [](BoundTable& self) { return self.open()->width(); })
        .def_prop_ro("path", [](BoundTable& self) { return self.open()->path(); })
        .def_prop_ro(
            "uuid",
            [](BoundTable& self) {
                const std::shared_ptr<sharpwave::Table> table = self.open();
                return nb::bytes(table->header().uuid, sizeof table->header().uuid);
            },
            "Of the table, from its creation on: 16 random bytes.")
        .def_prop_ro(
            "field_names",
            [](BoundTable& self) {
                nb::list names;
                for (const sharpwave::Field& field : self.open()->layout().fields()) names.append(nb::cast(field.name));
                return names;
            },
            nb::sig("def field_names(self) -> list[str]"))
        .def_prop_ro("description", [](BoundTable& self) { return self.open()->description(); });
    m.def("plan_blocks", &plan_blocks, nb::arg("fields"), nb::arg("capacity"), nb::arg("width"), nb::arg("writers"));
    m.def(
        "wait_for_file",
        [](const std::string& path, double seconds) {
            const PatientRelease release;
            return sharpwave::wait_for_file(path, sharpwave::Deadline::in(seconds));
        },
        nb::arg("path"), nb::arg("seconds"));
    m.attr("shared_memory_folder") = sharpwave::shared_memory_folder();
}
