// Memory of dead arrays and of messages that were sent, by size, to be used again: new memory of a large batch costs a
// page fault for every page.
#pragma once

#include <cstddef>

namespace sharpwave {

// The size of the block that holds so many bytes: whole pages, of 2 MiB where the block is as large.
std::size_t block_bytes(std::size_t bytes);

// A block of block_bytes(); null where the system has none. Any thread may take and give.
void* take_block(std::size_t bytes);

// The same number of bytes as at take_block().
void give_block(void* memory, std::size_t bytes) noexcept;

// Bytes that wait for reuse.
std::size_t pooled_block_bytes();

}  // namespace sharpwave
