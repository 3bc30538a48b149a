// What a buffer's description says of its rows: the fields as add() and batches name them, how rows are drawn and what
// a batch is made of. The same as src/sharpwave/rows/spec.py reads, from the same JSON.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "batches/batch_maker.h"
#include "sampling/pace.h"
#include "schema/schema.h"

namespace sharpwave {

// A leaf of the schema. Where next observations are derived, `next_obs` is a leaf and no field of the table.
struct RowLeaf {
    Field field;        // of one row; the name is the leaf's
    ViewLeaf place;     // where batches take it from
    std::size_t input;  // where an add puts it: a field of the table, or its place among the next observations
    bool is_next() const { return place.role == Role::next; }
    std::uint64_t frame_items() const { return field.full_bytes / field.item_bytes; }
    std::uint64_t example_bytes() const { return field.full_bytes * field.stack; }
};

struct RowSpec {
    std::vector<RowLeaf> leaves;  // in the order of the schema
    std::vector<Field> fields;    // of the table, in its order; the layout fills in their places
    std::size_t next_inputs = 0;
    std::vector<std::size_t> dones;  // leaves under `done`
    bool by_agent = false;           // each agent has its own done
    std::size_t rows_from = 0;       // the leaf whose size tells how many rows an add brings

    std::uint64_t capacity = 0;
    std::optional<std::uint64_t> num_envs;
    std::string order_reason;  // why it matters which row follows which; empty: it does not

    bool is_prioritized = false;
    std::uint64_t least_batch = 1, most_batch = 0xffffffff;
    BatchConfig config;
    std::optional<PaceConfig> pace;

    bool has_truncated = false, has_place_indices = false;
    std::uint64_t places = 0;     // of a window; 0: examples have no such axis
    std::uint64_t discounts = 0;  // of one example, or of one place; 0: none

    std::uint64_t width() const { return num_envs.value_or(1); }
    const RowLeaf* find(std::string_view name) const;
    std::string names() const;  // all leaves, for messages

    // `where` begins the messages: "open(): 'shm://replay'". A view with functions of Python's is refused by its name.
    static RowSpec parse(std::string_view description, std::uint64_t capacity, const std::string& where);

    // Refuses a table whose fields or columns are not those of the description.
    void check(const Table& table, const std::string& where) const;
};

}  // namespace sharpwave
