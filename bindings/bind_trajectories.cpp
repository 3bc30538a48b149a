// Trajectories: which rows are drawn, and the copying of them out of slabs. A slab is an array of bytes, in memory or
// mapped; the objects here hold references to slabs, so that none goes away during a call.
#include <fcntl.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <deque>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "bind.h"
#include "trajectories/arena.h"
#include "trajectories/mapped_file.h"
#include "trajectories/rows.h"

using namespace sharpwave;

namespace {

using Anys = nb::typed<nb::list, nb::any>;

// Bytes from which a copy is worth letting other threads run: getting the interpreter's lock back may take longer.
constexpr std::size_t kAlone = std::size_t{1} << 20;

PyArrayObject* bytes_of(nb::handle array, bool is_written) {
    auto* object = reinterpret_cast<PyArrayObject*>(array.ptr());
    if (!PyArray_Check(array.ptr()) || !PyArray_IS_C_CONTIGUOUS(object) ||
        (is_written && !PyArray_ISWRITEABLE(object))) {
        throw Error(ErrorKind::schema, "trajectories: expected a contiguous array; this is a defect of Sharpwave");
    }
    return object;
}

std::byte* data_of(nb::handle array, std::size_t bytes, bool is_written) {
    PyArrayObject* object = bytes_of(array, is_written);
    if (static_cast<std::size_t>(PyArray_NBYTES(object)) < bytes) {
        throw Error(ErrorKind::schema, "trajectories: an array is too small; this is a defect of Sharpwave");
    }
    return static_cast<std::byte*>(PyArray_DATA(object));
}

// What a row of each leaf is.
struct RowKind {
    nb::object dtype;
    std::vector<npy_intp> shape;
    std::size_t row_bytes;
};
struct RowKinds {
    std::vector<RowKind> leaves;
};

// A slab that is in memory or mapped, and where its rows are.
struct HeldSlab {
    nb::object slab, layout;
    RowPlace place;

    HeldSlab() = default;
    HeldSlab(nb::object bytes, nb::object kind) : slab(std::move(bytes)), layout(std::move(kind)) {
        const auto* found = nb::cast<const SlabLayout*>(layout);
        place.slab = data_of(slab, found->bytes, false);
        place.leaves = found->leaves.data();
        place.leaf_count = static_cast<std::uint32_t>(found->leaves.size());
        place.envs = found->envs;
        place.record_bytes = found->record_bytes;
    }
};

// The slabs of trajectories that are in memory. A draw points into them without holding each one: taking hold of a
// thousand objects that no cache has costs more than copying their rows. What is let go meanwhile is buried, and dies
// when every draw that began before is done. Under the interpreter's lock.
class Slabs {
public:
    // What a draw has to know of one: 16 bytes, so that those of many trajectories stay in the caches.
    struct Spot {
        const std::byte* data = nullptr;
        const SlabLayout* layout = nullptr;
    };

    std::vector<Spot> spots;
    std::vector<HeldSlab> held;

    void append() {
        spots.emplace_back();
        held.emplace_back();
    }
    void set(std::size_t at, HeldSlab slab) {
        const auto* layout = slab.slab ? nb::cast<const SlabLayout*>(slab.layout) : nullptr;
        spots[at] = {slab.place.slab, layout};
        std::swap(held[at], slab);
        if (slab.slab && !active_.empty()) buried_.emplace_back(clock_++, std::move(slab));
    }
    void drop_front(std::size_t count) {
        spots.erase(spots.begin(), spots.begin() + static_cast<std::ptrdiff_t>(count));
        held.erase(held.begin(), held.begin() + static_cast<std::ptrdiff_t>(count));
    }

    std::uint64_t begin() { return *active_.insert(clock_++); }
    void end(std::uint64_t began) {
        active_.erase(active_.find(began));
        while (!buried_.empty() && (active_.empty() || buried_.front().first < *active_.begin())) buried_.pop_front();
    }

private:
    std::uint64_t clock_ = 0;
    std::multiset<std::uint64_t> active_;
    std::deque<std::pair<std::uint64_t, HeldSlab>> buried_;
};

// Some drawn rows.
struct TrajectoryDraw {
    nb::object ids, steps, envs;
    std::vector<RowPlace> rows;
    std::vector<HeldSlab> held;                                 // what fill() brought
    std::vector<std::pair<std::int64_t, std::size_t>> missing;  // (number, row), sorted: fill() brings their slabs
    std::shared_ptr<Slabs> slabs;
    std::uint64_t began;

