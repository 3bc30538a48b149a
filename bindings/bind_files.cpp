// Files that have one owner, and files that appear whole: for journals and folders, which Python writes.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <atomic>
#include <deque>
#include <system_error>
#include <thread>

#include "base/crc32c.h"
#include "base/process.h"
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
        auto* array = reinterpret_cast<PyArrayObject*>(object.ptr());
        if (PyArray_CheckExact(object.ptr()) && PyArray_IS_C_CONTIGUOUS(array)) {
            // The same as its buffer, in a third of the time; the reference keeps the memory where it is.
            array_ = nb::borrow(object);
            data_ = PyArray_DATA(array);
            size_ = static_cast<std::size_t>(PyArray_NBYTES(array));
            return;
        }
        if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_SIMPLE) != 0) throw nb::python_error();
        data_ = buffer_.buf;
        size_ = static_cast<std::size_t>(buffer_.len);
    }
    ~Bytes() {
        if (!array_.is_valid()) PyBuffer_Release(&buffer_);
    }
    Bytes(const Bytes&) = delete;
    Bytes& operator=(const Bytes&) = delete;
    const void* data() const { return data_; }
    std::size_t size() const { return size_; }

private:
    nb::object array_;
    Py_buffer buffer_{};
    const void* data_ = nullptr;
    std::size_t size_ = 0;
};

// The checksum of pieces as one run of bytes. The first thread that comes to it computes it; the others go on, or wait
// for it in finish().
class Checksum {
public:
    explicit Checksum(const nb::list& pieces) {
        for (const nb::handle piece : pieces) size_ += pieces_.emplace_back(piece).size();
    }
    ~Checksum() {
        if (!helper_.joinable()) return;
        if (generation_ != sharpwave::process_generation()) {
            helper_.detach();  // a forked child has no such thread
            return;
        }
        is_taken_ = true;  // nobody wants it: a thread that has not begun does nothing
        const PatientRelease release;
        helper_.join();
    }
    Checksum(const Checksum&) = delete;
    Checksum& operator=(const Checksum&) = delete;

    std::size_t size() const { return size_; }

    // On a thread of its own, unless one is at it.
    void begin() {
        if (helper_.joinable() || is_taken_) return;
        try {
            generation_ = sharpwave::process_generation();
            helper_ = std::thread([this] { compute(); });
        } catch (const std::system_error&) {
            return;  // the system has no thread left: finish() does it
        }
    }

    void compute_here() {
        constexpr std::size_t kLong = 1 << 16;  // about 5 us
        const PatientRelease release(size_ >= kLong);
        compute();
    }

    std::uint32_t finish() {
        compute_here();
        if (!is_done_) {
            const PatientRelease release;
            is_done_.wait(false);
        }
        return crc_;
    }

private:
    void compute() {
        if (is_taken_.exchange(true)) return;
        std::uint32_t crc = 0;
        for (const Bytes& piece : pieces_) crc = sharpwave::crc32c(crc, piece.data(), piece.size());
        crc_ = crc;
        is_done_ = true;
        is_done_.notify_all();
    }

    std::deque<Bytes> pieces_;  // stays where it is while it grows
    std::size_t size_ = 0;
    std::uint32_t crc_ = 0;
    std::atomic<bool> is_taken_ = false, is_done_ = false;
    std::thread helper_;
    std::uint64_t generation_ = 0;
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
        .def(
            "reserve",
            [](const FileLock& lock, std::uint64_t begin, std::uint64_t size) {
                const int fd = descriptor(lock);
                const PatientRelease release;
                return sharpwave::reserve_blocks(fd, begin, size);
            },
            nb::arg("begin"), nb::arg("size"),
            "Asks for the blocks of bytes that will be written; the size of the file stays. False where the disk is "
            "full or the file system has no such call: nothing has changed then.")
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
    m.def("crc32c_combine", &sharpwave::crc32c_combine, nb::arg("first"), nb::arg("second"), nb::arg("size"),
          "The checksum of two runs of bytes one behind the other, the second of `size` bytes.");
    nb::class_<Checksum>(m, "Checksum",
                         "The CRC32C of pieces as one run of bytes. They must not change until it is known.")
        .def(nb::init<const nb::list&>(), nb::arg("pieces"),
             nb::sig("def __init__(self, pieces: list[typing.Any]) -> None"))
        .def_prop_ro("size", &Checksum::size, "Bytes of all pieces.")
        .def("begin", &Checksum::begin, "Lets another thread compute it, unless one is at it.")
        .def("compute", &Checksum::compute_here, "Computes it, unless another thread is at it.")
        .def("finish", &Checksum::finish, "The checksum; computes it or waits for the thread that does.");
}
