// Where a buffer lives, as a string: the same addresses as src/sharpwave/address.py.
#pragma once

#include <string>

namespace sharpwave {

// The absolute path behind "shm://name" or "file://path"; others are ErrorKind::storage.
std::string path_of(const std::string& address);

}  // namespace sharpwave