    explicit TrajectoryDraw(std::shared_ptr<Slabs> from) : slabs(std::move(from)), began(slabs->begin()) {}
    TrajectoryDraw(TrajectoryDraw&& other) noexcept = default;
    ~TrajectoryDraw() {
        if (slabs) slabs->end(began);
    }

    void fill(std::int64_t number, nb::object slab, nb::object layout) {
        const HeldSlab found(std::move(slab), std::move(layout));
        const auto* kind = nb::cast<const SlabLayout*>(found.layout);
        auto at = std::lower_bound(missing.begin(), missing.end(), std::pair{number, std::size_t{0}});
        for (; at != missing.end() && at->first == number; ++at) {
            RowPlace& row = rows[at->second];
            if (row.step >= kind->steps || row.env >= kind->envs) {
                throw Error(ErrorKind::storage, "trajectory number " + std::to_string(number) + " has no step " +
                                                    std::to_string(row.step) + " of environment " +
                                                    std::to_string(row.env));
            }
            row.slab = found.place.slab;
            row.leaves = found.place.leaves;
            row.envs = found.place.envs;
            row.record_bytes = found.place.record_bytes;
            row.leaf_count = found.place.leaf_count;
        }
        held.push_back(found);
    }

    // One new array a leaf.
    Anys gather(const RowKinds& kinds) {
        Anys arrays;
        std::vector<LeafTarget> to;
        std::size_t bytes = 0;
        for (const RowKind& kind : kinds.leaves) {
            npy_intp shape[64] = {static_cast<npy_intp>(rows.size())};
            std::copy(kind.shape.begin(), kind.shape.end(), shape + 1);
            nb::object array = pooled_array(reinterpret_cast<PyArray_Descr*>(kind.dtype.ptr()),
                                            static_cast<int>(kind.shape.size()) + 1, shape);
            auto* data = static_cast<std::byte*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(array.ptr())));
            to.push_back({data, kind.row_bytes});
            bytes += kind.row_bytes * rows.size();
            arrays.append(array);
        }
        const LeafPlace* checked = nullptr;  // the rows of one layout mostly follow each other
        for (const RowPlace& row : rows) {
            if (!row.slab) throw Error(ErrorKind::schema, "gather: a slab is missing; this is a defect of Sharpwave");
            if (row.leaves == checked) continue;
            checked = row.leaves;
            for (std::size_t leaf = 0; leaf < to.size(); ++leaf) {
                if (row.leaf_count != to.size() || checked[leaf].row_bytes != to[leaf].row_bytes)
                    throw Error(ErrorKind::schema, "gather: rows of another kind; this is a defect of Sharpwave");
            }
        }
        if (bytes < kAlone) {
            gather_rows(rows.data(), rows.size(), to.data(), to.size());
        } else {
            const PatientRelease release;
            gather_rows(rows.data(), rows.size(), to.data(), to.size());
        }
        return arrays;
    }
};

nb::object new_int64(std::size_t count) {
    npy_intp shape = static_cast<npy_intp>(count);
    PyObject* array = PyArray_SimpleNew(1, &shape, NPY_INT64);
    if (!array) throw nb::python_error();
    return nb::steal(array);
}

std::int64_t* int64_of(const nb::object& array) {
    return static_cast<std::int64_t*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(array.ptr())));
}

// The sizes of trajectories, and the slabs of those that are in memory. Calls come under the interpreter's lock and
// the buffer's own.
struct Trajectories {
    TrajectorySizes sizes;
    std::shared_ptr<Slabs> slabs = std::make_shared<Slabs>();  // of trajectories from number `base` on
    std::vector<std::int64_t> ids;
    std::uint64_t base = 0;

