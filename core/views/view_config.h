// What a view is asked for, and the arrays that a batch of it goes to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace sharpwave {

// Where a leaf of a batch comes from.
enum class Role : std::uint8_t {
    own,     // the row drawn
    reward,  // summed over the steps of the example
    last,    // the last of those steps
    next,    // the row after it, or what is kept in its place
};

struct ViewLeaf {
    std::uint32_t field;  // of the table
    Role role;
    std::uint32_t older =
        0;  // a stack that ends in this field's value begins with this field's frames (stored next_obs)
};

// Leaves of agents that end by themselves: whether each is done, and their rewards, whose shape begins with that one.
struct AgentLeaves {
    std::size_t done, reward;
};

struct ViewConfig {
    std::uint32_t n_step = 1;
    double gamma = 0.99;
    std::vector<ViewLeaf> leaves;
    std::vector<AgentLeaves> agents = {};  // where n_step > 1: each agent's rewards are summed up to its own done
};

// A row that an example was made from, and the word it had then.
struct Touched {
    std::uint64_t slot, word, position;
};

// Where an example's rows are, for a GPU that copies their bytes itself. What a row does not hold (sums of rewards,
// values in a heap, next observations that wait) goes to the outputs as ever.
struct Places {
    std::int64_t* own;   // slots, one a position: of the row drawn ...
    std::int64_t* last;  // ... of the last of its steps ...
    std::int64_t* next;  // ... and of the row after that; -1: its observation is in the outputs
    // Of a stack, oldest first; as many a position as the longest stack has. -1: in the outputs. Below that: slot
    // (-2 - number) / 2, and a frame of padding, which a field may have as zeros; an odd -2 - number is padding of an
    // episode that starts with the stored next observation, which repeats that and not the observation.
    std::int64_t* own_frames = nullptr;
    std::int64_t* next_frames = nullptr;  // the same after the last step
    std::vector<Touched> touched = {};    // to be looked at again once the bytes are copied
};

// The arrays of a batch.
struct Outputs {
    std::byte* const* flats;                 // one a leaf: rows side by side, stacks oldest frame first
    std::int64_t* const* lengths = nullptr;  // one a leaf, null where it is not ragged: items in each row
    float* discounts = nullptr;              // gamma ^ steps; n_step > 1 only; one a position, or one an agent
    Places* places = nullptr;                // given: rows are named and not copied
    std::uint8_t* truncated = nullptr;  // 0 or 1: the last step ended its episode as truncated; null: not asked for
};

}  // namespace sharpwave
