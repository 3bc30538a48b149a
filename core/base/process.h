// What the engine must know of the process it runs in.
#pragma once

#include <cstdint>
#include <string>

namespace sharpwave {

// Counts forks on this process's line of descent. A table remembers the value it was opened under; in a forked
// child the values differ, at the price of one load a call and no system call.
std::uint64_t process_generation() noexcept;

// This process's id, without a system call.
std::uint64_t process_id() noexcept;

// Identifies the running kernel. Unequal to the one in a file's header: the machine went down since.
std::string boot_id();

// Time of the wall clock, for what people read: creation dates, "last insert 3 s ago". It jumps when somebody sets it,
// so no wait goes by it: see base/wait.h.
std::uint64_t wall_ns();
std::uint64_t rough_wall_ns();  // right to some milliseconds, and cheaper

}  // namespace sharpwave
