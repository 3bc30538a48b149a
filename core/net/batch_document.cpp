// Batches that come as documents: those with fields of different lengths, or with agents by name.
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

// Values and offsets, or padded values and their mask, as the schema has it.
void copy_ragged(const Document& document, const json::Value& value, Batch::Array& array, std::size_t item_bytes) {
    const DocumentArray items = document.array(value.at("values", "ragged"));
    const std::size_t count = array.lengths.size(), most = array.most;
    const auto put = [&](std::size_t i, std::size_t first, std::size_t length) {
        const std::size_t there = items.bytes.size() / item_bytes;
        if (length > most || first > there || length > there - first) refuse_batch(array.name);
        array.lengths[i] = static_cast<std::int64_t>(length);
        if (length)
            std::memcpy(array.data + i * most * item_bytes, items.bytes.data() + first * item_bytes,
                        length * item_bytes);
    };
    if (items.dtype != array.dtype) refuse_batch(array.name);
    if (const json::Value* mask = value.find("mask")) {
        const DocumentArray truths = document.array(*mask);
        if (truths.bytes.size() != count * most) refuse_batch(array.name);
        for (std::size_t i = 0; i < count; ++i) {
            std::size_t length = 0;
            while (length < most && truths.bytes[i * most + length] != std::byte{0}) ++length;
            put(i, i * most, length);
        }
        return;
    }
    const DocumentArray offsets = document.array(value.at("offsets", "ragged"));
    if (offsets.dtype != "<i8" || offsets.bytes.size() != (count + 1) * 8) refuse_batch(array.name);
    std::vector<std::int64_t> starts(count + 1);
    std::memcpy(starts.data(), offsets.bytes.data(), offsets.bytes.size());
    for (std::size_t i = 0; i < count; ++i) {
        if (starts[i] < 0 || starts[i + 1] < starts[i]) refuse_batch(array.name);
        put(i, static_cast<std::size_t>(starts[i]), static_cast<std::size_t>(starts[i + 1] - starts[i]));
    }
}

// The discounts of agents by name are one array here.
void copy_leaves(const Document& document, const json::Value& value, std::vector<DocumentArray>& parts) {
    if (Document::is_array(value)) {
        parts.push_back(document.array(value));
    } else if (const json::Value* items = value.find("$tuple")) {
        for (const json::Value& item : items->list("tuple")) copy_leaves(document, item, parts);
    } else {
        for (const auto& [name, item] : value.object("batch")) copy_leaves(document, item, parts);
    }
}

}  // namespace

void RemoteRows::read_document(std::span<const std::byte> body, Batch& batch) const {
    const Document document(body);
    const json::Value& arrays = document.value().at("batch", "SAMPLE");
    for (Batch::Array& array : batch.arrays_) {
        const json::Value& value = value_at(arrays, array.name);
        if (array.is_ragged) {
            copy_ragged(document, value, array, spec()->find(array.name)->field.item_row_bytes());
            continue;
        }
        std::vector<DocumentArray> parts;
        copy_leaves(document, value, parts);
        const std::size_t examples = batch.size() * (array.name == "discount" && spec()->places ? spec()->places : 1);
        std::size_t total = 0;
        for (const DocumentArray& part : parts) {
            if (part.dtype != array.dtype) refuse_batch(array.name);
            total += part.bytes.size();
        }
        if (total != array.bytes * batch.size() || parts.empty()) refuse_batch(array.name);
        std::byte* to = array.data;
        for (std::size_t i = 0; i < examples; ++i) {
            for (const DocumentArray& part : parts) {
                const std::size_t bytes = part.bytes.size() / examples;
                std::memcpy(to, part.bytes.data() + i * bytes, bytes);
                to += bytes;
            }
        }
    }
}

}  // namespace sharpwave
