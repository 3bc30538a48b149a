// One socket of a client, and the arrays of a batch over the message that brought it.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include "bind.h"
#include "wire_types.h"

using sharpwave::Error;
using sharpwave::ErrorKind;
using sharpwave::wire::Head;
using sharpwave::wire::Memory;
using sharpwave::wire::Message;
using sharpwave::wire::Zmq;

namespace {

constexpr double kMostWait_s = 1.0;             // of a wait that signals interrupt again and again
constexpr std::size_t kCopiedBytes = 64 << 10;  // a new block for so much costs page faults: it comes from the pool

// The functions by name, as their addresses in this process.
Zmq read_functions(const nb::dict& addresses) {
    Zmq zmq{};
    const auto read = [&](const char* name, auto& function) {
        const auto address = nb::cast<std::uintptr_t>(addresses[name]);
        static_assert(sizeof address == sizeof function);
        std::memcpy(&function, &address, sizeof function);
    };
    read("zmq_msg_init", zmq.msg_init);
    read("zmq_msg_init_size", zmq.msg_init_size);
    read("zmq_msg_init_data", zmq.msg_init_data);
    read("zmq_msg_close", zmq.msg_close);
    read("zmq_msg_copy", zmq.msg_copy);
    read("zmq_msg_move", zmq.msg_move);
    read("zmq_msg_data", zmq.msg_data);
    read("zmq_msg_size", zmq.msg_size);
    read("zmq_msg_more", zmq.msg_more);
    read("zmq_msg_gets", zmq.msg_gets);
    read("zmq_msg_recv", zmq.msg_recv);
    read("zmq_msg_send", zmq.msg_send);
    read("zmq_errno", zmq.error);
    return zmq;
}

int frame_buffer(PyObject* object, Py_buffer* view, int flags) {
    Message& message = *nb::inst_ptr<Frame>(object)->message;
    return PyBuffer_FillInfo(view, object, message.data(), static_cast<Py_ssize_t>(message.size()), 0, flags);
}

int memory_buffer(PyObject* object, Py_buffer* view, int flags) {
    Memory& memory = *nb::inst_ptr<MessageMemory>(object)->memory;
    return PyBuffer_FillInfo(view, object, memory.data(), static_cast<Py_ssize_t>(memory.size()), 0, flags);
}

PyType_Slot frame_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(frame_buffer)}, {0, nullptr}};
PyType_Slot memory_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(memory_buffer)}, {0, nullptr}};

// What is behind the head of a frame.
nb::object body_of(nb::handle frame) {
    const nb::object view = nb::steal(PyMemoryView_FromObject(frame.ptr()));
    if (!view.is_valid()) throw nb::python_error();
    const nb::slice behind_head(nb::int_(sizeof(Head)), nb::none(), nb::none());
    nb::object body = nb::steal(PyObject_GetItem(view.ptr(), behind_head.ptr()));
    if (!body.is_valid()) throw nb::python_error();
    return body;
}

// A connected DEALER, used by one thread at a time.
class Wire {
public:
    Wire(const Zmq& zmq, std::uintptr_t socket) : zmq_(zmq), socket_(to_pointer(socket)) {}

    // Nothing uses the socket from here on. False: another thread waits at it, so it must not be freed yet.
    bool close() {
        socket_ = nullptr;
        return !is_waiting_;
    }

    // False: there is no connection, or no room. The bytes begin with the space of a head, which is written here.
    bool send(nb::handle bytes, std::uint16_t version, std::uint16_t verb, std::uint16_t flags, std::uint32_t table,
              std::uint64_t session, std::uint32_t channel, std::uint32_t stream, std::uint64_t call,
              std::uint64_t oldest, std::uint64_t timeout, std::uint64_t argument) {
        Head head;
        head.version = version;
        head.verb = static_cast<sharpwave::wire::Verb>(verb);
        head.flags = flags;
        head.table = table;
        head.session = session;
        head.channel = channel;
        head.stream = stream;
        head.call = call;
        head.oldest = oldest;
        head.timeout = timeout;
        head.argument = argument;
        Message message = bytes.is_none() ? Message(zmq_, sizeof head) : message_of(zmq_, bytes);
        if (message.size() < sizeof head) throw nb::value_error("send(): a message has the space of a head");
        std::memcpy(message.data(), &head, sizeof head);
        return message.send(checked(), sharpwave::wire::kDontWait) || is_later();
    }