    std::size_t at(std::uint64_t number) const {
        if (number < sizes.first() || number >= sizes.first() + sizes.size())
            throw Error(ErrorKind::stale_handle, "there is no trajectory number " + std::to_string(number));
        return number - base;
    }
    void hold(std::uint64_t number, nb::object slab, nb::object layout) {
        const std::size_t place = at(number);
        HeldSlab held(std::move(slab), std::move(layout));  // checks that it is large enough
        const auto* kind = nb::cast<const SlabLayout*>(held.layout);
        if (kind->steps != sizes.steps_of(number) || kind->envs != sizes.envs_of(number)) {
            throw Error(ErrorKind::storage, "trajectory number " + std::to_string(number) + ": expected a slab of " +
                                                std::to_string(sizes.steps_of(number)) + " steps and " +
                                                std::to_string(sizes.envs_of(number)) + " environments, got " +
                                                std::to_string(kind->steps) + " and " + std::to_string(kind->envs));
        }
        slabs->set(place, std::move(held));
    }
    void append(std::int64_t id, std::uint64_t steps, std::uint64_t envs) {
        sizes.append(steps, envs);
        slabs->append();
        ids.push_back(id);
    }
    void extend(nb::handle names, nb::handle steps, nb::handle envs) {
        const auto count = static_cast<std::size_t>(PyArray_SIZE(bytes_of(steps, false)));
        const auto* named = reinterpret_cast<const std::int64_t*>(data_of(names, 8 * count, false));
        const auto* rows = reinterpret_cast<const std::int64_t*>(data_of(steps, 8 * count, false));
        const auto* columns = reinterpret_cast<const std::int64_t*>(data_of(envs, 8 * count, false));
        for (std::size_t i = 0; i < count; ++i) {
            // Negative ones become larger than any count, which append() refuses.
            append(named[i], static_cast<std::uint64_t>(rows[i]), static_cast<std::uint64_t>(columns[i]));
        }
    }
    void drop(std::size_t count) {
        count = std::min(count, sizes.size());
        const std::uint64_t first = sizes.first();
        for (std::size_t i = 0; i < count; ++i) slabs->set(first + i - base, HeldSlab());
        sizes.drop_oldest(count);
        const std::uint64_t gone = sizes.first() - base;
        if (gone < 1'024 || gone < ids.size() / 2) return;
        slabs->drop_front(gone);
        ids.erase(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(gone));
        base += gone;
    }
    TrajectoryDraw draw(std::size_t count, std::size_t window, std::uint64_t seed, std::uint64_t call) {
        TrajectoryDraw draw(slabs);
        draw.ids = new_int64(count);
        draw.steps = new_int64(count);
        draw.envs = new_int64(count);
        std::int64_t* numbers = int64_of(draw.ids);  // for now
        std::int64_t* steps = int64_of(draw.steps);
        std::int64_t* envs = int64_of(draw.envs);
        sizes.draw(seed, call, window, count, numbers, steps, envs);
        draw.rows.resize(count);
        for (std::size_t i = 0; i < count; ++i) {
            const std::size_t place = static_cast<std::uint64_t>(numbers[i]) - base;
            const Slabs::Spot& spot = slabs->spots[place];
            RowPlace& row = draw.rows[i];
            if (spot.data) {
                row.slab = spot.data;
                row.leaves = spot.layout->leaves.data();
                row.envs = spot.layout->envs;
                row.record_bytes = spot.layout->record_bytes;
                row.leaf_count = static_cast<std::uint32_t>(spot.layout->leaves.size());
            } else {
                draw.missing.emplace_back(numbers[i], i);
            }
            row.step = static_cast<std::uint64_t>(steps[i]);
            row.env = static_cast<std::uint64_t>(envs[i]);
            numbers[i] = ids[place];
        }
        std::sort(draw.missing.begin(), draw.missing.end());
        return draw;
    }
};

[[noreturn]] void fail(const std::string& what, const std::string& path) {
    throw Error(ErrorKind::storage, what + " " + path + ": " + std::strerror(errno));
}

// Arrays may die after static destructors have run.
SlabArena& arena() {
    static SlabArena* instance = new SlabArena;
    return *instance;
}

// Bytes that `owner` keeps, as an array.
nb::object array_over(void* data, std::size_t bytes, nb::capsule owner) {
    npy_intp shape = static_cast<npy_intp>(bytes);
    nb::object array = nb::steal(PyArray_SimpleNewFromData(1, &shape, NPY_UINT8, data));
    if (!array) throw nb::python_error();
    if (PyArray_SetBaseObject(reinterpret_cast<PyArrayObject*>(array.ptr()), owner.release().ptr()) < 0) {
        throw nb::python_error();
    }
    return array;
}

// The bytes of a mapped file from `begin` on, as a read-only array that keeps the mapping and no descriptor.
nb::object bytes_of_file(const MappedFile& file, std::uint64_t begin) {
    const std::shared_ptr<const Mapping>& mapping = file.mapping();
    if (begin > mapping->bytes) throw Error(ErrorKind::storage, "a slab starts behind the end of its file");
    using Kept = std::shared_ptr<const Mapping>;
    nb::capsule owner(new Kept(mapping), [](void* pointer) noexcept { delete static_cast<Kept*>(pointer); });
    nb::object array =
        array_over(const_cast<std::byte*>(mapping->data) + begin, mapping->bytes - begin, std::move(owner));
    PyArray_CLEARFLAGS(reinterpret_cast<PyArrayObject*>(array.ptr()), NPY_ARRAY_WRITEABLE);
    return array;
}

}  // namespace

