// Next observations that no row holds: the last one of an episode, in a heap, and that of a writer's newest row, which
// waits in the writer's record.
#pragma once

#include <cstddef>
#include <cstdint>

#include "table/table.h"
#include "views/example_work.h"
#include "views/value_copy.h"
#include "views/view_config.h"

namespace sharpwave {

class NextCopy {
public:
    NextCopy(const Table& table, const ViewConfig& config) : table_(table), config_(config), values_(table) {}

    // False: it is gone, or changed meanwhile.
    bool copy(ExampleWork& work, std::size_t position, const Outputs& out) const;

private:
    bool read_final(std::uint64_t place, std::uint64_t serial, std::byte* image) const;
    bool read_waiting(std::uint64_t pair, std::uint64_t serial, std::byte* image) const;
    bool decode_image(const std::byte* image, bool is_final, std::size_t example, const Outputs& out) const;

    const Table& table_;
    const ViewConfig& config_;
    ValueCopy values_;
};

}  // namespace sharpwave
