#include "sharpwave/batch.h"

#include <functional>
#include <new>

#include "base/error.h"
#include "buffer/item_types.h"
#include "buffer/row_spec.h"

namespace sharpwave {
namespace {

constexpr std::size_t kAlignment = 64;  // a cache line: what the copies of the engine like best

std::string dtype_of(ItemType type) {
    return std::string(type.bytes == 1 ? "|" : "<") + type.kind + std::to_string(type.bytes);
}

}  // namespace

void Batch::Free::operator()(std::byte* memory) const { ::operator delete(memory, std::align_val_t{kAlignment}); }

Batch::Batch(std::shared_ptr<const RowSpec> spec, std::size_t examples) : spec_(std::move(spec)), examples_(examples) {
    const RowSpec& rows = *spec_;
    const std::size_t places = rows.places ? rows.places : 1;
    const auto begin = [&](const std::string& name, const std::string& dtype, std::uint64_t item_bytes, bool by_place) {
        Array& array = arrays_.emplace_back();
        array.name = name;
        array.dtype = dtype;
        array.item_bytes = item_bytes;
        array.shape = {examples};
        if (rows.places && by_place) array.shape.push_back(rows.places);
        return std::ref(array);
    };
    bool has_ragged = false;
    for (const RowLeaf& leaf : rows.leaves) {
        Array& array = begin(leaf.field.name, leaf.field.dtype, leaf.field.item_bytes, true);
        if (leaf.field.stack > 1) array.shape.push_back(leaf.field.stack);
        for (const std::int64_t extent : leaf.field.shape) array.shape.push_back(static_cast<std::size_t>(extent));
        array.is_ragged = leaf.field.is_ragged;
        if (array.is_ragged) {
            array.lengths.resize(examples * places);
            array.most = static_cast<std::uint64_t>(leaf.field.shape[0]);
        }
        has_ragged = has_ragged || array.is_ragged;
    }
    const auto add = [&](const char* name, ItemType type, bool by_place) -> Array& {
        return begin(name, dtype_of(type), type.bytes, by_place);
    };
    if (rows.has_truncated) add("truncated", item_type<bool>(), true);
    if (rows.discounts) {
        Array& array = add("discount", item_type<float>(), true);
        if (rows.by_agent) array.shape.push_back(rows.discounts);
    }
    if (rows.is_prioritized) {
        add("weights", item_type<float>(), false);
        add("probabilities", item_type<double>(), false);
    }
    if (rows.places) {
        for (const char* const name : {"valid", "mask", "first"}) add(name, item_type<bool>(), true);
        if (rows.has_place_indices) add("place_indices", item_type<std::int64_t>(), true);
    }
    add("indices", item_type<std::int64_t>(), false);

    const auto padded = [](std::uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; };
    std::uint64_t total = 0;
    for (Array& array : arrays_) {
        array.bytes = array.item_bytes;
        for (std::size_t i = 1; i < array.shape.size(); ++i) array.bytes *= array.shape[i];
        total += padded(array.bytes * examples);
    }
    memory_.reset(static_cast<std::byte*>(::operator new(total, std::align_val_t{kAlignment})));
    std::byte* place = memory_.get();
    for (Array& array : arrays_) {
        array.data = place;
        place += padded(array.bytes * examples);
        if (flats_.size() < rows.leaves.size()) {
            flats_.push_back(array.data);
            if (has_ragged) lengths_.push_back(array.is_ragged ? array.lengths.data() : nullptr);
        } else if (array.name == "weights") {
            weights_ = reinterpret_cast<float*>(array.data);
        } else if (array.name == "indices") {
            indices_ = reinterpret_cast<std::int64_t*>(array.data);
        }
    }
}

const Batch::Array& Batch::array(std::string_view name) const {
    for (const Array& array : arrays_) {
        if (array.name == name) return array;
    }
    std::string listed;
    for (const Array& array : arrays_) listed += (listed.empty() ? "" : ", ") + array.name;
    throw Error(ErrorKind::schema, "get(): unknown field '" + std::string(name) + "'; the batch has " + listed);
}

const Batch::Array& Batch::checked(std::string_view name, ItemType type) const {
    const Array& found = array(name);
    Field field;
    field.dtype = found.dtype;
    field.item_bytes = static_cast<std::uint32_t>(found.item_bytes);
    if (!is_of(type, field)) {
        throw Error(ErrorKind::schema, "get(): field '" + found.name + "': expected " + name_of(field) + ", got " +
                                           name_of(type) + " as the type of its items");
    }
    return found;
}

std::span<const std::byte> Batch::example_bytes(const Array& array, std::size_t example) const {
    const std::size_t count = array.is_ragged ? array.lengths.size() : examples_;
    if (example >= count) {
        throw Error(ErrorKind::schema, "get(): field '" + array.name + "': expected an example below " +
                                           std::to_string(count) + ", got " + std::to_string(example));
    }
    if (!array.is_ragged) return {array.data + example * array.bytes, array.bytes};
    const std::uint64_t item = array.bytes * examples_ / array.lengths.size() / array.most;
    return {array.data + example * array.most * item, static_cast<std::size_t>(array.lengths[example]) * item};
}

}  // namespace sharpwave
