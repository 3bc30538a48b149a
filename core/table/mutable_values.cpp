#include "table/mutable_values.h"

#include <algorithm>

#include "base/crc32c.h"
#include "base/fault.h"

namespace sharpwave {

using namespace format;

namespace {

constexpr std::uint64_t kFetchedBytes = 512;  // beyond them the processor fetches by itself

}  // namespace

void MutableValues::prefetch(std::uint64_t slot) const {
    const std::byte* from = values(slot, selector(slot).load(std::memory_order_relaxed));
    const std::uint64_t reach = std::min(value_bytes_, kFetchedBytes);
    for (std::uint64_t line = 0; line < reach; line += 64) __builtin_prefetch(from + line, 0, 2);
    __builtin_prefetch(from + reach - 1, 0, 2);
}

void MutableValues::begin_rows(const Table& table, const RowBatch& batch, std::size_t first, std::size_t count,
                               std::uint64_t slot, std::uint64_t serial) const {
    const std::vector<Field>& fields = table.layout().fields();
    for (std::size_t i = 0; i < count; ++i) {
        if (is_void(batch, first + i)) continue;
        const std::atomic_ref<std::uint64_t> of_row = selector(slot + i);
        // The same place with a higher number. A write to the row that was here before, which may still be running,
        // fills the other place, and finds another selector than the one it knows.
        const std::uint64_t next = of_row.load(std::memory_order_relaxed) + 2;
        std::byte* to = values(slot + i, next);
        for (std::size_t f = 0; f < fields.size(); ++f) {
            if (!fields[f].is_mutable) continue;
            racy_copy(to + fields[f].offset, value_of(batch.fields[f], fields[f], first + i).data, fields[f].bytes);
        }
        seal(slot + i, next, serial + i);
        of_row.store(next, std::memory_order_release);
        SHARPWAVE_FAULT(mutable_begun);
    }
}

std::uint32_t MutableValues::checksum(std::uint64_t slot, std::uint64_t selector, std::uint64_t serial) const {
    const std::uint64_t names[] = {serial, selector};
    return crc32c(crc32c(0, names, sizeof names), values(slot, selector), value_bytes_);
}

void MutableValues::seal(std::uint64_t slot, std::uint64_t selector, std::uint64_t serial) const {
    if (head_bytes_ == 0) return;
    head(slot, selector).selector = selector;
    head(slot, selector).crc = checksum(slot, selector, serial);
}

bool MutableValues::is_whole(std::uint64_t slot, std::uint64_t selector, std::uint64_t serial) const {
    if (head_bytes_ == 0) return true;
    const MutableHead& seen = head(slot, selector);
    return seen.selector == selector && seen.crc == checksum(slot, selector, serial);
}

bool MutableValues::choose_whole(std::uint64_t slot, std::uint64_t serial) const {
    const std::uint64_t now = selector(slot).load();
    if (is_whole(slot, now, serial)) return true;
    std::uint64_t best = 0;
    bool found = false;
    for (std::uint64_t half = 0; half < 2; ++half) {
        const std::uint64_t told = head(slot, half).selector;
        if ((told & 1) != half || !is_whole(slot, told, serial) || (found && told < best)) continue;
        best = told;
        found = true;
    }
    if (found) selector(slot).store(best);
    return found;
}

}  // namespace sharpwave