    // None: nothing came within the socket's own timeout. Other threads run while it waits.
    nb::object receive() {
        if (!early_.message) {
            Frame frame = next();
            if (!frame.message) return nb::none();
            return nb::cast(std::move(frame));
        }
        return nb::cast(std::exchange(early_, {}));
    }

    // The next message if it is the good answer to this call. None: nothing came, or something else, which receive()
    // gives then.
    nb::object take(std::uint64_t session, std::uint64_t call) {
        if (early_.message) return nb::none();
        Frame frame = next();
        if (!frame.message) return nb::none();
        const Head& head = frame.head;
        const bool is_it = frame.is_valid && head.session == session && head.call == call &&
                           head.status == sharpwave::wire::Status::ok && head.verb != sharpwave::wire::Verb::hello;
        if (is_it) return nb::cast(std::move(frame));
        early_ = std::move(frame);
        return nb::none();
    }

    bool has_early() const { return early_.message != nullptr; }

private:
    // Without a message: nothing came.
    Frame next() {
        auto message = std::make_shared<Message>(zmq_);
        // What is there already is taken without letting others in.
        bool came = message->receive(checked(), sharpwave::wire::kDontWait);
        const double begun = came ? 0 : sharpwave::wire::monotonic_now();
        while (!came) {
            const int error = wait(*message);
            if (error == 0) break;
            if (error == EAGAIN) return {};
            if (error != EINTR) throw Error(ErrorKind::closed, "the connection is closed");
            if (PyErr_CheckSignals() != 0) throw nb::python_error();  // a handler may also close the socket
            if (sharpwave::wire::monotonic_now() - begun >= kMostWait_s) return {};
        }
        if (message->has_more()) {  // no message of the protocol
            Message rest(zmq_);
            while (rest.receive(checked(), sharpwave::wire::kDontWait) && rest.has_more()) {
            }
            message = std::make_shared<Message>(zmq_);
        }
        Frame frame{message, {}, false};
        frame.is_valid = read_head(message->bytes(), frame.head);
        return frame;
    }

    // For a message, while other threads run: 0, or why there is none.
    int wait(Message& message) {
        void* const socket = checked();
        is_waiting_ = true;
        int error = 0;
        {
            const PatientRelease release;
            if (!message.receive(socket, 0)) error = zmq_.error();
        }
        is_waiting_ = false;
        return error;
    }

    void* checked() const {
        if (!socket_) throw Error(ErrorKind::closed, "the connection is closed");
        return socket_;
    }
    static void* to_pointer(std::uintptr_t address) {
        void* pointer;
        std::memcpy(&pointer, &address, sizeof pointer);
        return pointer;
    }
    bool is_later() const {
        if (zmq_.error() == EAGAIN || zmq_.error() == EINTR) return false;
        throw Error(ErrorKind::closed, "the connection is closed");
    }

    const Zmq& zmq_;
    void* socket_;             // null: closed
    bool is_waiting_ = false;  // a thread is at the socket without the interpreter
    Frame early_;              // came before it was wanted; without a message: none
};

// Where the arrays of a batch stand in a body: in order, each at a multiple of 64 bytes.
class BodyLayout {
public:
    // dtype and shape of each array, without the axis of examples; names: None where the batch is nested.
    BodyLayout(const nb::list& arrays, nb::object names) : names_(std::move(names)) {
        for (nb::handle one : arrays) {
            const auto pair = nb::cast<nb::tuple>(one);
            Place place;
            place.dtype = pair[0];
            if (!PyArray_DescrCheck(place.dtype.ptr())) throw nb::type_error("BodyLayout(): expected dtypes");
            place.bytes =
                static_cast<std::size_t>(PyDataType_ELSIZE(reinterpret_cast<PyArray_Descr*>(place.dtype.ptr())));
            place.shape.push_back(0);
            for (const npy_intp extent : nb::cast<std::vector<npy_intp>>(pair[1])) {
                place.shape.push_back(extent);
                place.bytes *= static_cast<std::size_t>(extent);
            }
            const auto needed = PyDataType_ALIGNMENT(reinterpret_cast<PyArray_Descr*>(place.dtype.ptr()));
            alignment_ = std::max(alignment_, static_cast<std::size_t>(needed));
            places_.push_back(std::move(place));
        }
    }

    std::size_t bytes(std::size_t count) const {
        std::size_t end = 0;
        for (const Place& place : places_) end += aligned(place.bytes * count);
        return end;
    }

