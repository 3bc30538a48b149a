// A batch of examples: the arrays that Buffer::sample() fills, by the names of their fields.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sharpwave/value.h"

namespace sharpwave {

struct RowSpec;

// Owns its memory; sample_into() fills it again. One thread at a time.
//
// Beside the fields, batches have the arrays that Python's have: "indices"; "weights" and "probabilities" (drawn by
// priority); "discount" (n_step > 1); "truncated" (where the view asks for it); "valid", "mask", "first" and
// "place_indices" (windows).
class Batch {
public:
    // One array. Its items are those of all examples, one example after the other.
    struct Array {
        std::string name;
        std::string dtype;  // NumPy's: "<f4"
        std::vector<std::size_t>
            shape;  // examples first, then the places of a window, the frames of a stack, the field
        std::uint64_t item_bytes = 0;
        std::uint64_t bytes = 0;  // of one example
        std::byte* data = nullptr;
        std::vector<std::int64_t> lengths;  // ragged: rows of items in each example, or in each place
        bool is_ragged = false;
        std::uint64_t most = 0;  // ragged: rows of items that an example, or a place, has room for
    };

    Batch(std::shared_ptr<const RowSpec> spec, std::size_t examples);  // see Buffer::batch()
    Batch(Batch&&) noexcept = default;
    Batch& operator=(Batch&&) noexcept = default;

    std::size_t size() const { return examples_; }
    const std::vector<Array>& arrays() const { return arrays_; }
    const Array& array(std::string_view name) const;  // an unknown name is ErrorKind::schema
    std::span<const std::size_t> shape(std::string_view name) const { return array(name).shape; }

    // The items of all examples. T is the type of the field, or std::byte. Of a ragged field every example has as many
    // items as the longest may have, and only the first of them mean something: read it example by example.
    template <Item T>
    std::span<const T> get(std::string_view name) const {
        const Array& found = checked(name, item_type<T>());
        return {reinterpret_cast<const T*>(found.data), found.bytes * examples_ / sizeof(T)};
    }

    // The items of one example; of a ragged field as many as it has. With windows over a ragged field, `example` counts
    // places: example * places + place.
    template <Item T>
    std::span<const T> get(std::string_view name, std::size_t example) const {
        const std::span<const std::byte> bytes = example_bytes(checked(name, item_type<T>()), example);
        return {reinterpret_cast<const T*>(bytes.data()), bytes.size() / sizeof(T)};
    }

    // Which rows were drawn: numbers that name one row for ever, for update_priorities().
    std::span<const std::int64_t> indices() const { return {indices_, examples_}; }

    // Importance weights; empty where rows are not drawn by priority.
    std::span<const float> weights() const { return {weights_, weights_ ? examples_ : 0}; }

private:
    friend class Buffer;
    friend class TableRows;
    friend class RemoteRows;
    const Array& checked(std::string_view name, ItemType type) const;
    std::span<const std::byte> example_bytes(const Array& array, std::size_t example) const;

    struct Free {
        void operator()(std::byte* memory) const;
    };
    std::shared_ptr<const RowSpec> spec_;
    std::size_t examples_;
    std::vector<Array> arrays_;  // of the leaves, then the others
    std::unique_ptr<std::byte, Free> memory_;
    std::vector<std::byte*> flats_;       // one a leaf
    std::vector<std::int64_t*> lengths_;  // one a leaf; empty where none is ragged
    std::int64_t* indices_ = nullptr;
    float* weights_ = nullptr;
};

}  // namespace sharpwave
