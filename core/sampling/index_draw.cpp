#include "sampling/index_draw.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "base/error.h"
#include "base/fault.h"
#include "sampling/uniform.h"

namespace sharpwave {

using namespace format;

namespace {

// 53 random bits as a number in [0, 1).
double unit(std::uint64_t bits) { return static_cast<double>(bits >> 11) * 0x1p-53; }

// Attempts of one position: blind ones, then those by count. The mixing coin has attempts of its own.
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

IndexDraw::IndexDraw(RowIndex& index, const Drawn& drawn, std::size_t count, Deadline deadline)
    : index_(index),
      masses_(index.masses_),
      deadline_(deadline),
      newest_(std::min<std::size_t>(count, masses_.config.newest)),
      batch_(count - newest_),
      stream_(0, 0) {
    const Table::IndexLock lock(index.table_, deadline);
    index.table_.check_open();
    index.catch_up();
    const Order order = masses_.config.order;
    if (masses_.head->rows < index.rows_needed(count)) index.refuse(count);
    beta_ = index.beta();
    const std::uint64_t call = index.table_.counters().call_number.value.fetch_add(1, std::memory_order_relaxed);
    stream_ = Substream(index.table_.seed(), call);
    read_odds();
    if (newest_) newest_rows(drawn.slots, newest_);
    if (order == Order::weighted) {
        draw_weighted(drawn, count);
    } else {
        draw_counted(drawn, count);
    }
    finish(drawn, 0, count);
    SHARPWAVE_FAULT(index_drawn);
    if (order != Order::shuffle) count_reads(drawn.slots, count);
}

void IndexDraw::draw_weighted(const Drawn& drawn, std::size_t count) {
    const SumTree& tree = masses_.tree;
    const double mix = masses_.config.mix;
    if (total_ <= 0 || mix >= 1) {
        for (std::size_t i = newest_; i < count; ++i) drawn.slots[i] = uniform_slot(i, 0);
        return;
    }
    if (draw_even(drawn.slots, count)) return;
    for (std::size_t i = newest_; i < count; ++i) drawn.probabilities[i] = target(i, 0);
    masses_.kernels.descend(tree, drawn.probabilities + newest_, drawn.slots + newest_, batch_,
                            masses_.config.stratified);
    for (std::size_t i = newest_; mix > 0 && i < count; ++i) {
        if (unit(stream_.bits(i, kCoin)) < mix) drawn.slots[i] = uniform_slot(i, 0);
    }
}

// Where a row's mass is 1 or 0 and most are 1: slots drawn blindly, which is one look at a leaf each and no descent.
// False: it is not so.
bool IndexDraw::draw_even(std::uint64_t* slots, std::size_t count) const {
    if (masses_.given || masses_.config.starts.per_episode) return false;
    const Table& table = index_.table_;
    const SumTree& tree = masses_.tree;
    const std::uint64_t reach = table.visible_slots();
    if (rows_ * 2 < static_cast<double>(reach)) return false;
    for (std::size_t i = newest_; i < count; ++i) {
        slots[i] = stream_.below(reach, i);
        __builtin_prefetch(&tree.mass(slots[i]), 0, 2);
    }
    for (std::size_t i = newest_; i < count; ++i) {
        for (std::uint64_t attempt = 1; tree.mass(slots[i]) == 0; ++attempt) {
            if (attempt < kBlindAttempts) {
                slots[i] = stream_.below(reach, i, attempt);
                continue;
            }
            double x = target(i, attempt);
            masses_.kernels.descend(tree, &x, &slots[i], 1, false);
        }
    }
    return true;
}

// Orders that count rows from the oldest or from the newest on.
void IndexDraw::draw_counted(const Drawn& drawn, std::size_t count) {
    if (masses_.config.order == Order::shuffle) return draw_epoch(drawn.slots, 0, count);
    const double before = mass_before(masses_.tree, turn());
    for (std::size_t i = newest_; i < count; ++i) {
        double rank;  // 0 is the oldest
        switch (masses_.config.order) {
            case Order::recent: {
                const std::uint64_t among = std::min(masses_.config.recent, masses_.head->rows);
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
    descend_in_order(masses_.tree, drawn.probabilities + newest_, drawn.slots + newest_, batch_);
}

// So many different ranks below `left`, each equally likely, in random order.
std::vector<double> IndexDraw::distinct_ranks(std::uint64_t left, std::size_t begin, std::size_t count) const {
    std::vector<double> ranks(count);
    if (count > left / 2) {
        std::vector<std::uint64_t> all(left);
        for (std::uint64_t i = 0; i < left; ++i) all[i] = i;
        for (std::size_t i = 0; i < count; ++i) {
            std::swap(all[i], all[i + stream_.below(left - i, begin + i)]);
            ranks[i] = static_cast<double>(all[i]) + 0.5;
        }
        return ranks;
    }
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
    return ranks;
}

// Rows that the epoch has left, in random order, each once. What it lacks comes from the next one.
void IndexDraw::draw_epoch(std::uint64_t* slots, std::size_t begin, std::size_t end) {
    while (begin < end) {
        auto left = static_cast<std::uint64_t>(masses_.tree.total());
        if (left == 0) {
            begin_epoch();
            left = static_cast<std::uint64_t>(masses_.tree.total());
        }
        const std::size_t count = std::min<std::uint64_t>(end - begin, left);
        std::vector<double> ranks = distinct_ranks(left, begin, count);
        masses_.kernels.descend(masses_.tree, ranks.data(), slots + begin, count, false);
        for (std::size_t i = 0; i < count; ++i) masses_.set_leaf(slots[begin + i], 0, 0);
        masses_.kernels.refresh(masses_.tree, slots + begin, count);
        count_reads(slots + begin, count);  // before the next epoch begins
        begin += count;
    }
}

void IndexDraw::again(const Drawn& drawn, std::size_t position, std::uint64_t attempt) {
    const Table::IndexLock lock(index_.table_, deadline_);
    index_.catch_up();
    // A row that can no longer be drawn, though nothing was written over it, leaves now.
    const std::uint64_t missed = drawn.slots[position];
    const std::uint64_t word = index_.table_.load_word(missed);
    if (!is_live(word, index_.table_.least_word()) && state_of(word) != kWriting) {
        masses_.remove(missed);
        masses_.kernels.refresh(masses_.tree, &missed, 1);
    }
    if (masses_.head->rows == 0) index_.refuse(1);
    read_odds();
    draw_again(drawn, position, attempt);
    finish(drawn, position, position + 1);
    if (masses_.config.order != Order::shuffle) count_reads(&drawn.slots[position], 1);
}

void IndexDraw::draw_again(const Drawn& drawn, std::size_t position, std::uint64_t attempt) {
    const double mix = masses_.config.mix;
    const Order order = masses_.config.order;
    if (position < newest_) {
        std::vector<std::uint64_t> newest(position + 1);
        newest_rows(newest.data(), newest.size());
        drawn.slots[position] = newest[position];
    } else if (order == Order::shuffle) {
        draw_epoch(drawn.slots, position, position + 1);
    } else if (order != Order::weighted) {
        // The next in turn after the batch, or for `recent` another of them.
        const std::uint64_t among = order == Order::recent ? std::min(masses_.config.recent, masses_.head->rows) : 0;
        const std::uint64_t step = among ? stream_.below(among, position, attempt) : position + attempt - 1;
        double rank = static_cast<double>(step % masses_.head->rows);
        if (order != Order::fifo) rank = total_ - 1 - rank;
        const double turned = mass_before(masses_.tree, turn()) + rank;
        double x = (turned >= total_ ? turned - total_ : turned) + 0.5;
        descend_in_order(masses_.tree, &x, &drawn.slots[position], 1);
    } else if (total_ <= 0 || (mix > 0 && unit(stream_.bits(position, kCoin + attempt)) < mix)) {
        drawn.slots[position] = uniform_slot(position, attempt);
    } else {
        double x = target(position, attempt);
        masses_.kernels.descend(masses_.tree, &x, &drawn.slots[position], 1, false);
    }
}

void IndexDraw::read_odds() {
    const SumTree& tree = masses_.tree;
    const double mix = masses_.config.mix;
    total_ = tree.total();
    rows_ = static_cast<double>(masses_.head->rows);
    floor_ = mix / rows_;
    share_ = total_ > 0 ? (1 - mix) / total_ : 0;
    if (total_ <= 0) floor_ = 1 / rows_;
    const bool has_massless = mix > 0 && masses_.head->massless > 0;
    least_probability_ = (has_massless || total_ <= 0 ? 0 : share_ * tree.smallest_mass()) + floor_;
}

void IndexDraw::finish(const Drawn& drawn, std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
        const std::uint64_t slot = drawn.slots[i];
        if (i < kFetchedRows) index_.table_.prefetch(slot);  // the first that are copied
        drawn.probabilities[i] = i < newest_ ? 1 : share_ * static_cast<double>(masses_.tree.mass(slot)) + floor_;
        drawn.limits[i] = masses_.cursors[index_.table_.block_of(slot)];
    }
}

double IndexDraw::target(std::size_t position, std::uint64_t attempt) const {
    const double u = unit(stream_.bits(position, attempt));
    if (!masses_.config.stratified) return u * total_;
    return (static_cast<double>(position - newest_) + u) / static_cast<double>(batch_) * total_;
}

std::uint64_t IndexDraw::uniform_slot(std::size_t position, std::uint64_t attempt) const {
    const SumTree& tree = masses_.tree;
    const std::uint64_t reach = index_.table_.visible_slots();
    for (std::uint64_t blind = 0; blind < kBlindAttempts; ++blind) {
        const std::uint64_t slot = stream_.below(reach, position, kUniform + attempt * kBlindAttempts + blind);
        if (is_row(tree.stored(slot))) return slot;
    }
    // A ring with few rows in it: count them.
    std::uint64_t k = stream_.below(masses_.head->rows, position, kUniform - 1 - attempt);
    for (std::uint64_t slot = 0; slot < tree.leaf_count; ++slot) {
        if (is_row(tree.stored(slot)) && k-- == 0) return slot;
    }
    refuse_empty();
}

// The probability whose normalised weight is 1.
double IndexDraw::reference(const double* probabilities, std::size_t count) const {
    if (masses_.config.normalize == Normalize::buffer) return least_probability_;
    if (masses_.config.normalize == Normalize::none) return 1 / rows_;
    return newest_ < count ? *std::min_element(probabilities + newest_, probabilities + count) : 1;
}

DrawOdds IndexDraw::odds(const double* probabilities, std::size_t count) const {
    const auto recent = static_cast<double>(masses_.config.recent);
    const bool is_recent = masses_.config.order == Order::recent;
    return {is_recent ? std::min(rows_, recent) : rows_, std::pow(rows_ * reference(probabilities, count), -beta_)};
}

void IndexDraw::weigh(const double* probabilities, float* weights, std::size_t count) const {
    const double reference = this->reference(probabilities, count);
    std::fill_n(weights, newest_, 1.0f);
    double chunk[64];
    for (std::size_t first = newest_; first < count; first += 64) {
        const std::size_t size = std::min<std::size_t>(64, count - first);
        for (std::size_t i = 0; i < size; ++i) chunk[i] = probabilities[first + i] / reference;
        masses_.kernels.powers(chunk, chunk, size, -beta_);
        for (std::size_t i = 0; i < size; ++i) weights[first + i] = static_cast<float>(chunk[i]);
    }
}

// The slot after the newest row that the index knows: from there on rows are in the order of their age. Where several
// writers fill blocks at once, exact to a block.
std::uint64_t IndexDraw::turn() const {
    std::uint64_t latest = kNone;
    const std::uint64_t used = masses_.table.counters().writers_used.value.load(std::memory_order_acquire);
    for (std::uint64_t i = 0; i < used; ++i) {
        const WriterRecord& writer = masses_.table.writer_record(i);
        if (masses_.table.position(i).ticket == kNone) continue;
        if (latest == kNone || writer.indexed_ticket > latest) latest = writer.indexed_ticket;
    }
    if (latest == kNone) return 0;
    const std::uint64_t block = latest % masses_.table.blocks(), first = latest * masses_.table.block_rows();
    const std::uint64_t filled = masses_.cursors[block] > first ? masses_.cursors[block] - first : 0;
    return (block * masses_.table.block_rows() + std::min(filled, masses_.table.block_length(block))) %
           masses_.tree.leaf_count;
}

// Newest first; where there are fewer, they come again.
void IndexDraw::newest_rows(std::uint64_t* slots, std::size_t count) const {
    const std::uint64_t start = turn();
    std::size_t found = 0;
    const std::uint64_t most = std::min<std::uint64_t>(count, masses_.head->rows);
    for (std::uint64_t i = 1; found < most && i <= masses_.tree.leaf_count; ++i) {
        const std::uint64_t slot = (start + masses_.tree.leaf_count - i) % masses_.tree.leaf_count;
        if (is_row(masses_.tree.stored(slot))) slots[found++] = slot;
    }
    for (std::size_t i = found; i < count; ++i) slots[i] = slots[i - found];
}

void IndexDraw::begin_epoch() {
    for (std::uint64_t slot = 0; slot < masses_.tree.leaf_count; ++slot) {
        if (is_row(masses_.tree.stored(slot))) masses_.set_leaf(slot, 1, 1);
    }
    masses_.refresh_all();
    masses_.table.counters().shuffle_epoch.value.fetch_add(1, std::memory_order_relaxed);
}

void IndexDraw::count_reads(const std::uint64_t* slots, std::size_t count) {
    if (masses_.config.max_reads == 0) return;
    masses_.changed.clear();
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint64_t slot = slots[i];
        const std::uint64_t reads = masses_.reads ? ++masses_.reads[slot] : 1;
        if (reads < masses_.config.max_reads || !is_row(masses_.tree.stored(slot))) continue;
        masses_.remove(slot);
        masses_.changed.push_back(slot);
    }
    if (masses_.changed.empty()) return;
    masses_.table.counters().rows_consumed.value.fetch_add(masses_.changed.size(), std::memory_order_relaxed);
    index_.waiting_.share_changed();
    masses_.refresh_changed();
}

}  // namespace sharpwave
