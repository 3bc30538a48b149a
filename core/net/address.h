// Addresses of servers: "tcp://host:port/name" and "ipc:///path/name", as src/sharpwave/service/endpoint.py reads them.
#pragma once

#include <string>

#include "net/session.h"

namespace sharpwave::net {

// `keys`: the path of a client's key file, or empty. What is wrong is ErrorKind::storage.
Session::Place read_address(const std::string& address, const std::string& keys);

}  // namespace sharpwave::net
