#include "views/windows.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/workers.h"

namespace sharpwave {

using namespace format;

namespace {

// Of a row of the next window, ahead. What is behind them the processor fetches by itself.
constexpr std::uint64_t kFetchedBytes = 256;

}  // namespace

// Where a window's rows are, as they were seen, oldest first.
struct Windows::Run {
    std::uint64_t* slots;
    std::uint64_t* words;
    std::uint64_t before = 0, count = 0;  // rows before the one drawn; rows in all

    void put(std::uint64_t slot, std::uint64_t word) {
        slots[count] = slot;
        words[count++] = word;
    }
};

// False: the row drawn is not there any more.
bool Windows::walk(std::uint64_t slot, std::uint64_t least, Run& run) const {
    std::uint64_t word = std::atomic_ref<std::uint64_t>(table_.word(slot)).load(std::memory_order_acquire);
    if (!is_live(word, least)) return false;
    std::uint64_t at = slot, seen = word;
    bool gone;
    while (run.count < config_.burn_in && table_.predecessor(at, seen, gone, config_.across) && is_live(seen, least)) {
        run.put(at, seen);
    }
    std::reverse(run.slots, run.slots + run.count);
    std::reverse(run.words, run.words + run.count);
    run.before = run.count;
    run.put(slot, word);
    const std::uint64_t most = run.before + config_.length + config_.bootstrap;
    while (run.count < most && (config_.across ? table_.stream_successor(slot, word) : table_.successor(slot, word))) {
        run.put(slot, word);
    }
    return true;
}

// A window whose rows stand side by side in one block, and what their words are but for flags.
struct Windows::NearRun {
    std::uint64_t slot = 0;               // of the first row
    std::uint64_t word = 0;               // of the row drawn
    std::uint64_t before = 0, count = 0;  // as in Run
    bool starts_episode = false;          // the first row does
    std::uint64_t step = 0;               // from one word to the next

