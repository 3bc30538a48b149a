// Documents: a JSON value with arrays beside it, in the body of a message.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"

namespace sharpwave::net {

// An array of a document; its bytes lie in the body.
struct DocumentArray {
    std::string dtype;
    std::vector<std::int64_t> shape;
    std::span<const std::byte> bytes;
};

// A body that is a document without arrays.
std::vector<std::byte> write_document(std::string_view json);

// Points into the body, which must outlive it. What is wrong is ErrorKind::storage.
class Document {
public:
    explicit Document(std::span<const std::byte> body);

    const json::Value& value() const { return value_; }
    static bool is_array(const json::Value& value) { return value.find("$") != nullptr; }
    DocumentArray array(const json::Value& value) const;

    // A number, also one of those that JSON lacks.
    static double number(const json::Value& value);

private:
    std::span<const std::byte> body_;
    json::Value value_;
};

}  // namespace sharpwave::net
