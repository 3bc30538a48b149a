// Files that have one owner, and files that appear whole: for journals and folders, which Python writes.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <deque>

#include "base/crc32c.h"
#include "bind.h"
#include "errors.h"
#include "storage/file_lock.h"
#include "storage/new_file.h"

using sharpwave::Deadline;
using sharpwave::FileLock;
using sharpwave::NewFile;

namespace {

// The bytes of anything with the buffer protocol.
class Bytes {
public:
    explicit Bytes(nb::handle object) {
        if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_SIMPLE) != 0) throw nb::python_error();
    }
    ~Bytes() { PyBuffer_Release(&buffer_); }
    Bytes(const Bytes&) = delete;
    Bytes& operator=(const Bytes&) = delete;
    const void* data() const { return buffer_.buf; }
    std::size_t size() const { return static_cast<std::size_t>(buffer_.len); }

private:
    Py_buffer buffer_{};
};

int descriptor(const FileLock& lock) {
    if (lock.fd() < 0) {
        throw sharpwave::Error(sharpwave::ErrorKind::closed,
                               "the file is closed, or was opened by the parent of this process; open it again here");
    }
    return lock.fd();
}

// A file being written, and how much of it there is.
struct Made {
    explicit Made(const std::string& path) : file(path), path(path) {}
    NewFile file;
    std::string path;
    std::uint64_t size = 0;
};

}  // namespace

void bind_files(nb::module_& m) {
    nb::class_<FileLock>(m, "FileLock", "A file that this object alone holds, until close() or the process' end.")
        .def("fileno", &descriptor, "The descriptor, for reading and writing; ClosedError in a forked child.")
        .def("is_named", &FileLock::is_named, nb::arg("path"), "Whether the path still names this very file.")
        .def_prop_ro("is_open", [](const FileLock& lock) { return lock.fd() >= 0; })
        .def("close", &FileLock::close);
    m.def(
        "own_file",
        [](const std::string& path, bool create, double timeout) {
            const PatientRelease release;
            return FileLock::own(path, create, Deadline::in(timeout));
        },
        nb::arg("path"), nb::arg("create") = true, nb::arg("timeout") = 0.0,
        "Opens a file and holds it alone; None where another holder keeps it until the timeout.");
    nb::class_<Made>(m, "NewFile", "A file that gets its name when it is whole; a killed process leaves none.")
        .def(nb::init<const std::string&>(), nb::arg("path"))
        .def(
            "write",
            [](Made& made, nb::handle data) {
                const Bytes bytes(data);
                {
                    const PatientRelease release;
                    made.file.write(made.size, bytes.data(), bytes.size());
                }
                made.size += bytes.size();
            },
            nb::arg("data"))
        .def_ro("size", &Made::size)
        .def(
            "own",
            [](Made& made) {
                FileLock lock = FileLock::reopen(made.file.fd(), made.path);
                if (!lock.try_lock(0))
                    throw sharpwave::Error(sharpwave::ErrorKind::storage, "a new file is held already");
                return lock;
            },
            "Holds the file before it has its name: nobody else can own it in between.")
        .def("sync",
             [](Made& made) {
                 const PatientRelease release;
                 made.file.sync();
             })
        .def(
            "publish",
            [](Made& made, bool replace, bool sync) {
                const PatientRelease release;
                made.file.publish(replace, sync);
            },
            nb::arg("replace") = true, nb::arg("sync") = true,
            "Gives it its name, in one step; with sync the name is on the disk.");
    m.def(
        "crc32c",
        [](nb::handle data, std::uint32_t crc) {
            const Bytes bytes(data);
            return sharpwave::crc32c(crc, bytes.data(), bytes.size());
        },
        nb::arg("data"), nb::arg("crc") = 0);
    m.def(
        "crc32c_pieces",
        [](const nb::list& pieces, std::uint32_t crc) {
            std::deque<Bytes> held;  // stays where it is while it grows
            std::size_t size = 0;
            for (const nb::handle piece : pieces) size += held.emplace_back(piece).size();
            const auto run = [&] {
                for (const Bytes& piece : held) crc = sharpwave::crc32c(crc, piece.data(), piece.size());
            };
            constexpr std::size_t kLong = 1 << 16;  // about 5 us
            const PatientRelease release(size >= kLong);
            run();
            return std::make_pair(crc, size);
        },
        nb::arg("pieces"), nb::arg("crc") = 0,
        nb::sig("def crc32c_pieces(pieces: list[typing.Any], crc: int = 0) -> tuple[int, int]"),
        "Their checksum as one run of bytes, and its size.");
}
