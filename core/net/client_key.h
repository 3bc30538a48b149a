// A client's key file, as `sharpwave keys new` writes it on the server: src/sharpwave/service/key_file.py has its form.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace sharpwave::net {

// CURVE keys of ZeroMQ, 40 characters of Z85 each.
struct ClientKey {
    std::string public_key, secret, server;

    // Absent, damaged, a symbolic link, of another user or open to other users: ErrorKind::storage says which. No
    // message has a value of the file in it.
    static ClientKey read(const std::string& path);
};

}  // namespace sharpwave::net
