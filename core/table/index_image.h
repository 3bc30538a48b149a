// The columns of the index as they were under its lock: 8 to 24 bytes a row, by what is counted beside the priorities.
// Copied to memory under the lock and written to the file after it: a disk may take seconds, and no process could
// sample meanwhile.
#pragma once

#include <cstddef>
#include <iterator>
#include <vector>

#include "storage/format.h"
#include "storage/new_file.h"
#include "table/snapshot.h"
#include "table/table.h"

namespace sharpwave {

class IndexImage {
public:
    // `header` says where the columns go, and for how many slots. Without an index in it there is nothing to do.
    IndexImage(const Table& table, const format::Header& header) : table_(table), header_(header) {}

    // Takes the memory, and touches it: the kernel's zeroing takes longer than the copy. Before the lock.
    void make_room();

    // Under the lock.
    void copy();

    // Priorities that adds brought. Writers store them without the lock, before they commit the row: after the cut all
    // rows of the cut have theirs.
    void copy_given();

    // After the lock. The memory is given back.
    void write(NewFile& file);

private:
    const Table& table_;
    const format::Header& header_;
    std::vector<std::byte> priorities_;
    std::vector<std::byte> columns_[std::size(kIndexColumns)];
    std::vector<float> given_;
};

}  // namespace sharpwave
