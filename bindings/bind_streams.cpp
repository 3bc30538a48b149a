// Streams and episodes of the rows of a table: see core/table/streams.h.
#include <nanobind/stl/shared_ptr.h>

#include <algorithm>

#include "bind.h"
#include "errors.h"

using sharpwave::Table;

namespace {

nb::object int64_array(const std::vector<std::uint64_t>& numbers) {
    npy_intp count = static_cast<npy_intp>(numbers.size());
    nb::object array = nb::steal(PyArray_SimpleNew(1, &count, NPY_INT64));
    if (!array.is_valid()) throw nb::python_error();
    std::copy(numbers.begin(), numbers.end(),
              static_cast<std::uint64_t*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(array.ptr()))));
    return array;
}

// The episodes that a table had at one instant, given one by one.
class Episodes {
public:
    explicit Episodes(const BoundTable& bound) : table_(bound.open()) {
        const PatientRelease release;
        episodes_ = sharpwave::list_episodes(*table_);
    }

    // Handles, stream and id of the next one whose rows are all still there; None after the last.
    nb::object next(bool partial, bool unfinished) {
        std::vector<std::uint64_t> rows;
        const sharpwave::Episode* episode = nullptr;
        {
            const PatientRelease release;
            table_->check_open();
            while (rows.empty() && at_ < episodes_.size()) {
                episode = &episodes_[at_++];
                if (!(episode->is_whole || partial) || !(episode->is_finished || unfinished)) continue;
                rows = sharpwave::rows_of(*table_, *episode);
            }
        }
        if (rows.empty()) return nb::none();
        return nb::make_tuple(int64_array(rows), episode->stream, episode->first);
    }

    // Serials of the rows that start an episode.
    nb::object starts() const {
        std::vector<std::uint64_t> serials;
        for (const sharpwave::Episode& episode : episodes_) {
            if (episode.is_whole) serials.push_back(episode.first);
        }
        return int64_array(serials);
    }

private:
    std::shared_ptr<Table> table_;
    std::vector<sharpwave::Episode> episodes_;
    std::size_t at_ = 0;
};

}  // namespace

BoundStreams::BoundStreams(const BoundTable& bound) : table(bound.open()), streams(*table) {}

void BoundStreams::number(const std::vector<std::uint64_t>& serials, const std::vector<std::uint64_t>& words,
                          nb::handle batch) {
    static PyArray_Descr* const whole = PyArray_DescrFromType(NPY_INT64);
    const npy_intp count = static_cast<npy_intp>(serials.size());
    const nb::object ids[] = {pooled_array(whole, 1, &count), pooled_array(whole, 1, &count)};
    std::int64_t* data[2];
    for (int i = 0; i < 2; ++i) {
        data[i] = static_cast<std::int64_t*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(ids[i].ptr())));
        if (PyDict_SetItemString(batch.ptr(), i ? "episode" : "stream", ids[i].ptr()) != 0) throw nb::python_error();
    }
    streams.follow(serials.data(), words.data(), serials.size(), data[0], data[1]);
}

void bind_streams(nb::module_& m) {
    nb::class_<BoundStreams>(m, "Streams", "Tells the stream and the episode of rows that are read in order.")
        .def(nb::init<const BoundTable&>(), nb::arg("table"));
    nb::class_<Episodes>(m, "Episodes", "The episodes of a table, oldest first.")
        .def(nb::init<const BoundTable&>(), nb::arg("table"))
        .def("next", &Episodes::next, nb::arg("partial"), nb::arg("unfinished"),
             nb::sig("def next(self, partial: bool, unfinished: bool) -> tuple[typing.Any, int, int] | None"))
        .def("starts", &Episodes::starts, nb::sig("def starts(self) -> typing.Any"));
}
