#include "sampling/live_rows.h"

#include <algorithm>
#include <bit>

#include "sampling/uniform.h"

namespace sharpwave {

using namespace format;

namespace {

// So many at most: a change costs a walk over all of them.
constexpr std::uint64_t kMostGroups = 2048;

// Bits of each byte and of those below it, a byte each. In plain arithmetic: the least processor that we build for has
// no instruction that counts bits, and the library's call costs more than this.
constexpr std::uint64_t kOnes = 0x0101010101010101;
std::uint64_t running_counts(std::uint64_t word) {
    word -= word >> 1 & 0x5555555555555555;
    word = (word & 0x3333333333333333) + (word >> 2 & 0x3333333333333333);
    return ((word + (word >> 4)) & 0x0f0f0f0f0f0f0f0f) * kOnes;
}

// The place of the k-th bit that is set, from the counts of its word: first its byte, then its place in there.
std::uint64_t kth_bit(std::uint64_t word, std::uint64_t counts, std::uint64_t k) {
    constexpr std::uint64_t kHigh = 0x80 * kOnes;
    const std::uint64_t passed =
        (((k * kOnes | kHigh) - counts) & kHigh) >> 7;  // 1 in each byte that ends at k or before
    const std::uint64_t place = (passed * kOnes >> 56) * 8;
    k -= counts << 8 >> place & 0xff;
    std::uint64_t byte = word >> place & 0xff;
    for (; k > 0; --k) byte &= byte - 1;
    return place + static_cast<std::uint64_t>(std::countr_zero(byte));
}

}  // namespace

void LiveRows::look_at(std::uint64_t begin, std::uint64_t end) {
    const std::uint64_t least = table_.least_word();
    for (std::uint64_t slot = begin; slot < end; ++slot) {
        const std::uint64_t mask = std::uint64_t{1} << slot % 64;
        if (is_live(table_.load_word(slot), least)) {
            bits_[slot / 64] |= mask;
        } else {
            bits_[slot / 64] &= ~mask;
        }
    }
    for (std::uint64_t group = begin / 64 / group_words_; group * group_words_ * 64 < end; ++group) {
        const std::size_t first = group * group_words_,
                          last = std::min<std::size_t>(first + group_words_, bits_.size());
        counts_[group] = 0;
        for (std::size_t word = first; word < last; ++word) counts_[group] += running_counts(bits_[word]) >> 56;
    }
}

void LiveRows::catch_up() {
    const Counters& counters = table_.counters();
    const std::uint64_t blocks = table_.blocks(), slots = table_.header().slots;
    const std::uint64_t origin = counters.origin_ticket.value.load(std::memory_order_acquire);
    if (bits_.empty() || origin != origin_) {
        const std::uint64_t words = (slots + 63) / 64;
        group_words_ = std::max<std::uint64_t>(4, (words + kMostGroups - 1) / kMostGroups);
        bits_.assign(words, 0);
        seen_.assign(blocks, {kNone, 0, 0});
        counts_.assign((words + group_words_ - 1) / group_words_, 0);
        ends_.assign(counts_.size(), 0);
        guide_.assign(ends_.size(), 0);
        origin_ = origin;
        rows_ = 0;
    }
    heads_.assign(blocks, kNone);
    const std::uint64_t used = counters.writers_used.value.load(std::memory_order_acquire);
    for (std::uint64_t i = 0; i < used; ++i) {
        const auto [ticket, head] = table_.position(i);
        if (ticket == kNone) continue;
        const std::uint64_t block = ticket % blocks;
        if (table_.block_record(block).ticket.load(std::memory_order_acquire) == ticket) heads_[block] = head;
    }
    bool has_changed = false;
    for (std::uint64_t block = 0; block < blocks; ++block) {
        const BlockRecord& record = table_.block_record(block);
        const std::uint64_t ticket = record.ticket.load(std::memory_order_acquire);
        if (ticket == kNone || ticket < origin) continue;
        const std::uint64_t length = table_.block_length(block), base = block * table_.block_rows();
        std::uint64_t head = heads_[block];
        // Without a writer it is as full as it gets, or just claimed.
        if (head == kNone) head = record.owner.load(std::memory_order_acquire) ? 0 : length;
        // Before the words: what changes after it is seen the next time.
        const std::uint64_t changed = record.changed.load(std::memory_order_acquire);
        Seen& seen = seen_[block];
        const bool is_same = seen.ticket == ticket && seen.changed == changed;
        if (is_same && seen.head == head) continue;
        if (is_same && seen.head < head) {
            look_at(base + seen.head, base + head);
        } else {
            look_at(base, base + length);
        }
        seen = {ticket, head, changed};
        has_changed = true;
    }
    if (has_changed) sum_up();
}

void LiveRows::sum_up() {
    rows_ = 0;
    for (std::size_t group = 0; group < ends_.size(); ++group) ends_[group] = rows_ += counts_[group];
    // Share j begins with row j * rows / shares, which is in the first group that ends behind it.
    const auto shares = static_cast<double>(guide_.size()), rows = static_cast<double>(rows_);
    shares_a_row_ = rows_ ? shares / rows : 0;
    for (std::size_t j = 0, group = 0; j < guide_.size(); ++j) {
        const auto first = static_cast<std::uint64_t>(static_cast<double>(j) * (rows / shares));
        while (group + 1 < ends_.size() && ends_[group] <= first) ++group;
        guide_[j] = static_cast<std::uint32_t>(group);
    }
}

std::uint64_t LiveRows::kth(std::uint64_t k) const {
    const auto share = static_cast<std::size_t>(static_cast<double>(k) * shares_a_row_);
    std::size_t group = guide_[std::min(share, guide_.size() - 1)];
    while (ends_[group] <= k) ++group;
    while (group > 0 && ends_[group - 1] > k) --group;  // the share is rounded
    k -= group ? ends_[group - 1] : 0;
    for (std::size_t word = group * group_words_;; ++word) {
        const std::uint64_t counts = running_counts(bits_[word]), here = counts >> 56;
        if (k < here) return word * 64 + kth_bit(bits_[word], counts, k);
        k -= here;
    }
}

void LiveRows::draw(const Substream& stream, std::uint64_t* slots, std::size_t begin, std::size_t end,
                    std::uint64_t attempt) {
    const std::lock_guard<std::mutex> guard(mutex_);
    catch_up();
    if (attempt > 0) {
        // What was drawn before is gone, though nothing was written over it.
        const std::uint64_t gone = slots[begin];
        look_at(gone, gone + 1);
        sum_up();
    }
    if (rows_ == 0) refuse_empty();
    for (std::size_t i = begin; i < end; ++i) {
        slots[i] = kth(stream.below(rows_, i, attempt));
        if (i < begin + kFetchedRows) table_.prefetch(slots[i]);
    }
}

}  // namespace sharpwave
