// One call's draws from the index: see RowIndex::Draw in sampling/row_index.h.
#include <algorithm>
#include <bit>
#include <vector>

#include "base/error.h"
#include "base/fault.h"
#include "sampling/row_index.h"
#include "sampling/uniform.h"

namespace sharpwave {

using namespace format;

namespace {

// 53 random bits as a number in [0, 1).
double unit(std::uint64_t bits) { return static_cast<double>(bits >> 11) * 0x1p-53; }

// Attempts of one position: blind ones, then those by count. The mixing coin has attempts of its own.
constexpr std::uint64_t kBlindAttempts = 16;
constexpr std::uint64_t kCoin = 1 << 20;
constexpr std::uint64_t kUniform = 1 << 21;

// The child at which a running sum from the first on passes x, which is spent by what lies before it.
template <class Item>
std::uint64_t child_at(const Item* items, double& x) {
    std::uint64_t child = 0;
    for (; child < 15 && x >= static_cast<double>(items[child]); ++child) x -= static_cast<double>(items[child]);
    return child;
}

// Where all masses are 1: the leaves with so many before them, in the order of leaves. (A draw's descent takes the
// children of a node in another order, which suits the machine.)
void descend_in_order(const SumTree& tree, double* ranks, std::uint64_t* leaves, std::size_t count) {
    std::fill_n(leaves, count, 0);
    for (int level = tree.depth - 1; level > 0; --level) {
        for (std::size_t i = 0; i < count; ++i) {
            leaves[i] = leaves[i] * 16 + child_at(tree.levels[level - 1][leaves[i]].sums, ranks[i]);
            if (level > 1) {
                __builtin_prefetch(tree.levels[level - 2][leaves[i]].sums);
                __builtin_prefetch(tree.levels[level - 2][leaves[i]].sums + 8);
            } else {
                __builtin_prefetch(tree.leaves[leaves[i]].masses);
            }
        }
    }
    for (std::size_t i = 0; i < count; ++i) {
        leaves[i] = leaves[i] * 16 + child_at(tree.leaves[leaves[i]].masses, ranks[i]);
    }
}

// The sum of the masses before a leaf; a count where all are 1.
double mass_before(const SumTree& tree, std::uint64_t leaf) {
    double sum = 0;
    for (std::uint64_t i = leaf / 16 * 16; i < leaf; ++i) sum += tree.mass(i);
    std::uint64_t node = leaf / 16;
    for (int level = 0; level < tree.depth && node > 0; ++level, node /= 16) {
        const SumGroup& nodes = tree.levels[level][node / 16];
        for (std::uint64_t i = 0; i < node % 16; ++i) sum += nodes.sums[i];
    }
    return sum;
}

}  // namespace

RowIndex::Draw::Draw(RowIndex& index, const Drawn& drawn, std::size_t count, Deadline deadline)
    : index_(index),
      deadline_(deadline),
      newest_(std::min<std::size_t>(count, index.config_.newest)),
      batch_(count - newest_),
      stream_(0, 0) {
    const Table::IndexLock lock(index.table_, deadline);
    index.table_.check_open();
    index.catch_up();
    const Order order = index.config_.order;
    if (index.head_->rows < index.rows_needed(count)) index.refuse(count);
    beta_ = index.beta();
    const std::uint64_t call = index.table_.counters().call_number.value.fetch_add(1, std::memory_order_relaxed);
    stream_ = Substream(index.table_.seed(), call);
    read_odds();
    if (newest_) index.newest_rows(drawn.slots, newest_);
    if (order == Order::weighted) {
        draw_weighted(drawn, count);
    } else {
        draw_counted(drawn, count);
    }
    finish(drawn, 0, count);
    SHARPWAVE_FAULT(index_drawn);
    if (order != Order::shuffle) index.count_reads(drawn.slots, count);
}

void RowIndex::Draw::draw_weighted(const Drawn& drawn, std::size_t count) {
    const SumTree& tree = index_.tree_;
    const double mix = index_.config_.mix;
    if (total_ <= 0 || mix >= 1) {
        for (std::size_t i = newest_; i < count; ++i) drawn.slots[i] = uniform_slot(i, 0);
        return;
    }
    for (std::size_t i = newest_; i < count; ++i) drawn.probabilities[i] = target(i, 0);
    index_.kernels_.descend(tree, drawn.probabilities + newest_, drawn.slots + newest_, batch_,
                            index_.config_.stratified);
    for (std::size_t i = newest_; mix > 0 && i < count; ++i) {
        if (unit(stream_.bits(i, kCoin)) < mix) drawn.slots[i] = uniform_slot(i, 0);
    }
}

// Orders that count rows from the oldest or from the newest on.
void RowIndex::Draw::draw_counted(const Drawn& drawn, std::size_t count) {
    if (index_.config_.order == Order::shuffle) return draw_epoch(drawn.slots, 0, count);
    const double before = mass_before(index_.tree_, index_.turn());
    for (std::size_t i = newest_; i < count; ++i) {
        double rank;  // 0 is the oldest
        switch (index_.config_.order) {
            case Order::recent: {
                const std::uint64_t among = std::min(index_.config_.recent, index_.head_->rows);
                rank = total_ - 1 - static_cast<double>(stream_.below(among, i));
                break;
            }
            case Order::lifo:
                rank = total_ - 1 - static_cast<double>(i);
                break;
            default:
                rank = static_cast<double>(i);
        }
        const double turned = before + rank;
        drawn.probabilities[i] = (turned >= total_ ? turned - total_ : turned) + 0.5;
    }
    descend_in_order(index_.tree_, drawn.probabilities + newest_, drawn.slots + newest_, batch_);
}

// Rows that the epoch has left, in random order, each once. What it lacks comes from the next one.
void RowIndex::Draw::draw_epoch(std::uint64_t* slots, std::size_t begin, std::size_t end) {
    while (begin < end) {
        auto left = static_cast<std::uint64_t>(index_.tree_.total());
        if (left == 0) {
            index_.begin_epoch();
            left = static_cast<std::uint64_t>(index_.tree_.total());
        }
        const std::size_t count = std::min<std::uint64_t>(end - begin, left);
        std::vector<double> ranks(count);
        if (count > left / 2) {
            std::vector<std::uint64_t> all(left);
            for (std::uint64_t i = 0; i < left; ++i) all[i] = i;
            for (std::size_t i = 0; i < count; ++i) {
                std::swap(all[i], all[i + stream_.below(left - i, begin + i)]);
                ranks[i] = static_cast<double>(all[i]) + 0.5;
            }
        } else {
            // Most are new at once; those drawn before are drawn again.
            std::vector<std::uint64_t> seen(std::bit_ceil(4 * count), kNone);
            for (std::size_t i = 0; i < count; ++i) {
                for (std::uint64_t attempt = 0;; ++attempt) {
                    const std::uint64_t rank = stream_.below(left, begin + i, attempt);
                    std::size_t at = mix64(rank) % seen.size();
                    while (seen[at] != kNone && seen[at] != rank) at = (at + 1) % seen.size();
                    if (seen[at] == rank) continue;
                    seen[at] = rank;
                    ranks[i] = static_cast<double>(rank) + 0.5;
                    break;
                }
            }
        }
        index_.kernels_.descend(index_.tree_, ranks.data(), slots + begin, count, false);
        for (std::size_t i = 0; i < count; ++i) index_.set_leaf(slots[begin + i], 0, 0);
        index_.kernels_.refresh(index_.tree_, slots + begin, count);
        index_.count_reads(slots + begin, count);  // before the next epoch begins
        begin += count;
    }
}

void RowIndex::Draw::again(const Drawn& drawn, std::size_t position, std::uint64_t attempt) {
    const Table::IndexLock lock(index_.table_, deadline_);
    index_.catch_up();
    // A row that can no longer be drawn, though nothing was written over it, leaves now.
    const std::uint64_t missed = drawn.slots[position];
    const std::uint64_t word =
        std::atomic_ref<std::uint64_t>(index_.table_.word(missed)).load(std::memory_order_acquire);
    if (!is_live(word, index_.table_.least_word()) && state_of(word) != kWriting) {
        index_.remove(missed);
        index_.kernels_.refresh(index_.tree_, &missed, 1);
    }
    if (index_.head_->rows == 0) index_.refuse(1);
    read_odds();
    const double mix = index_.config_.mix;
    const Order order = index_.config_.order;
    if (position < newest_) {
        std::vector<std::uint64_t> newest(position + 1);
        index_.newest_rows(newest.data(), newest.size());
        drawn.slots[position] = newest[position];
    } else if (order == Order::shuffle) {
        draw_epoch(drawn.slots, position, position + 1);
    } else if (order != Order::weighted) {
        // The next in turn after the batch, or for `recent` another of them.
        const std::uint64_t among = order == Order::recent ? std::min(index_.config_.recent, index_.head_->rows) : 0;
        const std::uint64_t step = among ? stream_.below(among, position, attempt) : position + attempt - 1;
        double rank = static_cast<double>(step % index_.head_->rows);
        if (order != Order::fifo) rank = total_ - 1 - rank;
        const double turned = mass_before(index_.tree_, index_.turn()) + rank;
        double x = (turned >= total_ ? turned - total_ : turned) + 0.5;
        descend_in_order(index_.tree_, &x, &drawn.slots[position], 1);
    } else if (total_ <= 0 || (mix > 0 && unit(stream_.bits(position, kCoin + attempt)) < mix)) {
        drawn.slots[position] = uniform_slot(position, attempt);
    } else {
        double x = target(position, attempt);
        index_.kernels_.descend(index_.tree_, &x, &drawn.slots[position], 1, false);
    }
    finish(drawn, position, position + 1);
    if (order != Order::shuffle) index_.count_reads(&drawn.slots[position], 1);
}

void RowIndex::Draw::read_odds() {
    const SumTree& tree = index_.tree_;
    const double mix = index_.config_.mix;
    total_ = tree.total();
    rows_ = static_cast<double>(index_.head_->rows);
    floor_ = mix / rows_;
    share_ = total_ > 0 ? (1 - mix) / total_ : 0;
    if (total_ <= 0) floor_ = 1 / rows_;
    const bool has_massless = mix > 0 && index_.head_->massless > 0;
    least_probability_ = (has_massless || total_ <= 0 ? 0 : share_ * tree.smallest_mass()) + floor_;
}

void RowIndex::Draw::finish(const Drawn& drawn, std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
        const std::uint64_t slot = drawn.slots[i];
        drawn.probabilities[i] = i < newest_ ? 1 : share_ * static_cast<double>(index_.tree_.mass(slot)) + floor_;
        drawn.limits[i] = index_.cursors_[index_.table_.block_of(slot)];
    }
}

