// Messages of libzmq, and their memory, as Python objects.
#pragma once

#include <memory>
#include <optional>

#include "bind.h"
#include "wire/desk.h"
#include "wire/message.h"
#include "wire/zmq.h"

// A message that came: its bytes as a buffer, and the fields of its head.
struct Frame {
    std::shared_ptr<sharpwave::wire::Message> message;
    sharpwave::wire::Head head;
    bool is_valid = false;  // whether it has a head of the protocol
};

// Memory for a message that is to be sent, as a buffer.
struct MessageMemory {
    std::shared_ptr<sharpwave::wire::Memory> memory;
};

// A message of these bytes. Those of a MessageMemory are not copied.
sharpwave::wire::Message message_of(const sharpwave::wire::Zmq& zmq, nb::handle bytes);

// A contiguous buffer of an object, let go of at the end.
class HeldBuffer {
public:
    HeldBuffer(nb::handle object, int flags) {
        if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw nb::python_error();
    }
    ~HeldBuffer() { PyBuffer_Release(&view_); }
    HeldBuffer(const HeldBuffer&) = delete;
    HeldBuffer& operator=(const HeldBuffer&) = delete;
    std::byte* data() const { return static_cast<std::byte*>(view_.buf); }
    std::size_t size() const { return static_cast<std::size_t>(view_.len); }

private:
    Py_buffer view_;
};
