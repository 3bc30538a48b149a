// Where rows stand in their episodes: how many of the episode's rows come before a row, and how many come after it once
// the episode has ended. One entry a slot, in the table's bytes. The index writes them under its lock
// (sampling/starts.h); any thread may read them and follow an episode with them.
#pragma once

#include <atomic>
#include <bit>
#include <cstdint>
#include <vector>

#include "table/table.h"

namespace sharpwave {

class EpisodePlaces {
public:
    // `across`: steps are counted along the env's stream of rows, past the ends of episodes.
    EpisodePlaces(const Table& table, bool across) : table_(table), across_(across), places_(table.episodes()) {}

    format::EpisodePlace at(std::uint64_t slot) const;
    void set(std::uint64_t slot, format::EpisodePlace place);
    static constexpr std::uint32_t kOpen = ~std::uint32_t{0};  // EpisodePlace::left before the episode has ended

    // Asks for what at() and move() read; costs next to nothing.
    void prefetch(std::uint64_t slot) const { __builtin_prefetch(places_ + slot, 0, 2); }

    // The rows of the episode that this row is in, those that are still there, oldest first.
    std::vector<std::uint64_t> episode(std::uint64_t slot, std::uint64_t word) const;

    // Moves to another row of a finished episode: `offset` steps on, or back where it is negative. False: it is gone.
    bool move(std::uint64_t& slot, std::uint64_t& word, std::int64_t offset) const;

    // Moves `count` rows back in the same episode (or stream). False: a row on the way is gone.
    bool back(std::uint64_t& slot, std::uint64_t& word, std::uint64_t count) const;

private:
    bool is_row(std::uint64_t slot, std::uint64_t serial, std::uint64_t& word) const;

    const Table& table_;
    const bool across_;
    format::EpisodePlace* places_;
};

inline format::EpisodePlace EpisodePlaces::at(std::uint64_t slot) const {
    auto* bits = reinterpret_cast<std::uint64_t*>(places_ + slot);
    return std::bit_cast<format::EpisodePlace>(std::atomic_ref<std::uint64_t>(*bits).load(std::memory_order_relaxed));
}

inline void EpisodePlaces::set(std::uint64_t slot, format::EpisodePlace place) {
    auto* bits = reinterpret_cast<std::uint64_t*>(places_ + slot);
    std::atomic_ref<std::uint64_t>(*bits).store(std::bit_cast<std::uint64_t>(place), std::memory_order_relaxed);
}

}  // namespace sharpwave