void bind_trajectories(nb::module_& m) {
    nb::class_<SlabLayout>(m, "SlabLayout")
        .def(
            "__init__",
            [](SlabLayout* self, std::uint64_t steps, std::uint64_t envs, std::uint64_t bytes,
               std::uint64_t record_bytes, Anys places) {
                SlabLayout made{steps, envs, bytes, record_bytes, {}};
                for (nb::handle place : places) {
                    nb::tuple numbers = nb::tuple(place);
                    if (nb::len(numbers) != 6)
                        throw Error(ErrorKind::schema,
                                    "SlabLayout: expected six numbers; this is a defect of Sharpwave");
                    const auto number = [&](int at) { return nb::cast<std::uint64_t>(numbers[at]); };
                    made.leaves.push_back({number(0), number(1), number(2), number(3), number(4), number(5)});
                }
                made.check();
                new (self) SlabLayout(std::move(made));
            },
            nb::arg("steps"), nb::arg("envs"), nb::arg("bytes"), nb::arg("record_bytes"), nb::arg("places"));
    nb::class_<MappedFile>(m, "MappedFile", "A file mapped read-only, for its data to be drawn from.")
        .def(nb::init<const std::string&, std::uint64_t>(), nb::arg("path"), nb::arg("bytes"))
        .def_prop_ro("is_unchanged", &MappedFile::is_unchanged)
        .def_prop_ro("identity",
                     [](const MappedFile& file) {
                         nb::typed<nb::tuple, std::uint64_t, std::uint64_t, std::int64_t> identity =
                             nb::make_tuple(file.inode(), file.file_bytes(), file.written_ns());
                         return identity;
                     })
        .def("array", &bytes_of_file, nb::arg("begin") = 0, "The bytes from there on; the array keeps the mapping.");
    nb::class_<RowKinds>(m, "RowKinds")
        .def(
            "__init__",
            [](RowKinds* self, Anys leaves) {
                RowKinds made;
                for (nb::handle leaf : leaves) {
                    nb::tuple both = nb::tuple(leaf);
                    if (!PyArray_DescrCheck(both[0].ptr()))
                        throw Error(ErrorKind::schema, "RowKinds: expected a dtype; this is a defect of Sharpwave");
                    RowKind kind{nb::object(both[0]), {}, 0};
                    kind.row_bytes =
                        static_cast<std::size_t>(PyDataType_ELSIZE(reinterpret_cast<PyArray_Descr*>(kind.dtype.ptr())));
                    for (nb::handle extent : nb::tuple(both[1])) {
                        kind.shape.push_back(nb::cast<npy_intp>(extent));
                        kind.row_bytes *= static_cast<std::size_t>(kind.shape.back());
                    }
                    made.leaves.push_back(std::move(kind));
                }
                new (self) RowKinds(std::move(made));
            },
            nb::arg("leaves"))
        .def("__len__", [](RowKinds& self) { return self.leaves.size(); });
    nb::class_<TrajectoryDraw>(m, "TrajectoryDraw")
        .def_prop_ro("ids", [](TrajectoryDraw& self) { return self.ids; })
        .def_prop_ro("steps", [](TrajectoryDraw& self) { return self.steps; })
        .def_prop_ro("envs", [](TrajectoryDraw& self) { return self.envs; })
        .def_prop_ro("hits", [](TrajectoryDraw& self) { return self.rows.size() - self.missing.size(); })
        .def_prop_ro("missing",
                     [](TrajectoryDraw& self) {
                         nb::typed<nb::list, std::int64_t> missing;
                         std::int64_t last = -1;
                         for (const auto& [number, row] : self.missing) {
                             if (number != last) missing.append(number);
                             last = number;
                         }
                         return missing;
                     })
        .def("fill", &TrajectoryDraw::fill, nb::arg("number"), nb::arg("slab"), nb::arg("layout"))
        .def("gather", &TrajectoryDraw::gather, nb::arg("kinds"));
    nb::class_<Trajectories>(m, "Trajectories")
        .def(nb::init<>())
        .def("__len__", [](Trajectories& self) { return self.sizes.size(); })
        .def_prop_ro("first", [](Trajectories& self) { return self.sizes.first(); })
        .def(
            "rows", [](Trajectories& self, std::size_t window) { return self.sizes.rows(window); }, nb::arg("window"))
        .def("append", &Trajectories::append, nb::arg("id"), nb::arg("steps"), nb::arg("envs"))
        .def("extend", &Trajectories::extend, nb::arg("ids"), nb::arg("steps"), nb::arg("envs"))
        .def("drop", &Trajectories::drop, nb::arg("count"))
        .def("hold", &Trajectories::hold, nb::arg("number"), nb::arg("slab"), nb::arg("layout"))
        .def(
            "slab",
            [](Trajectories& self, std::uint64_t number) -> nb::object {
                const HeldSlab& held = self.slabs->held[self.at(number)];
                return held.slab ? held.slab : nb::none();
            },
            nb::arg("number"))
        .def(
            "let_go", [](Trajectories& self, std::uint64_t number) { self.slabs->set(self.at(number), HeldSlab()); },
            nb::arg("number"))
        .def("draw", &Trajectories::draw, nb::arg("count"), nb::arg("window"), nb::arg("seed"), nb::arg("call"));
    m.def(
        "new_slab",
        [](std::size_t bytes) {
            auto* slab = new SlabArena::Slab(arena().take(std::max<std::size_t>(bytes, 1)));
            nb::capsule owner(slab, [](void* pointer) noexcept {
                auto* gone = static_cast<SlabArena::Slab*>(pointer);
                arena().give(*gone);
                delete gone;
            });
            return array_over(slab->data, bytes, std::move(owner));
        },
        nb::arg("bytes"), "Bytes of any value, in memory that is used again.");
    m.def(
        "make_records",
        [](nb::object slab, nb::object layout, nb::object records, nb::object record_layout) {
            const HeldSlab from(std::move(slab), std::move(layout));
            const HeldSlab to(std::move(records), std::move(record_layout));
            const auto* arrays = nb::cast<const SlabLayout*>(from.layout);
            const auto* made = nb::cast<const SlabLayout*>(to.layout);
            bool is_same = !arrays->record_bytes && made->record_bytes && arrays->steps == made->steps &&
                           arrays->envs == made->envs && arrays->leaves.size() == made->leaves.size();
            for (std::size_t leaf = 0; is_same && leaf < made->leaves.size(); ++leaf)
                is_same = arrays->leaves[leaf].row_bytes == made->leaves[leaf].row_bytes;
            if (!is_same)
                throw Error(ErrorKind::schema, "make_records: layouts of two kinds; this is a defect of Sharpwave");
            auto* target = data_of(to.slab, made->bytes, true);
            const auto work = [&] { make_records(from.place.slab, *arrays, *made, target); };
            if (made->bytes < kAlone) return work();
            const PatientRelease release;
            work();
        },
        nb::arg("slab"), nb::arg("layout"), nb::arg("records"), nb::arg("record_layout"));
    m.def(
        "copy_into_slab",
        [](nb::handle slab, Anys offsets, Anys arrays) {
            struct Part {
                std::size_t offset, bytes;
                const void* from;
            };
            PyArrayObject* object = bytes_of(slab, true);
            const auto size = static_cast<std::size_t>(PyArray_NBYTES(object));
            std::vector<Part> parts;
            for (std::size_t i = 0; i < nb::len(arrays); ++i) {
                PyArrayObject* from = bytes_of(arrays[i], false);
                const Part part{nb::cast<std::size_t>(offsets[i]), static_cast<std::size_t>(PyArray_NBYTES(from)),
                                PyArray_DATA(from)};
                if (part.offset > size || part.bytes > size - part.offset)
                    throw Error(ErrorKind::schema, "copy_into_slab: no room; this is a defect of Sharpwave");
                parts.push_back(part);
            }
            auto* to = static_cast<std::byte*>(PyArray_DATA(object));
            const auto work = [&] {
                for (const Part& part : parts) std::memcpy(to + part.offset, part.from, part.bytes);
            };
            if (size < kAlone) return work();
            const PatientRelease release;
            work();
        },
        nb::arg("slab"), nb::arg("offsets"), nb::arg("arrays"));
    m.def(
        "exchange_paths",
        [](const std::string& one, const std::string& other) {
            if (::renameat2(AT_FDCWD, one.c_str(), AT_FDCWD, other.c_str(), RENAME_EXCHANGE) != 0) {
                fail("cannot exchange " + one + " and", other);
            }
        },
        nb::arg("one"), nb::arg("other"), "Two names of files or folders change places, in one step.");
}
