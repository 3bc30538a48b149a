// For a GPU that copies rows itself: where a table's memory is, which rows a batch wants, whether they held still.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include "bind.h"
#include "sampling/uniform.h"
#include "table/history.h"

using sharpwave::Table;

namespace {

// The rows that a batch was made from, to be asked once their bytes are copied.
struct Reading {
    std::shared_ptr<Table> table;
    std::shared_ptr<sharpwave::BatchMaker> batches;
    std::vector<sharpwave::Touched> touched;

    bool holds() const {
        table->check_open();
        return batches->view().are_unchanged(touched);
    }
};

// The memory of an array that has at least so many bytes; null for None.
template <class Item>
Item* memory(nb::handle array, std::size_t items) {
    if (array.is_none()) return nullptr;
    auto* numpy = reinterpret_cast<PyArrayObject*>(array.ptr());
    if (!PyArray_Check(array.ptr()) || !PyArray_ISCARRAY(numpy) ||
        static_cast<std::size_t>(PyArray_NBYTES(numpy)) < items * sizeof(Item))
        throw nb::value_error("name_rows(): an array is too small");
    return static_cast<Item*>(PyArray_DATA(numpy));
}

// Draws a batch in turn, and says where its rows are. `places`: five arrays, see Places; `leaves`: one a leaf, for what
// rows do not hold; `extras`: discount, weights, probabilities, truncated, valid, mask, first, place_indices, indices,
// as a batch has them, or None.
Reading name_rows(BoundTable& self, std::size_t count, nb::list places, nb::list leaves, nb::list extras,
                  nb::handle timeout, bool deliver, nb::handle odds) {
    const std::shared_ptr<Table> table = self.open();
    if (static_cast<npy_intp>(count) < self.newest) throw nb::value_error("name_rows(): fewer than newest");
    if (!self.pace && table->size() == 0) sharpwave::refuse_empty();
    const std::size_t each = std::max<npy_intp>(self.tree->window(), 1), rows = count * each;
    if (places.size() != 5 || leaves.size() != self.tree->leaves().size() || extras.size() != 9)
        throw nb::value_error("name_rows(): arrays are missing");
    const std::size_t frames = rows * self.batches->view().stack();
    sharpwave::Places named{memory<std::int64_t>(places[0], rows), memory<std::int64_t>(places[1], rows),
                            memory<std::int64_t>(places[2], rows), memory<std::int64_t>(places[3], frames),
                            memory<std::int64_t>(places[4], frames)};
    if (!named.own || !named.last || !named.next || (self.batches->view().stack() > 1 && !named.next_frames))
        throw nb::value_error("name_rows(): arrays are missing");
    std::vector<std::byte*> flats(leaves.size());
    for (std::size_t i = 0; i < flats.size(); ++i)
        flats[i] = memory<std::byte>(leaves[i], rows * self.tree->leaves()[i].bytes);
    sharpwave::Outputs out{flats.data(), nullptr, memory<float>(extras[0], rows * self.batches->view().discounts()),
                           &named, memory<std::uint8_t>(extras[3], rows)};
    sharpwave::BatchExtras drawn{memory<std::uint64_t>(extras[8], count)};
    drawn.weights = memory<float>(extras[1], count);
    drawn.probabilities = memory<double>(extras[2], count);
    drawn.masks = {memory<std::uint8_t>(extras[4], rows), memory<std::uint8_t>(extras[5], rows),
                   memory<std::uint8_t>(extras[6], rows), memory<std::int64_t>(extras[7], rows)};
    const sharpwave::Deadline deadline = read_deadline(timeout.ptr());
    PaceTurn turn(self.pace, sharpwave::Pace::Side::sample, count, timeout.ptr(), deadline);
    const std::shared_ptr<sharpwave::BatchMaker> batches = self.batches;
    if (!batches) throw sharpwave::Error(sharpwave::ErrorKind::closed, "the buffer is closed");
    sharpwave::DrawOdds found;
    if (!odds.is_none()) drawn.odds = &found;
    {
        const PatientRelease release;
        batches->sample(count, out, drawn, deadline);
    }
    put_odds(odds, found);
    turn.done = true;
    if (!deliver) turn.keep();
    return {table, batches, std::move(named.touched)};
}

// Where the rows of a table are.
struct RowMemory {
    std::uintptr_t address;
    std::uint64_t row_bytes, bytes;  // of one row, and of all
    std::uint64_t file_offset;       // where they begin in the file
    std::uint64_t used_slots;        // slots that have been written to
};

RowMemory row_memory(BoundTable& self) {
    const std::shared_ptr<Table> table = self.open();
    const sharpwave::format::Region& region = table->header().regions[sharpwave::format::kRows];
    return {reinterpret_cast<std::uintptr_t>(table->view().rows), table->header().row_bytes, region.bytes,
            region.offset, table->visible_slots()};
}

std::vector<std::uint64_t> field_offsets(BoundTable& self) {
    std::vector<std::uint64_t> offsets;
    for (const sharpwave::Field& field : self.open()->layout().fields()) offsets.push_back(field.offset);
    return offsets;
}

nb::dict history(BoundTable& self) {
    const sharpwave::History h = sharpwave::history_of(*self.open());
    nb::dict result;
    result["next"] = h.next;
    result["origin"] = h.origin;
    result["writers"] = h.writers;
    result["calls"] = h.calls;
    result["sampled"] = h.sampled;
    result["redraws"] = h.redraws;
    result["added"] = h.added;
    result["voided"] = h.voided;
    result["episodes"] = h.episodes;
    result["applied"] = h.applied;
    result["stale"] = h.stale;
    result["running_max"] = h.running_max;
    return result;
}

void take_counters(BoundTable& self, const nb::dict& given) {
    const auto number = [&](const char* name) { return nb::cast<std::uint64_t>(given[name]); };
    sharpwave::History h;
    h.calls = number("calls");
    h.sampled = number("sampled");
    h.redraws = number("redraws");
    h.added = number("added");
    h.voided = number("voided");
    h.episodes = number("episodes");
    h.applied = number("applied");
    h.stale = number("stale");
    h.running_max = nb::cast<double>(given["running_max"]);
    sharpwave::take_counters(*self.open(), h);
}

void priorities_of(BoundTable& self, nb::handle serials, nb::handle priorities) {
    const std::shared_ptr<Table> table = self.open();
    const std::shared_ptr<sharpwave::BatchMaker> batches = self.batches;  // a wait lets other threads in, close() too
    if (!batches->index() || !PyArray_Check(serials.ptr()))
        throw nb::value_error("priorities_of(): rows have none, or the serials are no array");
    auto* names = reinterpret_cast<PyArrayObject*>(serials.ptr());
    if (PyArray_TYPE(names) != NPY_INT64 || !PyArray_ISCARRAY_RO(names))
        throw nb::value_error("priorities_of(): expected int64 serials");
    const auto count = static_cast<std::size_t>(PyArray_SIZE(names));
    batches->index()->priorities(static_cast<const std::uint64_t*>(PyArray_DATA(names)),
                                 memory<float>(priorities, count), count);
}

}  // namespace

