#include "table/streams.h"

namespace sharpwave {

using namespace format;

Streams::Streams(const Table& table)
    : table_(table), width_(table.width()), block_rows_(table.block_rows()), by_width_(width_, block_rows_) {
    const std::uint64_t used = table.counters().writers_used.value.load(std::memory_order_acquire);
    const std::uint64_t origin = table.counters().origin_ticket.value.load(std::memory_order_acquire);
    // Back from the block that each record stands in. Of a record's blocks the oldest are written over first.
    for (std::uint64_t writer = 0; writer < used; ++writer) {
        std::uint64_t ticket = table.position(writer).ticket;
        while (ticket != kNone && ticket >= origin) {
            const BlockRecord& record = table.block_record(ticket % table.blocks());
            std::uint64_t before = kNone;
            if (record.ticket.load(std::memory_order_acquire) == ticket) {
                before = record.previous_ticket.load(std::memory_order_acquire);
                if (record.ticket.load(std::memory_order_relaxed) != ticket) before = kNone;
            }
            if (before != kNone && before >= ticket) before = kNone;  // a damaged file: no circles
            if (!blocks_.emplace(ticket, Block{writer, before}).second) break;
            ticket = before;
        }
    }
    places_.resize((used + 1) * width_);
    for (std::uint64_t i = 0; i < used * width_; ++i) places_[i].stream = static_cast<std::int64_t>(i);
}

// Null: a block of the lap before, whose writer's later blocks are all written over already. Another writer holds it
// back: it began to fill the block and did not go on.
const Streams::Block* Streams::find(std::uint64_t ticket) {
    std::uint64_t at = ticket;
    for (std::uint64_t hops = 0; hops <= table_.blocks(); ++hops) {
        if (const auto found = blocks_.find(at); found != blocks_.end())
            return at == ticket ? &found->second
                                : &blocks_.emplace(ticket, Block{found->second.writer, kNone}).first->second;
        // Rows of the lap before still know where they go on.
        const BlockRecord& record = table_.block_record(at % table_.blocks());
        if (record.linked_ticket.load(std::memory_order_acquire) != at) return nullptr;
        const std::uint64_t next = record.next_ticket.load(std::memory_order_acquire);
        if (record.linked_ticket.load(std::memory_order_relaxed) != at || next == kNone || next <= at) return nullptr;
        at = next;
    }
    return nullptr;
}

void Streams::enter(std::uint64_t serial) {
    const std::uint64_t ticket = serial / block_rows_;
    begin_ = ticket * block_rows_;
    end_ = begin_ + block_rows_;
    if (const Block* block = find(ticket)) {
        first_place_ = block->writer * width_;
        previous_ = block->previous;
        return;
    }
    first_place_ = places_.size() - width_;
    previous_ = kNone;
    for (std::size_t env = 0; env < width_; ++env) places_[first_place_ + env].is_open = false;
}

// Whether the row with this serial, of the same stream, is the next one of the open episode.
bool Streams::goes_on(const Place& place, std::uint64_t serial) const {
    if (place.serial + width_ == serial && place.serial >= begin_) [[likely]]
        return true;
    const std::uint64_t left = place.serial / block_rows_;
    const std::uint64_t length = table_.block_length(left % table_.blocks());
    if (serial < begin_ + width_ && left == previous_ && place.serial + width_ >= left * block_rows_ + length)
        return true;
    // The env was masked out of steps between them, or rows between them are gone.
    std::uint64_t slot = table_.slot_of(place.serial), word = make_word(place.serial, 0, kCommitted);
    return slot < table_.header().slots && table_.successor(slot, word) && serial_of(word) == serial;
}

const Streams::Place& Streams::follow(std::uint64_t serial, std::uint64_t word) {
    if (serial < begin_ || serial >= end_) enter(serial);
    Place& place = places_[first_place_ + by_width_.remainder(serial - begin_)];
    if ((word & kEpisodeStart) || !place.is_open || !goes_on(place, serial)) {
        place.episode = serial;
        place.number = episodes_++;
    }
    place.serial = serial;
    place.is_open = !(word & kEndMask);
    return place;
}

void Streams::follow(const std::uint64_t* serials, const std::uint64_t* words, std::size_t count, std::int64_t* streams,
                     std::int64_t* episodes) {
    for (std::size_t i = 0; i < count; ++i) {
        const Place& place = follow(serials[i], words[i]);
        streams[i] = place.stream;
        episodes[i] = static_cast<std::int64_t>(place.episode);
    }
}

std::vector<Episode> list_episodes(const Table& table) {
    const std::vector<std::uint64_t> serials = table.live_serials();
    Streams streams(table);
    std::vector<Episode> episodes;
    const std::uint64_t least = table.least_word(), lap = table.blocks() * table.block_rows();
    std::uint64_t slot = 0;
    for (std::size_t i = 0; i < serials.size(); ++i) {
        const std::uint64_t serial = serials[i];
        slot = i > 0 && serial == serials[i - 1] + 1 && slot + 1 < lap ? slot + 1 : table.slot_of(serial);
        const std::uint64_t word = table.load_word(slot);
        if (serial_of(word) != serial || !is_live(word, least)) continue;  // written over meanwhile
        const Streams::Place& place = streams.follow(serial, word);
        if (place.number == episodes.size()) {
            const bool is_whole = (word & kEpisodeStart) != 0;
            episodes.push_back({serial, serial, 0, place.stream, is_whole, false});
        }
        Episode& episode = episodes[place.number];
        episode.last = serial;
        ++episode.rows;
        episode.is_finished = (word & kEndMask) != 0;
    }
    return episodes;
}

std::vector<std::uint64_t> rows_of(const Table& table, const Episode& episode) {
    std::vector<std::uint64_t> rows;
    rows.reserve(episode.rows);
    const std::uint64_t least = table.least_word();
    std::uint64_t slot = table.slot_of(episode.first), word = table.load_word(slot);
    while (serial_of(word) <= episode.last && is_live(word, least)) {
        rows.push_back(serial_of(word));
        if (serial_of(word) == episode.last || !table.successor(slot, word)) break;
    }
    const bool is_there = !rows.empty() && rows.front() == episode.first && rows.size() == episode.rows;
    return is_there ? rows : std::vector<std::uint64_t>{};
}

}  // namespace sharpwave
