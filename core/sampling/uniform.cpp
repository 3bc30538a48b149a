#include "sampling/uniform.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "base/error.h"
#include "base/random.h"

namespace sharpwave {
namespace {

constexpr std::uint64_t kBlindAttempts = 16;
constexpr std::uint64_t kCountedAttempts = 1000;

// Kept between calls: a batch's slots are the only memory that sampling needs.
struct Scratch {
    std::vector<std::uint64_t> slots;
    std::vector<std::uint32_t> missed;
};

// A slot by the blocks' counts of live rows. Concurrent writers may move the row found; then it is drawn again.
class Census {
public:
    explicit Census(const Table& table) : table_(table), ends_(table.blocks()) {
        std::uint64_t total = 0;
        for (std::uint64_t block = 0; block < ends_.size(); ++block) {
            ends_[block] = total += table.live_in_block(block);
        }
    }
    std::uint64_t total() const { return ends_.back(); }
    std::optional<std::uint64_t> slot(std::uint64_t k) const {
        const auto found = std::upper_bound(ends_.begin(), ends_.end(), k);
        const auto block = static_cast<std::uint64_t>(found - ends_.begin());
        return table_.nth_live_slot(block, k - (block ? ends_[block - 1] : 0));
    }

private:
    const Table& table_;
    std::vector<std::uint64_t> ends_;
};

// The same call serves one position at a time: FieldMove and words are shifted by nothing, the position says where.
bool gather_one(const Table& table, Scratch& scratch, std::size_t position, const FieldMove* fields,
                std::uint64_t* words) {
    const Gather job{
        table.view(), table.least_word(), scratch.slots.data(), fields, table.layout().fields().size(), words, false};
    std::uint32_t missed;
    return kernels().gather(job, position, position + 1, &missed) == 0;
}

void redraw(const Table& table, const Substream& stream, std::uint64_t reach, Scratch& scratch, std::size_t misses,
            const FieldMove* fields, std::uint64_t* words) {
    std::optional<Census> census;
    for (std::size_t m = 0; m < misses; ++m) {
        const std::size_t position = scratch.missed[m];
        bool found = false;
        for (std::uint64_t attempt = 1; !found && attempt <= kBlindAttempts; ++attempt) {
            scratch.slots[position] = stream.below(reach, position, attempt);
            found = gather_one(table, scratch, position, fields, words);
        }
        for (std::uint64_t attempt = kBlindAttempts + 1; !found && attempt < kCountedAttempts; ++attempt) {
            if (!census || attempt % 64 == 0) census.emplace(table);
            if (census->total() == 0) refuse_empty();
            const auto slot = census->slot(stream.below(census->total(), position, attempt));
            if (!slot) continue;
            scratch.slots[position] = *slot;
            found = gather_one(table, scratch, position, fields, words);
        }
        if (!found) {
            throw Error(ErrorKind::not_ready,
                        "sample(): writers replace rows faster than they can be read; "
                        "give a larger capacity");
        }
    }
}

}  // namespace

void refuse_empty() { throw Error(ErrorKind::not_ready, "sample(): the buffer is empty; add rows first"); }

void sample_uniform(Table& table, std::size_t count, const FieldMove* fields, std::uint64_t* serials) {
    thread_local Scratch scratch;
    table.check_open();
    const std::uint64_t reach = table.visible_slots();
    if (reach == 0 || table.size() == 0) refuse_empty();
    if (scratch.slots.size() < count) {
        scratch.slots.resize(count);
        scratch.missed.resize(count);
    }
    format::Counters& counters = table.counters();
    const std::uint64_t call = counters.call_number.value.fetch_add(1, std::memory_order_relaxed);
    const Substream stream(table.seed(), call);
    // The first rows are on their way while the rest is drawn.
    const std::size_t first = std::min<std::size_t>(count, 16);
    for (std::size_t i = 0; i < first; ++i) {
        scratch.slots[i] = stream.below(reach, i);
        table.prefetch(scratch.slots[i]);
    }
    for (std::size_t i = first; i < count; ++i) scratch.slots[i] = stream.below(reach, i);

    std::uint64_t* words = serials;  // the words become serials at the end, in place
    const std::size_t misses = table.gather(scratch.slots.data(), count, fields, words, scratch.missed.data());
    if (misses) {
        counters.redraws.value.fetch_add(misses, std::memory_order_relaxed);
        redraw(table, stream, reach, scratch, misses, fields, words);
    }
    for (std::size_t i = 0; i < count; ++i) serials[i] = format::serial_of(words[i]);
    counters.rows_sampled.value.fetch_add(count, std::memory_order_relaxed);
}

}  // namespace sharpwave
