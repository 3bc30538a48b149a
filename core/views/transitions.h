// Rows become examples: n-step returns, next observations taken from the row after, stacks rebuilt from single frames.
//
// Everything is worked out when an example is asked for and nothing is written. An example reads several rows; all of
// them are looked at again at the end, and if one has changed meanwhile the example is thrown away.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "table/table.h"

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

struct ViewConfig {
    std::uint32_t n_step = 1;
    double gamma = 0.99;
    std::vector<ViewLeaf> leaves;
};

// A row that an example was made from, and the word it had then.
struct Touched {
    std::uint64_t slot, word, position;
};

// Where an example's rows are, for whoever copies their bytes himself: a GPU. What a row does not hold (sums of
// rewards, values in a heap, next observations that wait) goes to the outputs as ever.
struct Places {
    std::int64_t* own;                    // slots, one a position: of the row drawn ...
    std::int64_t* last;                   // ... of the last of its steps ...
    std::int64_t* next;                   // ... and of the row after that; -1: its observation is in the outputs
    std::int64_t* own_frames = nullptr;   // of a stack, oldest first; as many a position as the longest stack has
    std::int64_t* next_frames = nullptr;  // the same after the last step
    std::vector<Touched> touched = {};    // to be looked at again once the bytes are copied
};

// The arrays of a batch.
struct Outputs {
    std::byte* const* flats;                 // one a leaf: rows side by side, stacks oldest frame first
    std::int64_t* const* lengths = nullptr;  // one a leaf, null where it is not ragged: items in each row
    float* discounts = nullptr;              // gamma ^ steps; n_step > 1 only
    Places* places = nullptr;                // given: rows are named and not copied
};

class Transitions {
public:
    // A reward that cannot be summed is ErrorKind::schema.
    Transitions(const Table& table, ViewConfig config);

    const ViewConfig& config() const { return config_; }
    std::uint64_t leaf_bytes(const ViewLeaf& leaf) const;  // in a batch, of one example
    std::uint64_t example_bytes() const { return example_bytes_; }
    std::uint32_t stack() const { return stack_; }  // the longest

    // Whether none of the rows has changed since examples were made from them.
    bool are_unchanged(const std::vector<Touched>& touched) const;

    // Makes the examples of positions begin..end that start at slots[begin..end); `words` gets the words of those rows.
    // Positions without one (the row is no longer there, or something it needs) go to `missed`; returns their number.
    // `single`: one-step examples, whatever n_step says.
    std::size_t gather(const std::uint64_t* slots, std::size_t begin, std::size_t end, const Outputs& out,
                       std::uint64_t* words, std::uint32_t* missed, bool single = false) const;

private:
    struct Work;
    std::size_t gather_pieces(const std::uint64_t* slots, std::size_t begin, std::size_t end, const Outputs& out,
                              std::uint64_t* words, std::uint32_t* missed, bool single) const;
    std::size_t gather_steps(const std::uint64_t* slots, std::size_t begin, std::size_t end, const Outputs& out,
                             std::uint64_t* words, std::uint32_t* missed, bool single) const;
    std::size_t gather_part(const std::uint64_t* slots, std::size_t begin, std::size_t end, const Outputs& out,
                            std::uint64_t* words, std::uint32_t* missed, bool single, std::size_t fetch_end) const;
    bool gather_one(std::uint64_t slot, std::size_t position, std::uint32_t n_step, const Outputs& out,
                    std::uint64_t* words) const;
    void check_again(Work& work) const;
    void name_rows(const Work& work, const std::uint64_t* slots, std::size_t count, Places& places) const;
    bool walk(Work& work, std::size_t position, std::uint64_t slot, std::uint32_t n_step, std::uint64_t least,
              const Outputs& out) const;
    void add_reward(std::uint64_t slot, double factor, double* sums) const;
    bool look_back(Work& work, std::size_t position, std::uint64_t slot, std::uint64_t word,
                   std::uint64_t* frames) const;
    void copy_stacks(Work& work, std::size_t leaf, const std::uint64_t* slots, std::size_t count, const Outputs& out,
                     bool streaming) const;
    bool is_owner(std::uint64_t place, std::uint64_t serial) const;
    bool finish_value(const Field& field, std::byte* to, std::uint64_t value_bytes, std::int64_t* length) const;
    bool copy_next(Work& work, std::size_t position, const Outputs& out) const;
    bool copy_value(Work& work, const Field& field, std::uint64_t slot, std::byte* to, std::int64_t* length) const;
    bool can_be_short() const;
    bool has_small_rows() const;
    void plan_prefetch();
    void prefetch(std::uint64_t slot) const;

    const Table& table_;
    const RowView rows_;
    const std::uint64_t width_;
    ViewConfig config_;
    bool is_plain_;          // every leaf is a fixed field of the row drawn
    bool is_short_ = false;  // examples that gather_steps() makes
    bool derives_ = false;
    std::uint32_t stack_ = 1;
    std::size_t reward_ = 0;  // the leaf that is summed, and where its numbers are
    std::uint64_t reward_offset_ = 0, reward_items_ = 0;
    bool reward_is_double_ = false;
    std::uint64_t example_bytes_ = 0;
    std::vector<double> powers_;         // of gamma
    std::vector<float> discounts_;       // the same, as batches give them
    std::vector<std::uint64_t> wanted_;  // what to fetch ahead, from a row's start on, one a line
};

}  // namespace sharpwave
