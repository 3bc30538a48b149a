#include "net/document.h"

#include <cstring>
#include <limits>

#include "base/error.h"
#include "buffer/item_types.h"

namespace sharpwave::net {
namespace {

constexpr std::size_t kHeadBytes = 8;

[[noreturn]] void refuse_document(const std::string& what) {
    throw Error(ErrorKind::storage, "the answer of the server is damaged: " + what);
}

std::string_view json_of(std::span<const std::byte> body) {
    std::uint32_t bytes = 0;
    if (body.size() < kHeadBytes) refuse_document("a document without its head");
    std::memcpy(&bytes, body.data(), sizeof bytes);
    if (bytes > body.size() - kHeadBytes) refuse_document("a document that is cut off");
    return {reinterpret_cast<const char*>(body.data()) + kHeadBytes, bytes};
}

}  // namespace

std::vector<std::byte> write_document(std::string_view json) {
    std::vector<std::byte> body(kHeadBytes + json.size());
    const auto bytes = static_cast<std::uint32_t>(json.size());
    std::memcpy(body.data(), &bytes, sizeof bytes);
    std::memcpy(body.data() + kHeadBytes, json.data(), json.size());
    return body;
}

Document::Document(std::span<const std::byte> body) : body_(body), value_(json::parse(json_of(body))) {}

DocumentArray Document::array(const json::Value& value) const {
    const std::vector<json::Value>& parts = value.at("$", "array").list("array");
    if (parts.size() != 3) refuse_document("an array without dtype, shape and offset");
    DocumentArray made;
    made.dtype = parts[0].text("dtype");
    std::uint64_t bytes = dtype_bytes(made.dtype);
    for (const json::Value& extent : parts[1].list("shape")) {
        made.shape.push_back(extent.whole("shape", 0, static_cast<std::int64_t>(body_.size())));
        bytes *= static_cast<std::uint64_t>(made.shape.back());
        if (bytes > body_.size()) refuse_document("an array that is larger than the message");
    }
    const auto offset =
        static_cast<std::uint64_t>(parts[2].whole("offset", 0, static_cast<std::int64_t>(body_.size())));
    if (bytes > body_.size() - offset) refuse_document("an array that is cut off");
    made.bytes = body_.subspan(offset, bytes);
    return made;
}

double Document::number(const json::Value& value) {
    const json::Value* special = value.find("$float");
    if (!special) return value.number("number");
    const std::string& text = special->text("$float");
    if (text == "nan") return std::numeric_limits<double>::quiet_NaN();
    if (text == "inf") return std::numeric_limits<double>::infinity();
    if (text == "-inf") return -std::numeric_limits<double>::infinity();
    refuse_document("an unknown number '" + text + "'");
}

}  // namespace sharpwave::net
