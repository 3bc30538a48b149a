// Trajectories for Python. A slab is an array of bytes, in memory or mapped; the engine holds references to slabs, so
// that none goes away during a call. Every call comes under the interpreter's lock and the buffer's own.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bind.h"
#include "storage/new_file.h"
#include "trajectories/arena.h"
#include "trajectories/mapped_file.h"
#include "trajectories/trajectory_rows.h"

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

// A slab of Python's as the engine holds it: the array and its layout live as long as the owner.
struct PythonSlab {
    nb::object slab, layout;
};

HeldSlab held_slab(nb::object slab, nb::object layout) {
    const auto* found = nb::cast<const SlabLayout*>(layout);
    const std::byte* data = data_of(slab, found->bytes, false);
    return {std::make_shared<PythonSlab>(PythonSlab{std::move(slab), std::move(layout)}), data, found};
}

nb::object new_int64(std::size_t count) {
    npy_intp shape = static_cast<npy_intp>(count);
    PyObject* array = PyArray_SimpleNew(1, &shape, NPY_INT64);
    if (!array) throw nb::python_error();
    return nb::steal(array);
}

std::int64_t* int64_of(const nb::object& array) {
    return static_cast<std::int64_t*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(array.ptr())));
}

// Some drawn rows, with arrays that say which they are.
struct BoundDraw {
    nb::object ids, steps, envs;
    TrajectoryDraw draw;

    // One new array a leaf.
    Anys gather(const RowKinds& kinds) const {
        const std::vector<RowPlace>& rows = draw.rows();
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
        draw.check(to);
        const PatientRelease release(bytes >= kAlone);
        gather_rows(rows.data(), rows.size(), to.data(), to.size());
        return arrays;
    }
};

BoundDraw draw_rows(const TrajectoryRows& rows, std::size_t count, std::size_t window, std::uint64_t seed,
                    std::uint64_t call) {
    nb::object ids = new_int64(count), steps = new_int64(count), envs = new_int64(count);
    TrajectoryDraw draw = rows.draw(count, window, seed, call, int64_of(ids), int64_of(steps), int64_of(envs));
    return {std::move(ids), std::move(steps), std::move(envs), std::move(draw)};
}

void extend(TrajectoryRows& rows, nb::handle ids, nb::handle steps, nb::handle envs) {
    const auto count = static_cast<std::size_t>(PyArray_SIZE(bytes_of(steps, false)));
    const auto* each_id = reinterpret_cast<const std::int64_t*>(data_of(ids, 8 * count, false));
    const auto* each_steps = reinterpret_cast<const std::int64_t*>(data_of(steps, 8 * count, false));
    const auto* each_envs = reinterpret_cast<const std::int64_t*>(data_of(envs, 8 * count, false));
    for (std::size_t i = 0; i < count; ++i) {
        // Negative ones become larger than any count, which append() refuses.
        rows.append(each_id[i], static_cast<std::uint64_t>(each_steps[i]), static_cast<std::uint64_t>(each_envs[i]));
    }
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
    nb::class_<BoundDraw>(m, "TrajectoryDraw")
        .def_ro("ids", &BoundDraw::ids)
        .def_ro("steps", &BoundDraw::steps)
        .def_ro("envs", &BoundDraw::envs)
        .def_prop_ro("hits", [](BoundDraw& self) { return self.draw.hits(); })
        .def_prop_ro("missing", [](BoundDraw& self) { return self.draw.missing(); })
        .def(
            "fill",
            [](BoundDraw& self, std::int64_t number, nb::object slab, nb::object layout) {
                self.draw.fill(number, held_slab(std::move(slab), std::move(layout)));
            },
            nb::arg("number"), nb::arg("slab"), nb::arg("layout"))
        .def("gather", &BoundDraw::gather, nb::arg("kinds"));
    nb::class_<TrajectoryRows>(m, "Trajectories")
        .def(nb::init<>())
        .def("__len__", [](TrajectoryRows& self) { return self.sizes().size(); })
        .def_prop_ro("first", [](TrajectoryRows& self) { return self.sizes().first(); })
        .def(
            "rows", [](TrajectoryRows& self, std::size_t window) { return self.sizes().rows(window); },
            nb::arg("window"))
        .def("append", &TrajectoryRows::append, nb::arg("id"), nb::arg("steps"), nb::arg("envs"))
        .def("extend", &extend, nb::arg("ids"), nb::arg("steps"), nb::arg("envs"))
        .def("drop", &TrajectoryRows::drop, nb::arg("count"))
        .def(
            "hold",
            [](TrajectoryRows& self, std::uint64_t number, nb::object slab, nb::object layout) {
                self.hold(number, held_slab(std::move(slab), std::move(layout)));
            },
            nb::arg("number"), nb::arg("slab"), nb::arg("layout"))
        .def(
            "slab",
            [](TrajectoryRows& self, std::uint64_t number) -> nb::object {
                const HeldSlab& held = self.slab(number);
                return held.owner ? static_cast<const PythonSlab*>(held.owner.get())->slab : nb::none();
            },
            nb::arg("number"))
        .def("let_go", &TrajectoryRows::let_go, nb::arg("number"))
        .def("draw", &draw_rows, nb::arg("count"), nb::arg("window"), nb::arg("seed"), nb::arg("call"));
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
            const HeldSlab from = held_slab(std::move(slab), std::move(layout));
            const auto* arrays = from.layout;
            const auto* made = nb::cast<const SlabLayout*>(record_layout);
            bool is_same = !arrays->record_bytes && made->record_bytes && arrays->steps == made->steps &&
                           arrays->envs == made->envs && arrays->leaves.size() == made->leaves.size();
            for (std::size_t leaf = 0; is_same && leaf < made->leaves.size(); ++leaf)
                is_same = arrays->leaves[leaf].row_bytes == made->leaves[leaf].row_bytes;
            if (!is_same)
                throw Error(ErrorKind::schema, "make_records: layouts of two kinds; this is a defect of Sharpwave");
            auto* target = data_of(records, made->bytes, true);
            const auto work = [&] { make_records(from.data, *arrays, *made, target); };
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
            const PatientRelease release;
            exchange_paths(one, other);
        },
        nb::arg("one"), nb::arg("other"), "Two names of files or folders change places, in one step.");
}
