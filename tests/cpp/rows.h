// Rows for the tests: every field is computed from one number, so a row that mixes two others is found out.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "batches/batch_maker.h"
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

    std::vector<FieldInput> inputs() const {
        const auto at = [](const auto& column) {
            return FieldInput{reinterpret_cast<const std::byte*>(column.data()), sizeof column[0]};
        };
        return {at(id), at(image), at(small), at(flag)};
    }

    std::vector<std::byte*> flats() {
        const auto at = [](auto& column) { return reinterpret_cast<std::byte*>(column.data()); };
        return {at(id), at(image), at(small), at(flag)};
    }
};

// All fields of the row drawn.
inline ViewConfig whole_rows() { return {1, 1.0, {{0, Role::own}, {1, Role::own}, {2, Role::own}, {3, Role::own}}}; }

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
    const auto fields = rows.inputs();
    writer.append({fields.data(), count, flags});
}

// The numbers of all live rows, oldest first.
inline std::vector<std::uint64_t> contents(const std::shared_ptr<Table>& table) {
    std::vector<std::uint64_t> serials = table->live_serials(), words(serials.size());
    Rows rows(serials.size());
    const auto flats = rows.flats();
    BatchMaker(table, {whole_rows()}).read(serials.data(), serials.size(), {flats.data()}, words.data());
    return rows.id;
}

inline std::vector<std::uint64_t> draw(const std::shared_ptr<Table>& table, std::size_t count) {
    Rows rows(count);
    std::vector<std::uint64_t> serials(count);
    const auto flats = rows.flats();
    BatchMaker(table, {whole_rows()}).sample(count, {flats.data()}, {serials.data()});
    return rows.id;
}

}  // namespace sharpwave::test
