// Batches that come as documents: those with fields of different lengths.
#include <algorithm>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "net/document.h"
#include "net/remote_rows.h"

namespace sharpwave {
namespace {

using net::Document;
using net::DocumentArray;

[[noreturn]] void refuse_batch(const std::string& name) {
    throw Error(ErrorKind::storage, "the server's batch has another form of '" + name + "'");
}

// The value under a path of names and numbers.
const json::Value& value_at(const json::Value& batch, const std::string& path) {
    const json::Value* at = &batch;
    for (std::size_t start = 0; start <= path.size();) {
        const std::size_t end = std::min(path.find('/', start), path.size());
        const std::string key = path.substr(start, end - start);
        if (const json::Value* items = at->find("$tuple")) {
            const std::vector<json::Value>& list = items->list("tuple");
            std::size_t number = 0;
            for (const char digit : key) number = number * 10 + static_cast<std::size_t>(digit - '0');
            if (number >= list.size()) refuse_batch(path);
            at = &list[number];
        } else {
            at = &at->at(key, "batch");
        }
        start = end + 1;
    }
    return *at;
}

void copy_lengths(const DocumentArray& lengths, Batch::Array& array) {
    const std::size_t bytes = array.lengths.size() * sizeof(std::int64_t);
    if (lengths.dtype != "<i8" || lengths.bytes.size() != bytes) refuse_batch(array.name);
    std::memcpy(array.lengths.data(), lengths.bytes.data(), bytes);
    const auto most = static_cast<std::int64_t>(array.most);
    for (const std::int64_t length : array.lengths) {
        if (length < 0 || length > most) refuse_batch(array.name);
    }
}

}  // namespace

void RemoteRows::read_document(std::span<const std::byte> body, Batch& batch) const {
    const Document document(body);
    const json::Value& arrays = document.value().at("batch", "SAMPLE");
    std::size_t ragged = 0;
    for (Batch::Array& array : batch.arrays_) {
        const DocumentArray found = document.array(value_at(arrays, array.name));
        if (found.dtype != array.dtype || found.bytes.size() != array.bytes * batch.size()) refuse_batch(array.name);
        std::memcpy(array.data, found.bytes.data(), found.bytes.size());
        if (!array.is_ragged) continue;
        const std::vector<json::Value>& lengths = arrays.at("lengths", "SAMPLE").list("lengths");
        if (ragged >= lengths.size()) refuse_batch(array.name);
        copy_lengths(document.array(lengths[ragged++]), array);
    }
}

}  // namespace sharpwave
