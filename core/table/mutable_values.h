// The values of mutable fields. They do not stand in the rows: each row has two places for them and a selector that
// says which of the two holds (docs/decisions/0019-write-back.md).
//
// Readers take no lock: they copy the place that the selector names and look at the selector again. While a selector
// stands nobody writes to the place that it names, so a copy under one selector is whole. Whether the row itself was
// overwritten meanwhile is the caller's to check, by its word.
//
// Who writes to which place: an add, while the row's word says WRITING, to the place that the selector names; a write,
// one at a time (Table::WriteLock), to the other one. So the two never write to the same place.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "table/racy.h"
#include "table/row_batch.h"
#include "table/table.h"

namespace sharpwave {

class MutableValues {
public:
    explicit MutableValues(const Table& table)
        : value_bytes_(table.layout().mutable_bytes()),
          place_bytes_(format::mutable_place_bytes(value_bytes_, table.checksums() != nullptr)),
          head_bytes_(place_bytes_ - value_bytes_),
          half_bytes_(table.header().slots * place_bytes_),
          places_(value_bytes_ ? table.region(format::kMutables) : nullptr),
          selectors_(value_bytes_ ? reinterpret_cast<std::uint64_t*>(table.region(format::kSelectors)) : nullptr) {}

    bool any() const { return value_bytes_ != 0; }
    std::uint64_t value_bytes() const { return value_bytes_; }

    std::atomic_ref<std::uint64_t> selector(std::uint64_t slot) const {
        return std::atomic_ref<std::uint64_t>(selectors_[slot]);
    }

    // The values of a row under a selector.
    std::byte* values(std::uint64_t slot, std::uint64_t selector) const { return place(slot, selector) + head_bytes_; }

    // Calls copy(values), and again where the row was written meanwhile.
    template <class Copy>
    void read(std::uint64_t slot, const Copy& copy) const {
        const std::atomic_ref<std::uint64_t> of_row = selector(slot);
        for (;;) {
            const std::uint64_t seen = of_row.load(std::memory_order_acquire);
            copy(static_cast<const std::byte*>(values(slot, seen)));
            fence(std::memory_order_acquire);
            if (of_row.load(std::memory_order_relaxed) == seen) [[likely]]
                return;
        }
    }

    void prefetch_selector(std::uint64_t slot) const { __builtin_prefetch(selectors_ + slot, 0, 2); }
    void prefetch(std::uint64_t slot) const;  // the first lines of what it names

    // An add: the values of rows first.. of the batch into slots slot... Their words say WRITING.
    void begin_rows(const Table& table, const RowBatch& batch, std::size_t first, std::size_t count, std::uint64_t slot,
                    std::uint64_t serial) const;

    // After the values of a place were written: what a selector and a serial make of its head.
    void seal(std::uint64_t slot, std::uint64_t selector, std::uint64_t serial) const;

    // Whether the place that a selector names is the one that was written for it and for the row. Without checksums
    // nothing tells, and it is.
    bool is_whole(std::uint64_t slot, std::uint64_t selector, std::uint64_t serial) const;

    // After a power loss, where that is not so: the newer of the two places that are whole. False: neither is.
    bool choose_whole(std::uint64_t slot, std::uint64_t serial) const;

private:
    std::byte* place(std::uint64_t slot, std::uint64_t selector) const {
        return places_ + (selector & 1) * half_bytes_ + slot * place_bytes_;
    }
    format::MutableHead& head(std::uint64_t slot, std::uint64_t selector) const {
        return *reinterpret_cast<format::MutableHead*>(place(slot, selector));
    }
    std::uint32_t checksum(std::uint64_t slot, std::uint64_t selector, std::uint64_t serial) const;

    std::uint64_t value_bytes_, place_bytes_, head_bytes_, half_bytes_;
    std::byte* places_;
    std::uint64_t* selectors_;
};

}  // namespace sharpwave
