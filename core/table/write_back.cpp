#include "table/write_back.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <string>

#include "base/error.h"
#include "base/fault.h"
#include "table/mutable_values.h"
#include "table/racy.h"

namespace sharpwave {

using namespace format;

namespace {

constexpr std::uint64_t kNowhere = ~std::uint64_t{0};
constexpr std::size_t kAhead = 16;  // rows fetched ahead of the one being written

// Kept between calls.
struct Scratch {
    std::vector<std::uint64_t> slots;    // one a serial; kNowhere: nothing to write
    std::vector<std::uint32_t> heads;    // of a hash table: position plus 1 of the last serial met there
    std::vector<std::uint32_t> chained;  // one a serial: position plus 1 of the one met there before
};

class WriteBack {
public:
    WriteBack(Table& table, const std::uint64_t* serials, std::size_t count, const std::vector<FieldWrite>& fields)
        : table_(table), values_(table), fields_(table.layout().fields()), serials_(serials), count_(count) {
        std::vector<bool> is_given(fields_.size(), false);
        for (const FieldWrite& write : fields) {
            const Field& field = fields_.at(write.field);
            if (!field.is_mutable || is_given[write.field])
                throw Error(ErrorKind::schema, "write(): field '" + field.name + "' is not mutable, or given twice");
            is_given[write.field] = true;
            given_.push_back({field.offset, field.bytes, write.flat});
        }
        for (std::size_t f = 0; f < fields_.size(); ++f) {
            if (fields_[f].is_mutable && !is_given[f]) kept_.push_back({fields_[f].offset, fields_[f].bytes, nullptr});
        }
    }

    Written run(bool skips_stale, Deadline deadline) {
        const Table::WriteLock lock(table_, deadline);
        SHARPWAVE_FAULT(write_locked);
        table_.check_open();
        Written written = find_rows(skips_stale);
        drop_superseded();
        std::uint64_t* slots = scratch().slots.data();
        for (std::size_t i = 0; i < count_; ++i) {
            if (i + kAhead < count_ && slots[i + kAhead] != kNowhere) fetch(slots[i + kAhead]);
            if (slots[i] != kNowhere) write_row(slots[i], i);
        }
        return written;
    }

private:
    struct Part {
        std::uint64_t offset, bytes;
        const std::byte* flat;
    };

    static Scratch& scratch() {
        thread_local Scratch kept;
        return kept;
    }

    // Where the rows are. One that is overwritten after this counts as written: it was there.
    Written find_rows(bool skips_stale) {
        std::vector<std::uint64_t>& slots = scratch().slots;
        slots.resize(count_);
        for (std::size_t i = 0; i < count_; ++i) {
            slots[i] = serials_[i] > kMaxSerial ? kNowhere : table_.slot_of(serials_[i]);
            if (slots[i] >= table_.header().slots) {
                slots[i] = kNowhere;
                continue;
            }
            __builtin_prefetch(&table_.word(slots[i]), 0, 2);
            values_.prefetch_selector(slots[i]);
        }
        const std::uint64_t least = table_.least_word();
        Written written{};
        for (std::size_t i = 0; i < count_; ++i) {
            if (serials_[i] == kNoSerial) continue;
            const bool is_there = slots[i] != kNowhere && is_row(slots[i], serials_[i], least);
            written.applied += is_there;
            written.stale += !is_there;
            if (is_there) continue;
            slots[i] = kNowhere;
            if (!skips_stale) {
                throw Error(ErrorKind::stale_handle,
                            "write(): row " + std::to_string(static_cast<std::int64_t>(serials_[i])) +
                                " is not in the buffer: it was overwritten, cleared or never added; nothing was "
                                "written. Give stale=\"skip\" to leave such rows out");
            }
        }
        return written;
    }

    bool is_row(std::uint64_t slot, std::uint64_t serial, std::uint64_t least) const {
        const std::uint64_t word = table_.load_word(slot);
        return serial_of(word) == serial && is_live(word, least);
    }

    // Of a serial that comes several times only the last one is written: no reader sees the others.
    void drop_superseded() {
        Scratch& kept = scratch();
        const std::size_t size = std::bit_ceil(2 * count_ + 1);
        const unsigned shift = 64u - static_cast<unsigned>(std::bit_width(size - 1));
        kept.heads.assign(size, 0);
        kept.chained.resize(count_);
        for (std::size_t i = 0; i < count_; ++i) {
            if (kept.slots[i] == kNowhere) continue;
            std::uint32_t& head = kept.heads[serials_[i] * 0x9e3779b97f4a7c15u >> shift];
            for (std::uint32_t at = head; at != 0; at = kept.chained[at - 1]) {
                if (serials_[at - 1] == serials_[i]) kept.slots[at - 1] = kNowhere;
            }
            kept.chained[i] = head;
            head = static_cast<std::uint32_t>(i + 1);
        }
    }

    void fetch(std::uint64_t slot) const {
        const std::uint64_t seen = values_.selector(slot).load(std::memory_order_relaxed);
        const std::byte* to = values_.values(slot, seen ^ 1);
        for (std::uint64_t line = 0; line < std::min<std::uint64_t>(values_.value_bytes(), 256); line += 64)
            __builtin_prefetch(to + line, 1, 2);
    }

    void write_row(std::uint64_t slot, std::size_t i) const {
        const std::atomic_ref<std::uint64_t> of_row = values_.selector(slot);
        std::uint64_t seen = of_row.load(std::memory_order_acquire);
        // After the selector: a row that comes into the slot now changes it, and the exchange below fails.
        if (!is_row(slot, serials_[i], table_.least_word())) return;
        const std::uint64_t next = (seen + 2) ^ 1;
        std::byte* to = values_.values(slot, next);
        const std::byte* from = values_.values(slot, seen);
        fence(std::memory_order_release);  // no byte before the selector has left this place
        for (const Part& part : kept_) racy_copy(to + part.offset, from + part.offset, part.bytes);
        for (const Part& part : given_) {
            racy_copy(to + part.offset, part.flat + i * part.bytes, part.bytes);
            SHARPWAVE_FAULT(write_half_copied);
        }
        values_.seal(slot, next, serials_[i]);
        SHARPWAVE_FAULT(write_copied);
        // Stored last, with release: a reader that sees it sees the whole value.
        of_row.compare_exchange_strong(seen, next, std::memory_order_release, std::memory_order_relaxed);
        SHARPWAVE_FAULT(write_published);
        table_.mark_changed(table_.block_of(slot));
        SHARPWAVE_FAULT(write_marked);
    }

    Table& table_;
    const MutableValues values_;
    const std::vector<Field>& fields_;
    const std::uint64_t* serials_;
    std::size_t count_;
    std::vector<Part> given_, kept_;
};

}  // namespace

Written write_back(Table& table, const std::uint64_t* serials, std::size_t count, const std::vector<FieldWrite>& fields,
                   bool skips_stale, Deadline deadline) {
    return WriteBack(table, serials, count, fields).run(skips_stale, deadline);
}

}  // namespace sharpwave
