#include "sampling/uniform.h"

#include <algorithm>

#include "base/error.h"

namespace sharpwave {
void refuse_empty() { throw Error(ErrorKind::not_ready, "sample(): the buffer is empty; add rows first"); }

void newest_rows(const Table& table, std::uint64_t* slots, std::size_t count) {
    const std::uint64_t used = table.counters().writers_used.value.load(std::memory_order_acquire);
    std::uint64_t latest = 0, head = 0;
    bool any = false;
    for (std::uint64_t i = 0; i < used; ++i) {
        const format::Position position = table.position(i);
        if (position.ticket == format::kNone || (any && position.ticket <= latest)) continue;
        any = true;
        latest = position.ticket;
        head = position.head;
    }
    const std::uint64_t slot_count = table.header().slots, least = table.least_word();
    const std::uint64_t start = latest % table.blocks() * table.block_rows() + head;
    std::size_t found = 0;
    for (std::uint64_t i = 1; any && found < count && i <= slot_count; ++i) {
        const std::uint64_t slot = (start + slot_count - i) % slot_count;
        const std::uint64_t word = std::atomic_ref<std::uint64_t>(table.word(slot)).load(std::memory_order_acquire);
        if (format::is_live(word, least)) slots[found++] = slot;
    }
    if (found == 0) refuse_empty();
    for (std::size_t i = found; i < count; ++i) slots[i] = slots[i - found];
}

// Drawn blindly, a slot without a row costs a copy by itself: from one in so many on, counting them is cheaper.
constexpr std::uint64_t kBlindShare = 6;

UniformDraw::UniformDraw(Table& table, LiveRows& live, std::uint64_t* slots, std::size_t count)
    : live_(live), reach_(table.visible_slots()), stream_(0, 0) {
    const std::uint64_t rows = table.size();
    if (reach_ == 0 || rows == 0) refuse_empty();
    is_dense_ = rows >= reach_ - reach_ / kBlindShare;
    const std::uint64_t call = table.counters().call_number.value.fetch_add(1, std::memory_order_relaxed);
    stream_ = Substream(table.seed(), call);
    // Beside the other counter, and before anything is fetched: each waits until all stores are done.
    table.counters().rows_sampled.value.fetch_add(count, std::memory_order_relaxed);
    if (!is_dense_) {
        live_.draw(stream_, slots, 0, count, 0);
        return;
    }
    // The first rows are on their way while the rest is drawn.
    const std::size_t first = std::min(count, kFetchedRows);
    for (std::size_t i = 0; i < first; ++i) {
        slots[i] = stream_.below(reach_, i);
        table.prefetch(slots[i]);
    }
    for (std::size_t i = first; i < count; ++i) slots[i] = stream_.below(reach_, i);
}

void UniformDraw::again(std::uint64_t* slots, std::size_t position, std::uint64_t attempt) {
    if (is_dense_ && attempt <= kBlindAttempts) {
        slots[position] = stream_.below(reach_, position, attempt);
    } else {
        live_.draw(stream_, slots, position, position + 1, attempt);
    }
}

}  // namespace sharpwave
