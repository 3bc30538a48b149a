// A few threads that help with one large copy at a time.
#pragma once

#include <cstddef>
#include <functional>

namespace sharpwave {

// Calls part(begin, end) over disjoint pieces that cover [0, count), on this thread and up to seven others. Returns
// when all are done. While another caller has the helpers, this one works alone: waiting would cost more.
// The helpers start on first use and are left behind at fork (a child starts its own).
void in_parallel(std::size_t count, const std::function<void(std::size_t, std::size_t)>& part);

}  // namespace sharpwave