    // Memory for a body that begins at `begin`, with so many bytes behind it. What no array fills is zero: a block of
    // the pool held another message before.
    MessageMemory memory(std::size_t begin, std::size_t count, std::size_t more) const {
        auto memory = std::make_shared<Memory>(begin + bytes(count) + more);
        std::memset(memory->data(), 0, begin);
        std::byte* at = memory->data() + begin;
        for (const Place& place : places_) {
            const std::size_t end = place.bytes * count;
            std::memset(at + end, 0, aligned(end) - end);
            at += aligned(end);
        }
        std::memset(at, 0, more);
        return {std::move(memory)};
    }

    // Arrays over a body that begins at `begin` of the memory; a dict of them where they have names, else a list. The
    // memory is copied where its place does not fit the items.
    nb::object over(nb::object memory, std::size_t begin, std::size_t count) const {
        Py_buffer view;
        if (PyObject_GetBuffer(memory.ptr(), &view, PyBUF_WRITABLE) != 0) throw nb::python_error();
        auto* data = static_cast<std::byte*>(view.buf);
        const auto size = static_cast<std::size_t>(view.len);
        PyBuffer_Release(&view);  // the arrays hold the object, and no buffer of it moves
        const std::size_t needed = bytes(count);
        if (begin > size || needed > size - begin) throw Error(ErrorKind::storage, "a batch is shorter than its size");
        // Small frames begin anywhere in ZeroMQ's memory, large ones at a multiple of 8.
        if (reinterpret_cast<std::uintptr_t>(data + begin) % alignment_) {
            auto copy = std::make_shared<Memory>(size - begin);
            std::memcpy(copy->data(), data + begin, size - begin);
            data = copy->data();
            begin = 0;
            memory = nb::cast(MessageMemory{std::move(copy)});
        }
        return names_.is_none() ? make_list(memory, data + begin, count) : make_dict(memory, data + begin, count);
    }

private:
    struct Place {
        nb::object dtype;
        std::vector<npy_intp> shape;  // its first entry is the number of examples
        std::size_t bytes;            // of one example
    };
    static std::size_t aligned(std::size_t at) { return (at + 63) / 64 * 64; }

    static nb::object make_array(const Place& place, const nb::object& memory, std::byte* at, std::size_t count) {
        npy_intp shape[NPY_MAXDIMS];
        std::copy(place.shape.begin(), place.shape.end(), shape);
        shape[0] = static_cast<npy_intp>(count);
        auto* dtype = reinterpret_cast<PyArray_Descr*>(place.dtype.inc_ref().ptr());
        nb::object array = nb::steal(PyArray_NewFromDescr(&PyArray_Type, dtype, static_cast<int>(place.shape.size()),
                                                          shape, nullptr, at, NPY_ARRAY_CARRAY, nullptr));
        if (!array.is_valid()) throw nb::python_error();
        PyArray_SetBaseObject(reinterpret_cast<PyArrayObject*>(array.ptr()), memory.inc_ref().ptr());
        return array;
    }

    nb::object make_list(const nb::object& memory, std::byte* at, std::size_t count) const {
        nb::list result;
        for (const Place& place : places_) {
            result.append(make_array(place, memory, at, count));
            at += aligned(place.bytes * count);
        }
        return result;
    }

    nb::object make_dict(const nb::object& memory, std::byte* at, std::size_t count) const {
        nb::dict result;
        Py_ssize_t number = 0;
        for (const Place& place : places_) {
            const nb::object array = make_array(place, memory, at, count);
            PyObject* name = PyTuple_GetItem(names_.ptr(), number++);
            if (!name || PyDict_SetItem(result.ptr(), name, array.ptr()) != 0) throw nb::python_error();
            at += aligned(place.bytes * count);
        }
        return result;
    }

    std::vector<Place> places_;
    std::size_t alignment_ = 1;  // of all items
    nb::object names_;           // a tuple, or None
};

}  // namespace

Message message_of(const Zmq& zmq, nb::handle bytes) {
    if (nb::isinstance<MessageMemory>(bytes)) {
        const std::shared_ptr<Memory>& memory = nb::inst_ptr<MessageMemory>(bytes)->memory;
        return {zmq, memory, memory->size()};
    }
    const HeldBuffer held(bytes, PyBUF_SIMPLE);
    if (held.size() >= kCopiedBytes) {
        const auto memory = std::make_shared<Memory>(held.size());
        std::memcpy(memory->data(), held.data(), held.size());
        return {zmq, memory, held.size()};
    }
    Message message(zmq, held.size());
    std::memcpy(message.data(), held.data(), held.size());
    return message;
}

