// Memory of a message, taken from the pool of blocks and given back to it.
#pragma once

#include <cstddef>
#include <new>

#include "base/block_pool.h"

namespace sharpwave::wire {

class Memory {
public:
    explicit Memory(std::size_t bytes) : data_(static_cast<std::byte*>(take_block(bytes))), bytes_(bytes) {
        if (!data_) throw std::bad_alloc();
    }
    ~Memory() { give_block(data_, bytes_); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    std::byte* data() { return data_; }
    std::size_t size() const { return bytes_; }

private:
    std::byte* data_;
    std::size_t bytes_;
};

}  // namespace sharpwave::wire
