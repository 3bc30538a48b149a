// write(): new values for mutable fields of rows, by serial.
#include <vector>

#include "bind.h"
#include "input_values.h"
#include "table/write_back.h"

namespace {

// Below this the copy takes less time than letting other threads in.
constexpr std::uint64_t kLargeWriteBytes = 256 << 10;

// The numbers of a value as the field holds them; null: the careful way must look at it.
const std::byte* read_new_values(PyObject* value, const GivenArray& names, const Leaf& leaf, InputMemory& memory) {
    GivenArray given;
    if (!read_value(value, memory, given)) return nullptr;
    if (!given.has_shape(names.shape, names.dimensions, leaf.shape.data(), static_cast<int>(leaf.shape.size())))
        return nullptr;
    // Of a dtype that is not converted here: read as it is, where it is the field's.
    if (PyArray_Check(value)) {
        auto* array = reinterpret_cast<PyArrayObject*>(value);
        if (given.is_plain && PyArray_EquivTypes(PyArray_DESCR(array), leaf.dtype))
            return static_cast<const std::byte*>(PyArray_DATA(array));
    }
    return convert(given, leaf.dtype, memory);
}

// `indices` of any shape, -1: no row; for each number of `leaves` a value of that shape and the leaf's. None: nothing
// was written, and the careful way must look at the call.
nb::object write_rows(BoundTable& self, nb::handle indices, const nb::list& leaves, const nb::list& values,
                      bool skips_stale, nb::handle timeout) {
    const std::shared_ptr<sharpwave::Table> table = self.open();
    const std::shared_ptr<Tree> tree = self.tree;
    InputMemory memory;
    GivenArray names;
    if (!read_value(indices.ptr(), memory, names) || !PyTypeNum_ISINTEGER(names.type)) return nb::none();
    static const PyArray_Descr* const whole = PyArray_DescrFromType(NPY_INT64);
    const auto* serials = reinterpret_cast<const std::uint64_t*>(convert(names, whole, memory));
    if (!serials) return nb::none();
    const std::size_t count = names.items();
    std::vector<sharpwave::FieldWrite> writes;
    std::uint64_t bytes = 0;
    for (std::size_t i = 0; i < leaves.size(); ++i) {
        const Leaf& leaf = tree->leaves().at(nb::cast<std::size_t>(leaves[i]));
        const nb::object value = values[i];
        const std::byte* flat = read_new_values(value.ptr(), names, leaf, memory);
        if (!flat) return nb::none();
        writes.push_back({leaf.place.field, flat});
        bytes += count * leaf.bytes;
    }
    const sharpwave::Deadline deadline = read_deadline(timeout.ptr());
    sharpwave::Written written{};
    {
        const PatientRelease release(bytes >= kLargeWriteBytes);
        written = sharpwave::write_back(*table, serials, count, writes, skips_stale, deadline);
    }
    nb::dict result;
    result["applied"] = written.applied;
    result["stale"] = written.stale;
    return result;
}

}  // namespace

void bind_write(nb::class_<BoundTable>& table) {
    table.def(
        "write", &write_rows, nb::arg("indices"), nb::arg("leaves"), nb::arg("values"), nb::arg("skips_stale"),
        nb::arg("timeout").none(),
        nb::sig("def write(self, indices: object, leaves: list[int], values: list[typing.Any], skips_stale: bool, "
                "timeout: float | None) -> dict[str, int] | None"));
}