void bind_wire(nb::module_& m) {
    nb::class_<Zmq>(m, "Zmq", "libzmq's functions, by their addresses in this process.");
    m.def(
        "zmq", [](const nb::dict& addresses) { return new Zmq(read_functions(addresses)); },
        nb::rv_policy::reference,  // never freed: arrays over messages may die after everything else
        nb::arg("addresses"), nb::sig("def zmq(addresses: dict[str, int]) -> Zmq"));
    nb::class_<Frame>(m, "Frame", nb::type_slots(frame_slots), "A message that came; a buffer of its bytes.")
        .def_ro("is_valid", &Frame::is_valid, "Whether it has a head of the protocol.")
        .def_prop_ro("version", [](const Frame& self) { return self.head.version; })
        .def_prop_ro("verb", [](const Frame& self) { return static_cast<int>(self.head.verb); })
        .def_prop_ro("status", [](const Frame& self) { return static_cast<int>(self.head.status); })
        .def_prop_ro("session", [](const Frame& self) { return self.head.session; })
        .def_prop_ro("call", [](const Frame& self) { return self.head.call; })
        .def_prop_ro("argument", [](const Frame& self) { return self.head.argument; })
        .def_prop_ro(
            "body", [](nb::handle self) { return body_of(self); }, nb::sig("def body(self) -> memoryview"),
            "What is behind the head.");
    nb::class_<MessageMemory>(m, "MessageMemory", nb::type_slots(memory_slots),
                              "Memory for a message, a buffer. It is sent without a copy, and used again afterwards.")
        .def(
            "__init__",
            [](MessageMemory* self, std::size_t bytes) { new (self) MessageMemory{std::make_shared<Memory>(bytes)}; },
            nb::arg("bytes"))
        .def("__len__", [](const MessageMemory& self) { return self.memory->size(); });
    nb::class_<Wire>(m, "Wire", "A connected socket of a client, used by one thread at a time.")
        .def(nb::init<const Zmq&, std::uintptr_t>(), nb::arg("zmq"), nb::arg("socket"))
        .def("close", &Wire::close,
             "Uses the socket no more. False: another thread waits at it, so it must not be freed yet.")
        .def("send", &Wire::send, nb::arg("message").none(), nb::arg("version"), nb::arg("verb"), nb::arg("flags"),
             nb::arg("table"), nb::arg("session"), nb::arg("channel"), nb::arg("stream"), nb::arg("call"),
             nb::arg("oldest"), nb::arg("timeout"), nb::arg("argument"),
             nb::sig("def send(self, message: object | None, version: int, verb: int, flags: int, table: int, "
                     "session: int, channel: int, stream: int, call: int, oldest: int, timeout: int, argument: int) "
                     "-> bool"),
             "Sends a message whose first 64 bytes are the space of the head. None: a head alone. False: there is no "
             "connection, or no room.")
        .def("take", &Wire::take, nb::arg("session"), nb::arg("call"),
             nb::sig("def take(self, session: int, call: int) -> Frame | None"),
             "The next message, if it is the good answer to this call. None: nothing came, or something that receive() "
             "gives.")
        .def_prop_ro("has_early", &Wire::has_early, "Whether receive() has one at once, which take() left.")
        .def("receive", &Wire::receive, nb::sig("def receive(self) -> Frame | None"),
             "The next message. None: nothing came within the socket's timeout.");
    nb::class_<BodyLayout>(m, "BodyLayout", "Where the arrays of a batch stand in the body of a message.")
        .def(nb::init<const nb::list&, nb::object>(), nb::arg("arrays"), nb::arg("names").none(),
             nb::sig("def __init__(self, arrays: list[tuple[typing.Any, list[int]]], names: tuple[str, ...] | None) "
                     "-> None"))
        .def("bytes", &BodyLayout::bytes, nb::arg("count"), "Of the body of so many examples.")
        .def("memory", &BodyLayout::memory, nb::arg("begin"), nb::arg("count"), nb::arg("more"),
             "Memory for a body that begins there, with so many bytes behind it.")
        .def("over", &BodyLayout::over, nb::arg("memory"), nb::arg("begin"), nb::arg("count"),
             nb::sig("def over(self, memory: object, begin: int, count: int) -> typing.Any"),
             "The arrays of a body that begins there, as views of the memory: a dict by the names, else a list.");
}