double RowIndex::Draw::target(std::size_t position, std::uint64_t attempt) const {
    const double u = unit(stream_.bits(position, attempt));
    if (!index_.config_.stratified) return u * total_;
    return (static_cast<double>(position - newest_) + u) / static_cast<double>(batch_) * total_;
}

std::uint64_t RowIndex::Draw::uniform_slot(std::size_t position, std::uint64_t attempt) const {
    const SumTree& tree = index_.tree_;
    const std::uint64_t reach = index_.table_.visible_slots();
    for (std::uint64_t blind = 0; blind < kBlindAttempts; ++blind) {
        const std::uint64_t slot = stream_.below(reach, position, kUniform + attempt * kBlindAttempts + blind);
        if (is_row(tree.stored(slot))) return slot;
    }
    // A ring with few rows in it: count them.
    std::uint64_t k = stream_.below(index_.head_->rows, position, kUniform - 1 - attempt);
    for (std::uint64_t slot = 0; slot < tree.leaf_count; ++slot) {
        if (is_row(tree.stored(slot)) && k-- == 0) return slot;
    }
    refuse_empty();
}

void RowIndex::Draw::weigh(const double* probabilities, float* weights, std::size_t count) const {
    double reference = 1 / rows_;
    if (index_.config_.normalize == Normalize::buffer) reference = least_probability_;
    if (index_.config_.normalize == Normalize::batch)
        reference = newest_ < count ? *std::min_element(probabilities + newest_, probabilities + count) : 1;
    std::fill_n(weights, newest_, 1.0f);
    double chunk[64];
    for (std::size_t first = newest_; first < count; first += 64) {
        const std::size_t size = std::min<std::size_t>(64, count - first);
        for (std::size_t i = 0; i < size; ++i) chunk[i] = probabilities[first + i] / reference;
        index_.kernels_.powers(chunk, chunk, size, -beta_);
        for (std::size_t i = 0; i < size; ++i) weights[first + i] = static_cast<float>(chunk[i]);
    }
}

}  // namespace sharpwave
