#include "batches/batch_maker.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "sampling/uniform.h"

namespace sharpwave {
namespace {

constexpr std::uint64_t kAttempts = 1000;

// Kept between calls: a batch's slots are the only memory that sampling needs.
struct Scratch {
    std::vector<std::uint64_t> slots, limits;
    std::vector<double> probabilities;
    std::vector<std::uint32_t> missed, more;
};

[[noreturn]] void refuse_race() {
    throw Error(ErrorKind::not_ready,
                "sample(): writers replace rows faster than they can be read; give a larger capacity");
}

}  // namespace

BatchMaker::BatchMaker(std::shared_ptr<Table> table, BatchConfig config)
    : table_(std::move(table)), view_(*table_, std::move(config.view)), live_(*table_), newest_(config.newest) {
    if (config.index) {
        config.index->newest = config.newest;
        index_ = std::make_shared<RowIndex>(*table_, *config.index);
    }
    if (config.windows) windows_.emplace(*table_, *config.windows);
    if (config.goals) goals_.emplace(*table_, index_->starts().places(), *config.goals);
}

void BatchMaker::sample(std::size_t count, const Outputs& out, const BatchExtras& drawn, Deadline deadline) {
    thread_local Scratch of_this_thread;
    Scratch& scratch = of_this_thread;  // its address is looked up once
    table_->check_open();
    if (scratch.slots.size() < count) {
        scratch.slots.resize(count);
        scratch.missed.resize(count);
    }
    std::uint64_t* slots = scratch.slots.data();
    std::uint32_t* missed = scratch.missed.data();
    std::uint64_t* words = drawn.serials;  // the words become serials at the end, in place
    format::Counters& counters = table_->counters();
    const auto redraw = [&](std::size_t misses, auto again) {
        counters.redraws.value.fetch_add(misses, std::memory_order_relaxed);
        for (std::size_t m = 0; m < misses; ++m) {
            const std::size_t position = missed[m];
            bool found = false;
            for (std::uint64_t attempt = 1; !found && attempt < kAttempts; ++attempt) found = again(position, attempt);
            if (!found) {
                if (!index_) counters.rows_sampled.value.fetch_sub(count, std::memory_order_relaxed);
                refuse_race();
            }
        }
    };
    const auto gather = [&](std::size_t begin, std::size_t end, std::uint32_t* bad) {
        if (windows_) return windows_->gather(view_, slots, begin, end, out, drawn.masks, words, bad);
        return view_.gather(slots, begin, end, out, words, bad);
    };
    if (!index_) {
        UniformDraw draw(*table_, live_, slots, count);
        if (drawn.odds) *drawn.odds = {static_cast<double>(table_->size()), 1};
        if (newest_) newest_rows(*table_, slots, std::min<std::size_t>(count, newest_));
        if (const std::size_t misses = gather(0, count, missed)) {
            redraw(misses, [&](std::size_t position, std::uint64_t attempt) {
                std::uint32_t bad;
                if (position < newest_) {
                    std::vector<std::uint64_t> newest(position + 1);
                    newest_rows(*table_, newest.data(), newest.size());
                    slots[position] = newest[position];
                } else {
                    draw.again(slots, position, attempt);
                }
                return gather(position, position + 1, &bad) == 0;
            });
        }
    } else {
        if (scratch.limits.size() < count) {
            scratch.limits.resize(count);
            scratch.probabilities.resize(count);
        }
        double* probabilities = drawn.probabilities ? drawn.probabilities : scratch.probabilities.data();
        const Drawn target{slots, scratch.limits.data(), probabilities};
        IndexDraw draw(*index_, target, count, deadline);
        const auto gather_all = [&](std::size_t begin, std::size_t end, std::uint32_t* bad) {
            std::size_t misses = gather(begin, end, bad);
            if (!goals_) return misses;
            std::vector<std::uint32_t>& more = scratch.more;
            if (more.size() < end - begin) more.resize(end - begin);
            const std::size_t found =
                goals_->gather(slots, words, begin, end, draw.stream(), out, drawn.goals, more.data());
            for (std::size_t m = 0, known = misses; m < found; ++m) {
                if (std::find(bad, bad + known, more[m]) == bad + known) bad[misses++] = more[m];
            }
            return misses;
        };
        std::size_t misses = gather_all(0, count, missed);
        // A row younger than the draw has another's probability.
        const auto is_younger = [&](std::size_t i) { return format::serial_of(words[i]) >= target.limits[i]; };
        for (std::size_t i = 0, known = misses; i < count; ++i) {
            if (is_younger(i) && std::find(missed, missed + known, i) == missed + known) {
                missed[misses++] = static_cast<std::uint32_t>(i);
            }
        }
        if (misses) {
            redraw(misses, [&](std::size_t position, std::uint64_t attempt) {
                std::uint32_t bad;
                draw.again(target, position, attempt);
                return gather_all(position, position + 1, &bad) == 0 && !is_younger(position);
            });
        }
        if (drawn.weights) draw.weigh(probabilities, drawn.weights, count);
        if (drawn.odds) *drawn.odds = draw.odds(probabilities, count);
    }
    for (std::size_t i = 0; i < count; ++i) drawn.serials[i] = format::serial_of(words[i]);
    // Uniform draws were counted when they were made.
    if (index_) counters.rows_sampled.value.fetch_add(count, std::memory_order_relaxed);
}

void BatchMaker::read(std::uint64_t* serials, std::size_t count, const Outputs& out, std::uint64_t* words,
                      std::size_t* skipped) const {
    const auto gone = [&](std::uint64_t serial) {
        throw Error(ErrorKind::stale_handle, "get(): row " + std::to_string(static_cast<std::int64_t>(serial)) +
                                                 " is not in the buffer: it was overwritten, cleared or never added");
    };
    std::vector<std::uint64_t> slots(count);
    std::vector<std::uint32_t> missed(count);
    std::size_t kept = 0;
    const std::uint64_t lap = table_->blocks() * table_->block_rows();
    for (std::uint64_t i = 0, slot = 0; i < count; ++i) {
        // Mostly the next one: a division costs as much as the copy of a small row.
        if (i > 0 && serials[i] == serials[i - 1] + 1 && slot < lap - 1) {
            ++slot;
        } else {
            slot = serials[i] > format::kMaxSerial ? ~std::uint64_t{0} : table_->slot_of(serials[i]);
        }
        if (slot >= table_->header().slots) {
            if (!skipped) gone(serials[i]);
            continue;
        }
        serials[kept] = serials[i];
        if (kept < kFetchedRows) table_->prefetch(slot);
        slots[kept++] = slot;
    }
    // A row whose neighbours were changing may well be there: look again before it is called gone.
    std::vector<bool> bad(kept, false);
    std::size_t misses = kept ? view_.gather(slots.data(), 0, kept, out, words, missed.data(), true) : 0;
    for (std::size_t m = 0; m < misses; ++m) {
        const std::uint32_t i = missed[m];
        std::uint32_t again;
        bool found = false;
        for (int attempt = 0; attempt < 100 && !found; ++attempt) {
            found = view_.gather(slots.data(), i, i + 1, out, words, &again, true) == 0;
            if (!found && format::serial_of(words[i]) != serials[i]) break;
        }
        bad[i] = !found;
    }
    std::size_t left = 0;
    for (std::size_t i = 0; i < kept; ++i) {
        if (bad[i] || format::serial_of(words[i]) != serials[i]) {
            if (!skipped) gone(serials[i]);
            continue;
        }
        if (left != i) {
            serials[left] = serials[i];
            words[left] = words[i];
            for (std::size_t f = 0; f < view_.config().leaves.size(); ++f) {
                const std::uint64_t bytes = view_.leaf_bytes(view_.config().leaves[f]);
                std::memcpy(out.flats[f] + left * bytes, out.flats[f] + i * bytes, bytes);
                if (out.lengths && out.lengths[f]) out.lengths[f][left] = out.lengths[f][i];
            }
        }
        ++left;
    }
    if (skipped) *skipped = count - left;
}

}  // namespace sharpwave
