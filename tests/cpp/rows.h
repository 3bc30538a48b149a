// Rows for the tests: every field is computed from one number, so a row that mixes two others is found out.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "sampling/uniform.h"
#include "table/table.h"
#include "table/writer.h"

namespace sharpwave::test {

struct Rows {
    explicit Rows(std::size_t count) : id(count), image(count), small(count), flag(count) {}
    std::vector<std::uint64_t> id;
    std::vector<std::array<std::uint32_t, 17>> image;
    std::vector<std::uint16_t> small;
    std::vector<std::uint8_t> flag;

    void set(std::size_t row, std::uint64_t number) {
        id[row] = number;
        for (std::uint32_t i = 0; i < 17; ++i) image[row][i] = static_cast<std::uint32_t>(number * 31 + i);
        small[row] = static_cast<std::uint16_t>(number * 7);
        flag[row] = static_cast<std::uint8_t>(number % 251);
    }

    bool whole(std::size_t row) const {
        Rows expected(1);
        expected.set(0, id[row]);
        return expected.image[0] == image[row] && expected.small[0] == small[row] && expected.flag[0] == flag[row];
    }

    std::vector<FieldMove> moves(const RowLayout& layout) {
        void* places[] = {id.data(), image.data(), small.data(), flag.data()};
        std::vector<FieldMove> result;
        for (std::size_t i = 0; i < 4; ++i) {
            const Field& field = layout.fields()[i];
            result.push_back({field.offset, field.bytes, static_cast<std::byte*>(places[i])});
        }
        return result;
    }
};

inline TableConfig config(std::uint64_t capacity, std::uint64_t width = 1, std::uint64_t writers = 64) {
    TableConfig config;
    config.capacity = capacity;
    config.width = width;
    config.max_writers = writers;
    config.seed = 11;
    config.fields = {{"id", "<u8", 8, {}}, {"image", "<u4", 4, {17}}, {"small", "<u2", 2, {}}, {"flag", "|u1", 1, {}}};
    config.description = "{}";
    return config;
}

// Appends rows numbered first, first+1, ...
inline void append(Writer& writer, std::uint64_t first, std::size_t count, const std::uint8_t* flags = nullptr) {
    Rows rows(count);
    for (std::size_t i = 0; i < count; ++i) rows.set(i, first + i);
    const auto fields = rows.moves(writer.table().layout());
    writer.append({fields.data(), count, flags});
}

// The numbers of all live rows, oldest first.
inline std::vector<std::uint64_t> contents(const Table& table) {
    std::vector<std::uint64_t> serials = table.live_serials(), words(serials.size());
    Rows rows(serials.size());
    const auto fields = rows.moves(table.layout());
    table.read(serials.data(), serials.size(), fields.data(), words.data());
    return rows.id;
}

inline std::vector<std::uint64_t> draw(Table& table, std::size_t count) {
    Rows rows(count);
    std::vector<std::uint64_t> serials(count);
    const auto fields = rows.moves(table.layout());
    sample_uniform(table, count, fields.data(), serials.data());
    return rows.id;
}

}  // namespace sharpwave::test
