// The conversion of numbers: from any layout into C order, from dtype to dtype.
#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "input_values.h"

namespace {

template <std::size_t Bytes>
void copy_strided(std::byte* to, const char* from, npy_intp count, npy_intp stride) {
    for (npy_intp i = 0; i < count; ++i)
        std::memcpy(to + static_cast<std::size_t>(i) * Bytes, from + i * stride, Bytes);
}

// All items in C order, as they are.
void gather(const GivenArray& given, std::byte* to) {
    // The last axes that lie together are copied in one piece.
    auto run = static_cast<npy_intp>(given.item_bytes);
    int axes = given.dimensions;
    while (axes > 0 && (given.strides[axes - 1] == run || given.shape[axes - 1] == 1)) run *= given.shape[--axes];
    if (run == 0 || given.items() == 0) return;
    if (axes == 0) {
        std::memcpy(to, given.data, static_cast<std::size_t>(run));
        return;
    }
    const npy_intp inner = given.shape[axes - 1], stride = given.strides[axes - 1];
    npy_intp at[GivenArray::kMaxDimensions] = {};
    const char* from = given.data;
    for (;;) {
        switch (run) {
            case 1:
                copy_strided<1>(to, from, inner, stride);
                break;
            case 2:
                copy_strided<2>(to, from, inner, stride);
                break;
            case 4:
                copy_strided<4>(to, from, inner, stride);
                break;
            case 8:
                copy_strided<8>(to, from, inner, stride);
                break;
            default:
                for (npy_intp i = 0; i < inner; ++i) {
                    std::memcpy(to + i * run, from + i * stride, static_cast<std::size_t>(run));
                }
        }
        to += inner * run;
        int axis = axes - 2;
        for (; axis >= 0; --axis) {
            from += given.strides[axis];
            if (++at[axis] < given.shape[axis]) break;
            from -= given.strides[axis] * given.shape[axis];
            at[axis] = 0;
        }
        if (axis < 0) return;
    }
}

void swap_bytes(std::byte* items, std::size_t bytes, std::size_t unit) {
    for (std::size_t i = 0; i < bytes; i += unit) std::reverse(items + i, items + i + unit);
}

struct Truth {
    npy_bool byte;
    explicit operator bool() const { return byte != 0; }
};

struct Half {
    npy_half bits;
    explicit operator float() const {
        const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000) << 16, rest = bits & 0x7fff;
        if (rest < 0x0400) {  // a multiple of 2^-24
            const float size = static_cast<float>(rest) * 0x1p-24f;
            return sign ? -size : size;
        }
        const std::uint32_t word =
            sign | (rest >= 0x7c00 ? 0x7f800000 | (rest & 0x3ff) << 13 : (rest << 13) + 0x38000000);
        float result;
        std::memcpy(&result, &word, sizeof result);
        return result;
    }
};

template <class Number>
constexpr bool is_real = std::is_floating_point_v<Number> || std::is_same_v<Number, Half>;

using Long = std::conditional_t<sizeof(long) == 8, std::int64_t, std::int32_t>;

// `run` with a number of the dtype's type; false for dtypes that are not converted here.
template <class Run>
bool with_type(int type, Run&& run) {
    switch (type) {
        case NPY_BOOL:
            return run(Truth{});
        case NPY_BYTE:
            return run(std::int8_t{});
        case NPY_UBYTE:
            return run(std::uint8_t{});
        case NPY_SHORT:
            return run(std::int16_t{});
        case NPY_USHORT:
            return run(std::uint16_t{});
        case NPY_INT:
            return run(std::int32_t{});
        case NPY_UINT:
            return run(std::uint32_t{});
        case NPY_LONG:
            return run(Long{});
        case NPY_ULONG:
            return run(std::make_unsigned_t<Long>{});
        case NPY_LONGLONG:
            return run(std::int64_t{});
        case NPY_ULONGLONG:
            return run(std::uint64_t{});
        case NPY_HALF:
            return run(Half{});
        case NPY_FLOAT:
            return run(float{});
        case NPY_DOUBLE:
            return run(double{});
        default:
            return false;
    }
}

// From this magnitude on a float64 is rounded to an infinite float32: half a step above the largest.
constexpr double kBeyondFloat = 0x1.ffffffp127;

