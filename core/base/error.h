// Every failure the engine reports carries a kind; the bindings give each kind its Python class.
#pragma once

#include <cstring>
#include <stdexcept>
#include <string>

namespace sharpwave {

// `interrupted`: set_interrupt_check()'s function ended a wait; the language above has its own error for that.
enum class ErrorKind { schema, not_ready, storage, stale_handle, closed, buffer_full, interrupted };

class Error : public std::runtime_error {
public:
    Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
    ErrorKind kind() const noexcept { return kind_; }

private:
    ErrorKind kind_;
};

// A failed call of the operating system; `code` is its errno.
[[noreturn]] inline void fail_storage(const std::string& what, int code) {
    throw Error(ErrorKind::storage, what + ": " + std::strerror(code));
}

}  // namespace sharpwave
