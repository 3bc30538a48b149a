#include "buffer/item_types.h"

#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/error.h"

namespace sharpwave {
namespace {

// Calls `use` with a number of the C++ type; false where there is none.
template <class Use>
bool with_type(ItemType type, Use use) {
    const auto sized = [&](auto one, auto two, auto four, auto eight) {
        switch (type.bytes) {
            case 1:
                return use(one);
            case 2:
                return use(two);
            case 4:
                return use(four);
            case 8:
                return use(eight);
            default:
                return false;
        }
    };
    switch (type.kind) {
        case 'b':
            return use(std::uint8_t{});
        case 'i':
            return sized(std::int8_t{}, std::int16_t{}, std::int32_t{}, std::int64_t{});
        case 'u':
            return sized(std::uint8_t{}, std::uint16_t{}, std::uint32_t{}, std::uint64_t{});
        case 'f':
            return type.bytes == 4 ? use(float{}) : type.bytes == 8 && use(double{});
        default:
            return false;
    }
}

template <class From, class To>
bool fits(From from) {
    if constexpr (std::is_floating_point_v<To>) {
        return std::isinf(static_cast<To>(from)) == std::isinf(static_cast<double>(from));
    } else if constexpr (std::is_floating_point_v<From>) {
        return false;
    } else {
        const To to = static_cast<To>(from);
        return static_cast<From>(to) == from && (to < To{}) == (from < From{});
    }
}

}  // namespace

std::string name_of(ItemType type) {
    if (type.kind == 'V') return "bytes";
    if (type.kind == 'b') return "bool";
    const char* const kind = type.kind == 'f' ? "float" : type.kind == 'i' ? "int" : "uint";
    return kind + std::to_string(type.bytes * 8);
}

ItemType type_of(const Field& field) {
    const char kind = field.dtype.size() > 1 ? field.dtype[1] : 'V';
    const bool is_known = kind == 'b' || kind == 'i' || kind == 'u' || (kind == 'f' && field.item_bytes >= 4);
    if (!is_known || field.item_bytes > 8) return {'V', 1};
    return {kind, static_cast<std::uint8_t>(field.item_bytes)};
}

std::uint32_t dtype_bytes(const std::string& dtype) {
    std::uint32_t count = 0;
    if (dtype.size() >= 3) {
        const char* const last = dtype.data() + dtype.size();
        const std::from_chars_result read = std::from_chars(dtype.data() + 2, last, count);
        const bool is_whole = read.ec == std::errc() && (read.ptr == last || *read.ptr == '[');
        if (!is_whole || count > 1u << 28) count = 0;
        if (dtype[1] == 'U') count *= 4;
    }
    if (count == 0) throw Error(ErrorKind::storage, "expected a dtype of NumPy's, got '" + dtype + "'");
    return count;
}

std::string name_of(const Field& field) {
    const ItemType type = type_of(field);
    return type.kind == 'V' ? "bytes of dtype '" + field.dtype + "'" : name_of(type);
}

std::string shape_of(const Field& field) {
    std::string text = "(";
    for (std::size_t i = 0; i < field.shape.size(); ++i) {
        text +=
            (i ? ", " : "") + std::string(field.is_ragged && i == 0 ? "0 to " : "") + std::to_string(field.shape[i]);
    }
    return text + ")";
}

bool is_of(ItemType type, const Field& field) { return type.kind == 'V' || type == type_of(field); }

double number_at(ItemType type, const std::byte* item) {
    double read = std::numeric_limits<double>::quiet_NaN();
    with_type(type, [&](auto number) {
        std::memcpy(&number, item, sizeof number);
        read = static_cast<double>(number);
        return true;
    });
    return read;
}

bool convert_number(ItemType type, const std::byte* number, ItemType to, std::byte* item) {
    return with_type(type, [&](auto given) {
        std::memcpy(&given, number, sizeof given);
        if (to.kind == 'b') {
            const auto truth = static_cast<std::uint8_t>(given == decltype(given){1});
            std::memcpy(item, &truth, 1);
            return truth || given == decltype(given){0};
        }
        return with_type(to, [&](auto wanted) {
            const auto wide = +given;  // small types as int
            if (!fits<decltype(+given), decltype(wanted)>(wide)) return false;
            wanted = static_cast<decltype(wanted)>(wide);
            std::memcpy(item, &wanted, sizeof wanted);
            return true;
        });
    });
}

}  // namespace sharpwave
