// What one part of a batch needs besides its outputs, while its examples are made.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "views/view_config.h"

namespace sharpwave {

// Where an example's next observation is.
enum class Next : std::uint8_t { row, final_place, waiting };

// One a thread, kept between calls.
struct ExampleWork {
    static ExampleWork& of_this_thread() {
        thread_local ExampleWork kept;
        return kept;
    }
    // The rows read for the examples, to be looked at once more at the end: room for all that they may touch.
    std::vector<Touched> touched;
    std::size_t touched_count = 0;
    std::vector<std::uint64_t> last_slots, last_words, next_slots;  // one a position
    std::vector<Next> nexts;
    std::vector<std::uint8_t> failed;
    std::vector<std::uint64_t> own_frames, next_frames;  // the slots of a stack a position
    std::vector<std::uint16_t> own_padded, next_padded;  // how many of those are before the episode, the oldest
    std::size_t over_count = 0;
    std::vector<std::uint8_t> starts_over;  // the next observation is the first one of another episode
    std::vector<std::uint64_t> stack_slots, ignored_words;
    std::vector<std::uint32_t> ignored;
    std::vector<std::byte> bytes;
    std::vector<double> sums;  // of the agents of one example, see AgentSums
    std::vector<std::uint32_t> agent_steps;
    std::vector<std::uint8_t> is_out;  // whether an agent was done at an earlier step
    std::vector<std::byte> agent_dones;
    std::vector<std::byte> mutables;  // of one row
    std::size_t begin = 0;
    std::uint64_t* words = nullptr;

    void touch(std::size_t position, std::uint64_t slot, std::uint64_t word) {
        touched[touched_count++] = {slot, word, position};
    }
    void make_room(std::size_t count, std::size_t rows_each, std::size_t stack) {
        if (failed.size() < count) {
            last_slots.resize(count);
            last_words.resize(count);
            next_slots.resize(count);
            nexts.resize(count);
            failed.resize(count);
            own_padded.resize(count);
            next_padded.resize(count);
            starts_over.resize(count);
        }
        if (touched.size() < count * rows_each) touched.resize(count * rows_each);
        if (ignored.size() < count * stack) {
            ignored.resize(count * stack);
            ignored_words.resize(count * stack);
        }
        if (stack > 1 && own_frames.size() < count * stack) {
            own_frames.resize(count * stack);
            next_frames.resize(count * stack);
        }
        touched_count = over_count = 0;
    }
};

}  // namespace sharpwave
