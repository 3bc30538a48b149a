#include "views/windows.h"

#include <algorithm>
#include <vector>

namespace sharpwave {

using namespace format;

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

std::size_t Windows::gather(const Transitions& rows, const std::uint64_t* slots, std::size_t begin, std::size_t end,
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
        }
        for (std::uint64_t k = run.count; k < width; ++k) {
            run.slots[k] = run.slots[run.count - 1];
            run.words[k] = run.words[run.count - 1];
        }
    }
    const std::size_t misses = rows.gather(scratch.slots.data(), begin * width, end * width, out, scratch.copied.data(),
                                           scratch.missed.data(), true);
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
