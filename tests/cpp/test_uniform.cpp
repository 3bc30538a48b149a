#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "rows.h"

using namespace sharpwave;
using namespace sharpwave::test;

namespace {

// Chi-square of draws against equal chances, as a number of standard deviations above its mean.
double excess(const std::shared_ptr<Table>& table, std::size_t draws_per_row = 200) {
    const std::vector<std::uint64_t> rows = contents(table);
    std::map<std::uint64_t, double> seen;
    for (std::uint64_t number : rows) seen[number] = 0;
    const std::size_t total = rows.size() * draws_per_row;
    for (std::size_t drawn = 0; drawn < total; drawn += 500) {
        for (std::uint64_t number : draw(table, 500)) {
            EXPECT_TRUE(seen.count(number)) << "drew a row that is not there: " << number;
            ++seen[number];
        }
    }
    if (rows.size() == 1) return 0;
    const double each = std::ceil(static_cast<double>(total) / 500) * 500 / static_cast<double>(rows.size());
    double chi_square = 0;
    for (const auto& [number, count] : seen) chi_square += (count - each) * (count - each) / each;
    const double freedom = static_cast<double>(rows.size()) - 1;
    return (chi_square - freedom) / std::sqrt(2 * freedom);
}

}  // namespace

TEST(Uniform, DrawsEveryRowAlikeInEveryStateOfTheRing) {
    for (std::uint64_t filled : {1u, 2u, 999u, 1000u, 1001u, 3500u}) {
        auto table = Table::create(config(1000));
        auto writer = table->writer();
        for (std::uint64_t i = 0; i < filled; ++i) append(*writer, i, 1);
        EXPECT_LT(excess(table), 5) << filled << " rows added";
    }
}

TEST(Uniform, DrawsEveryRowAlikeOverManyNearlyEmptyBlocks) {
    auto table = Table::create(config(1 << 20));
    std::vector<std::unique_ptr<Writer>> writers;
    for (std::uint64_t w = 0; w < 64; ++w) {
        writers.push_back(table->writer());
        append(*writers.back(), w, 1);
    }
    EXPECT_LT(excess(table), 5);
}

TEST(Uniform, DrawsEveryRowAlikeOverUnevenWriters) {
    auto table = Table::create(config(4096, 1, 8));
    std::vector<std::unique_ptr<Writer>> writers;
    std::uint64_t number = 0;
    for (std::size_t w = 0; w < 8; ++w) {
        writers.push_back(table->writer());
        for (std::size_t i = 0; i < 3 + w * w * 30; ++i) append(*writers.back(), number++, 1);
    }
    EXPECT_LT(excess(table, 60), 5);
}

TEST(Uniform, DrawsEveryRowAlikeAmongVoidRows) {
    auto table = Table::create(config(640, 64));
    auto writer = table->writer();
    std::uint8_t flags[64];
    for (int i = 0; i < 64; ++i) flags[i] = i == 5 || i == 60 ? 0 : kRowVoid;
    for (std::uint64_t step = 0; step < 17; ++step) append(*writer, step * 64, 64, flags);
    EXPECT_EQ(table->size(), 20u);
    EXPECT_LT(excess(table, 2000), 5);
}

TEST(Uniform, RepeatsItselfForTheSameSeed) {
    auto one = Table::create(config(100)), two = Table::create(config(100));
    TableConfig other = config(100);
    other.seed = 12;
    auto three = Table::create(other);
    for (auto* table : {&one, &two, &three}) append(*(*table)->writer(), 0, 100);
    bool differs = false;
    for (int call = 0; call < 20; ++call) {
        const auto rows = draw(one, 32);
        EXPECT_EQ(rows, draw(two, 32));
        differs |= rows != draw(three, 32);
    }
    EXPECT_TRUE(differs);
}

TEST(Uniform, ReadsLargeRowsWithSeveralThreads) {
    TableConfig large;
    large.capacity = 200;
    large.fields = {{"id", "<u8", 8, {}}, {"image", "<u8", 8, {4096}}};
    auto table = Table::create(large);
    auto writer = table->writer();
    std::uint64_t id;
    std::vector<std::uint64_t> image(4096);
    for (id = 0; id < 250; ++id) {
        std::fill(image.begin(), image.end(), id * 3);
        const FieldInput inputs[] = {{reinterpret_cast<const std::byte*>(&id), 8},
                                     {reinterpret_cast<const std::byte*>(image.data()), 32768}};
        writer->append({inputs, 1});
    }
    std::vector<std::uint64_t> ids(256), images(256 * 4096 + 1), serials(256);
    for (const std::size_t skew : {0, 1}) {  // streamed stores want aligned places, callers need not give them
        std::byte* const flats[] = {reinterpret_cast<std::byte*>(ids.data()),
                                    reinterpret_cast<std::byte*>(images.data() + skew)};
        BatchMaker(table, {{1, 1.0, {{0, Role::own}, {1, Role::own}}}}).sample(256, {flats}, {serials.data()});
        for (std::size_t row = 0; row < 256; ++row) {
            ASSERT_GE(ids[row], 50u);
            for (std::size_t i = 0; i < 4096; ++i) ASSERT_EQ(images[skew + row * 4096 + i], ids[row] * 3);
        }
    }
}
