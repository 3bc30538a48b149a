// Items by their type: names for messages, and numbers of one type as another.
#pragma once

#include <cstddef>
#include <string>

#include "schema/schema.h"
#include "sharpwave/value.h"

namespace sharpwave {

std::string name_of(ItemType type);        // "float32"
ItemType type_of(const Field& field);      // 'V' where C++ has no type for it
std::string name_of(const Field& field);   // of its dtype; NumPy's own where C++ has no type for it
std::string shape_of(const Field& field);  // "(84, 84)"

// Bytes of an item, from NumPy's name of its dtype: "<f4", "|b1", "<U10", "<M8[ns]". Others are ErrorKind::storage.
std::uint32_t dtype_bytes(const std::string& dtype);

// Whether items of this C++ type are the bytes of the field.
bool is_of(ItemType type, const Field& field);

// Reads an item as a number; whole numbers beyond 2^53 are rounded.
double number_at(ItemType type, const std::byte* item);

// Writes the number as an item of the field; false where that would change its value.
bool convert_number(ItemType type, const std::byte* number, ItemType to, std::byte* item);

}  // namespace sharpwave
