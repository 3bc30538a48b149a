// Stacks of frames, rebuilt from rows that hold one frame each; also single values that are in the heap.
#pragma once

#include <cstddef>
#include <cstdint>

#include "table/table.h"
#include "views/example_work.h"
#include "views/value_copy.h"
#include "views/view_config.h"

namespace sharpwave {

class StackCopy {
public:
    // `depth`: frames of the longest stack.
    StackCopy(const Table& table, const ViewConfig& config, std::uint32_t depth)
        : table_(table), config_(config), depth_(depth), values_(table) {}

    // The slots of the stack that ends in a row, oldest first; an episode's start stands for what was before it, and
    // `padded` says for how many frames. False: a row that is needed is gone.
    bool look_back(ExampleWork& work, std::size_t position, std::uint64_t slot, std::uint64_t word,
                   std::uint64_t* frames, std::uint16_t& padded) const;

    // One leaf that is stacked or in the heap, for all positions of the part.
    void copy(ExampleWork& work, std::size_t leaf, const std::uint64_t* slots, std::size_t count, const Outputs& out,
              bool streaming) const;

    // Where a next observation starts another episode: the frames before its newest one, which is there already.
    void start_over(const ExampleWork& work, std::size_t leaf, std::size_t count, const Outputs& out) const;

private:
    std::uint64_t zeros(const ExampleWork& work, const ViewLeaf& leaf, std::size_t i) const;
    std::uint64_t frame_slot(const ExampleWork& work, const ViewLeaf& leaf, const std::uint64_t* slots, std::size_t i,
                             std::uint64_t k) const;
    void copy_rows(ExampleWork& work, const ViewLeaf& leaf, const std::uint64_t* slots, std::size_t count,
                   std::byte* flat, bool streaming) const;
    bool copy_values(ExampleWork& work, const ViewLeaf& leaf, const std::uint64_t* slots, std::size_t i,
                     std::byte* flat, std::int64_t* length) const;

    const Table& table_;
    const ViewConfig& config_;
    const std::uint32_t depth_;
    ValueCopy values_;
};

}  // namespace sharpwave