    std::uint64_t word_at(std::uint64_t k) const { return word + (k - before) * step; }
};

// Looks at every word of the window; the lines of the next one are fetched meanwhile. False: not side by side, or
// something is missing, or in the way.
bool Windows::find_near(std::uint64_t slot, std::uint64_t next_slot, std::uint64_t least, NearRun& run) const {
    const std::uint64_t width = table_.width(), offset = slot - table_.block_of(slot) * table_.block_rows();
    const RowView view = table_.view();
    const std::uint64_t fetched = std::min<std::uint64_t>(view.stride, kFetchedBytes);
    const std::byte* next = view.rows + next_slot * view.stride;
    run.word = table_.load_word(slot);
    run.step = width << kSerialShift;
    if (!is_live(run.word, least)) return false;
    const auto differs = [&](std::uint64_t seen, std::uint64_t delta) {
        return ((seen ^ (run.word + delta)) & ~kFlagMask) != 0 || (seen & kRetired);
    };
    std::uint64_t seen = run.word;
    for (; run.before < config_.burn_in && (config_.across || !(seen & kEpisodeStart)); ++run.before) {
        const std::uint64_t back = (run.before + 1) * width;
        if (offset < back) return false;
        seen = table_.load_word(slot - back);
        if (differs(seen, -(run.before + 1) * run.step) || seen < least) return false;
        if (!config_.across && (seen & kEndMask)) return false;
    }
    run.starts_episode = (seen & kEpisodeStart) != 0;
    run.slot = slot - run.before * width;
    const std::uint64_t most = config_.length + config_.bootstrap;
    const std::uint64_t left = (table_.rows_left(slot) - 1) / width;
    std::uint64_t after = 0;
    for (seen = run.word; after + 1 < most; ++after) {
        if (!config_.across && (seen & kEndMask)) break;
        if (after == left) return false;
        for (std::uint64_t line = 0; line < fetched; line += 64) __builtin_prefetch(next + line, 0, 2);
        next += width * view.stride;
        seen = table_.load_word(slot + (after + 1) * width);
        if (differs(seen, (after + 1) * run.step)) return false;
        if (!config_.across && (seen & kEpisodeStart)) return false;
    }
    run.count = run.before + 1 + after;
    return true;
}

// What a view was asked for besides, of a window whose words are checked after this.
[[gnu::noinline]] void Windows::tell_places(const NearRun& run, std::uint64_t place, const Outputs& out,
                                            const WindowMasks& masks) const {
    for (std::uint64_t k = 0; k < places(); ++k) {
        const std::uint64_t row = std::min(k, run.count - 1);
        if (masks.serials)
            masks.serials[place + k] = k == row ? static_cast<std::int64_t>(serial_of(run.word_at(k))) : -1;
        if (out.truncated)
            out.truncated[place + k] = (table_.load_word(run.slot + row * table_.width()) & kTruncated) != 0;
    }
}

bool Windows::gather_near(const Transitions& rows, const std::uint64_t* slots, std::size_t i, std::uint64_t next_slot,
                          const Outputs& out, const WindowMasks& masks, std::uint64_t* words) const {
    NearRun run;
    if (!find_near(slots[i], next_slot, table_.least_word(), run)) return false;
    const std::uint64_t places = this->places(), place = i * places, width = table_.width();
    const bool streaming = run.count * rows.example_bytes() >= kStreamingBytes;
    words[i] = run.word;
    rows.copy_run(run.slot, width, run.count, place, out, streaming);
    for (std::uint64_t k = run.count; k < places; ++k)
        rows.copy_run(run.slot + (run.count - 1) * width, width, 1, place + k, out, streaming);
    std::memset(masks.valid + place, 1, run.count);
    std::memset(masks.valid + place + run.count, 0, places - run.count);
    std::memset(masks.learn + place, 0, places);
    std::memset(masks.learn + place + run.before, 1, std::min(config_.length, run.count - run.before));
    std::memset(masks.first + place, 0, places);
    masks.first[place] = run.starts_episode;
    if (masks.serials || out.truncated) [[unlikely]]
        tell_places(run, place, out, masks);
    fence(std::memory_order_acquire);
    std::uint64_t changed = 0;
    for (std::uint64_t k = 0; k < run.count; ++k) {
        const std::uint64_t word = table_.load_word(run.slot + k * width, std::memory_order_relaxed);
        changed |= word ^ run.word_at(k);
        if (config_.across) masks.first[place + k] = (word & kEpisodeStart) != 0;
    }
    return (changed & ~kFlagMask) == 0;
}

std::size_t Windows::gather(const Transitions& rows, const std::uint64_t* slots, std::size_t begin, std::size_t end,
                            const Outputs& out, const WindowMasks& masks, std::uint64_t* words,
                            std::uint32_t* missed) const {
    if (!rows.copies_rows() || out.places) return gather_far(rows, slots, begin, end, out, masks, words, missed);
    std::vector<std::uint8_t> is_far(end - begin);
    const auto part = [&](std::size_t from, std::size_t to) {
        for (std::size_t i = begin + from; i < begin + to; ++i) {
            const std::uint64_t next = i + 1 < begin + to ? slots[i + 1] : slots[i];
            is_far[i - begin] = !gather_near(rows, slots, i, next, out, masks, words);
        }
    };
    if ((end - begin) * places() * rows.example_bytes() < kParallelBytes) {
        part(0, end - begin);
    } else {
        in_parallel(end - begin, part);
    }
    std::size_t misses = 0;
    for (std::size_t i = begin; i < end; ++i) {
        if (is_far[i - begin]) misses += gather_far(rows, slots, i, i + 1, out, masks, words, missed + misses);
    }
    return misses;
}

// Row by row, wherever the rows are.
std::size_t Windows::gather_far(const Transitions& rows, const std::uint64_t* slots, std::size_t begin, std::size_t end,
                                const Outputs& out, const WindowMasks& masks, std::uint64_t* words,
                                std::uint32_t* missed) const {
    // Kept between calls: where every place's row is, its word as the walk and then the copy saw it.
    struct Scratch {
        std::vector<std::uint64_t> slots, seen, copied;
        std::vector<std::uint32_t> missed;
        std::vector<std::uint8_t> failed;
    };
    thread_local Scratch scratch;
    const std::uint64_t width = places(), least = table_.least_word();
    const std::size_t count = end - begin;
    if (scratch.slots.size() < end * width) {
        scratch.slots.resize(end * width);
        scratch.seen.resize(end * width);
        scratch.copied.resize(end * width);
        scratch.missed.resize(end * width);
    }
    scratch.failed.assign(count, 0);
    for (std::size_t i = begin; i < end; ++i) {
        const std::size_t place = i * width;
        Run run{&scratch.slots[place], &scratch.seen[place]};
        if (!walk(slots[i], least, run)) {
            scratch.failed[i - begin] = 1;
            run.put(slots[i], 0);
        }
        words[i] = run.words[run.before];
        for (std::uint64_t k = 0; k < width; ++k) {
            const bool is_row = k < run.count;
            masks.valid[place + k] = is_row;
            masks.learn[place + k] = is_row && k >= run.before && k < run.before + config_.length;
            masks.first[place + k] = is_row && (run.words[k] & kEpisodeStart);
            if (masks.serials)
                masks.serials[place + k] = is_row ? static_cast<std::int64_t>(serial_of(run.words[k])) : -1;
        }
        for (std::uint64_t k = run.count; k < width; ++k) {
            run.slots[k] = run.slots[run.count - 1];
            run.words[k] = run.words[run.count - 1];
        }
    }
    const std::size_t misses = rows.gather(scratch.slots.data(), begin * width, end * width, out, scratch.copied.data(),
                                           scratch.missed.data(), rows.config().n_step == 1);
    for (std::size_t m = 0; m < misses; ++m) scratch.failed[scratch.missed[m] / width - begin] = 1;
    std::size_t total = 0;
    for (std::size_t i = begin; i < end; ++i) {
        std::uint8_t& failed = scratch.failed[i - begin];
        // Another row may have come between the walk and the copy.
        for (std::size_t at = i * width; !failed && at < (i + 1) * width; ++at) {
            failed = ((scratch.copied[at] ^ scratch.seen[at]) & ~kFlagMask) != 0;
        }
        if (failed) missed[total++] = static_cast<std::uint32_t>(i);
    }
    return total;
}

}  // namespace sharpwave
