// Values of fields on their way into a buffer, and the C++ types that fields have.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ranges>
#include <span>
#include <string_view>
#include <type_traits>

namespace sharpwave {

// The kind letter of NumPy's dtypes ('b', 'i', 'u', 'f') and the size of an item. 'V' is std::byte: the bytes of any
// dtype, for those that C++ has no type for, such as float16.
struct ItemType {
    char kind;
    std::uint8_t bytes;
    friend bool operator==(const ItemType&, const ItemType&) = default;
};

template <class T>
concept Item = std::is_arithmetic_v<T> || std::same_as<T, std::byte>;

template <Item T>
constexpr ItemType item_type() {
    constexpr auto size = static_cast<std::uint8_t>(sizeof(T));
    if constexpr (std::same_as<T, std::byte>) {
        return {'V', 1};
    } else if constexpr (std::same_as<T, bool>) {
        return {'b', 1};
    } else if constexpr (std::is_floating_point_v<T>) {
        return {'f', size};
    } else {
        return {std::is_signed_v<T> ? 'i' : 'u', size};
    }
}

// One field's values in an add: a number, or the items of one or more rows, one row after the other. Items are not
// copied: they must stay where they are until add() returns.
class Value {
public:
    // A number for a field of shape (). It is converted to the field's type where it keeps its value.
    template <class T>
        requires std::is_arithmetic_v<T>
    Value(T number) : type_(item_type<T>()), items_(1), is_number_(true) {  // NOLINT: a Value is made in place
        std::memcpy(number_, &number, sizeof number);
    }

    // Items of the field's own type: std::array, std::vector, std::span, a C array.
    template <std::ranges::contiguous_range Items>
        requires std::ranges::sized_range<Items> && Item<std::remove_cv_t<std::ranges::range_value_t<Items>>>
    Value(const Items& items)  // NOLINT: the same
        : type_(item_type<std::remove_cv_t<std::ranges::range_value_t<Items>>>()),
          items_(std::ranges::size(items)),
          data_(reinterpret_cast<const std::byte*>(std::ranges::data(items))) {}

    // A ragged field of several rows: all items, and the number of items of each row.
    template <std::ranges::contiguous_range Items>
    Value(const Items& items, std::span<const std::size_t> lengths) : Value(items) {
        lengths_ = lengths;
        has_lengths_ = true;
    }

    ItemType type() const { return type_; }
    std::size_t items() const { return items_; }
    bool is_number() const { return is_number_; }
    const std::byte* data() const { return is_number_ ? number_ : data_; }
    bool has_lengths() const { return has_lengths_; }
    std::span<const std::size_t> lengths() const { return lengths_; }

private:
    ItemType type_;
    std::size_t items_;
    const std::byte* data_ = nullptr;
    alignas(8) std::byte number_[16] = {};
    bool is_number_ = false;
    bool has_lengths_ = false;
    std::span<const std::size_t> lengths_;
};

// A value and the name of its field.
struct Given {
    std::string_view name;
    Value value;
};

}  // namespace sharpwave
