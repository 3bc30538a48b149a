// 128-bit products: what checks of sizes and exact bounded draws are made with.
#pragma once

namespace sharpwave {

__extension__ typedef unsigned __int128 Wide;

}  // namespace sharpwave
