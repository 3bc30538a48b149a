// The door to buffers on other machines. The component sharpwave::net is behind it, in programs that link it.
#pragma once

#include <memory>
#include <string>

#include "base/wait.h"
#include "sharpwave/buffer.h"

namespace sharpwave {

bool is_remote(const std::string& address);  // "tcp://" or "ipc://"

// ErrorKind::storage in a program that is not linked against sharpwave::net.
std::shared_ptr<BufferRows> open_remote(const std::string& address, const OpenOptions& options, Deadline deadline);

}  // namespace sharpwave

// The component's function. Weak: null where the component is not linked. The target sharpwave::net makes the linker
// look for it, so that the archive member which defines it is taken.
extern "C" __attribute__((weak)) void sharpwave_net_open(const std::string& address,
                                                         const sharpwave::OpenOptions& options,
                                                         sharpwave::Deadline deadline,
                                                         std::shared_ptr<sharpwave::BufferRows>& rows);