void bind_direct(nb::module_& m, nb::class_<BoundTable>& table) {
    nb::class_<Reading>(m, "Reading", "Rows that a GPU copies.")
        .def("holds", &Reading::holds, "Whether none of them has changed since they were named.");
    nb::class_<RowMemory>(m, "RowMemory", "Where the rows of a table are.")
        .def_ro("address", &RowMemory::address)
        .def_ro("row_bytes", &RowMemory::row_bytes)
        .def_ro("bytes", &RowMemory::bytes)
        .def_ro("file_offset", &RowMemory::file_offset)
        .def_ro("used_slots", &RowMemory::used_slots);
    table
        .def("name_rows", &name_rows, nb::arg("count"), nb::arg("places"), nb::arg("leaves"), nb::arg("extras"),
             nb::arg("timeout").none(), nb::arg("deliver"), nb::arg("odds").none() = nb::none(),
             nb::sig("def name_rows(self, count: int, places: list[typing.Any], leaves: list[typing.Any], "
                     "extras: list[typing.Any], timeout: float | None, deliver: bool, odds: object | None = None) "
                     "-> Reading"))
        .def("row_memory", &row_memory)
        .def_prop_ro("field_offsets", &field_offsets)
        .def("history", &history, nb::sig("def history(self) -> dict[str, typing.Any]"))
        .def(
            "begin_at",
            [](BoundTable& self, std::uint64_t origin, std::uint64_t first) {
                sharpwave::begin_at(*self.open(), origin, first);
            },
            nb::arg("origin"), nb::arg("first"))
        .def("take_counters", &take_counters, nb::arg("history"),
             nb::sig("def take_counters(self, history: dict[str, typing.Any]) -> None"))
        .def("priorities_of", &priorities_of, nb::arg("serials"), nb::arg("priorities"),
             nb::sig("def priorities_of(self, serials: object, priorities: object) -> None"));
}