// False: a value loses its meaning. All items are converted all the same: a loop without a way out is vectorised.
template <class From, class To>
bool cast(const From* from, To* to, std::size_t count) {
    bool is_kept = true;
    for (std::size_t i = 0; i < count; ++i) {
        const From item = from[i];
        if constexpr (std::is_same_v<To, Truth>) {
            if constexpr (std::is_same_v<From, Half>) {
                is_kept &= static_cast<float>(item) == 0 || static_cast<float>(item) == 1;
                to[i] = {static_cast<float>(item) != 0};
            } else {
                is_kept &= (item == 0) | (item == 1);
                to[i] = {item != 0};
            }
        } else if constexpr (std::is_same_v<From, Truth>) {
            to[i] = static_cast<To>(static_cast<bool>(item));
        } else if constexpr (std::is_same_v<From, Half>) {
            to[i] = static_cast<To>(static_cast<float>(item));
        } else if constexpr (std::is_integral_v<To>) {
            is_kept &= std::in_range<To>(item);
            to[i] = static_cast<To>(item);
        } else {
            to[i] = static_cast<To>(item);
        }
    }
    return is_kept;
}

// The sign bit of a difference tells which word is larger. Comparisons of numbers would keep the loop from being
// vectorised, because they may trap.
template <>
bool cast(const double* from, float* to, std::size_t count) {
    constexpr auto least = std::bit_cast<std::int64_t>(kBeyondFloat);
    constexpr auto infinite = std::bit_cast<std::int64_t>(std::numeric_limits<double>::infinity());
    std::int64_t lost = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const auto size = std::bit_cast<std::int64_t>(from[i]) & std::numeric_limits<std::int64_t>::max();
        lost |= (least - 1 - size) & (size - infinite);
        to[i] = static_cast<float>(from[i]);
    }
    return lost >= 0;
}

template <class From, class To>
constexpr bool is_allowed() {
    if constexpr (std::is_same_v<From, To> || std::is_same_v<To, Half>) return false;
    if constexpr (std::is_same_v<To, Truth>) return true;
    if constexpr (std::is_integral_v<To>) return !is_real<From>;
    return std::is_floating_point_v<To>;
}

// Data in C order, native and aligned.
const std::byte* contiguous(const GivenArray& given, InputMemory& memory) {
    const auto* data = reinterpret_cast<const std::byte*>(given.data);
    if (given.is_plain) return data;
    const std::size_t bytes = given.items() * static_cast<std::size_t>(given.item_bytes);
    std::byte* to = memory.room(bytes);
    gather(given, to);
    if (given.is_swapped) {
        const int unit = PyTypeNum_ISCOMPLEX(given.type) ? given.item_bytes / 2 : given.item_bytes;
        swap_bytes(to, bytes, static_cast<std::size_t>(unit));
    }
    return to;
}

bool is_numeric(int type) { return PyTypeNum_ISNUMBER(type) || PyTypeNum_ISBOOL(type); }

}  // namespace

const std::byte* convert(const GivenArray& given, const PyArray_Descr* want, InputMemory& memory) {
    if (!is_numeric(given.type) || !is_numeric(want->type_num)) return nullptr;
    if (given.type == want->type_num) return contiguous(given, memory);
    const std::byte* converted = nullptr;
    with_type(given.type, [&](auto from) {
        return with_type(want->type_num, [&](auto to) {
            using From = decltype(from);
            using To = decltype(to);
            if constexpr (std::is_same_v<From, To>) {  // two names of one type: long and long long
                converted = contiguous(given, memory);
            } else if constexpr (is_allowed<From, To>()) {
                const auto* items = reinterpret_cast<const From*>(contiguous(given, memory));
                const std::size_t count = given.items();
                std::byte* place = memory.room(count * sizeof(To));
                if (cast(items, reinterpret_cast<To*>(place), count)) converted = place;
            }
            return true;
        });
    });
    return converted;
}

bool convert_priorities(const GivenArray& given, float* to, InputMemory& memory) {
    return with_type(given.type, [&](auto zero) {
        using From = decltype(zero);
        const auto* items = reinterpret_cast<const From*>(contiguous(given, memory));
        const std::size_t count = given.items();
        for (std::size_t i = 0; i < count; ++i) {
            if constexpr (std::is_same_v<From, Half> || std::is_same_v<From, float>) {
                to[i] = static_cast<float>(items[i]);
            } else if constexpr (std::is_same_v<From, Truth>) {
                to[i] = static_cast<bool>(items[i]);
            } else {
                to[i] = static_cast<float>(static_cast<double>(items[i]));
            }
        }
        // As in the cast to float32: differences of words are vectorised, comparisons of numbers are not.
        std::int32_t lost = 0;
        for (std::size_t i = 0; i < count; ++i) {
            const auto size = std::bit_cast<std::int32_t>(to[i]) & std::numeric_limits<std::int32_t>::max();
            lost |= std::bit_cast<std::int32_t>(FLT_MAX) - size;
            to[i] = std::bit_cast<float>(size);
        }
        return lost >= 0;
    });
}
