#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <vector>

#include "base/error.h"
#include "base/random.h"
#include "trajectories/arena.h"
#include "trajectories/rows.h"

using namespace sharpwave;

namespace {

std::vector<std::int64_t> draw_from(const TrajectorySizes& sizes, std::size_t window, std::size_t count,
                                    std::uint64_t call) {
    std::vector<std::int64_t> numbers(count), steps(count), envs(count);
    sizes.draw(7, call, window, count, numbers.data(), steps.data(), envs.data());
    for (std::size_t i = 0; i < count; ++i) {
        EXPECT_GE(numbers[i], static_cast<std::int64_t>(sizes.first()));
        EXPECT_LT(numbers[i], static_cast<std::int64_t>(sizes.first() + sizes.size()));
        EXPECT_GE(steps[i], 0);
        EXPECT_LT(envs[i], numbers[i] % 3 + 1);
        EXPECT_LT(steps[i], numbers[i] % 5 + 1);
    }
    return numbers;
}

}  // namespace

TEST(Trajectories, AreDrawnByTheirRowsAndOnlyFromTheWindow) {
    TrajectorySizes sizes;
    std::uint64_t rows = 0;
    for (std::uint64_t number = 0; number < 5'000; ++number) {
        sizes.append(number % 5 + 1, number % 3 + 1);
        rows += (number % 5 + 1) * (number % 3 + 1);
        if (number % 2) {
            rows -= (sizes.first() % 5 + 1) * (sizes.first() % 3 + 1);
            sizes.drop_oldest(1);
        }
        ASSERT_EQ(sizes.size(), number + 1 - sizes.first());
    }
    EXPECT_EQ(sizes.first(), 2'500u);
    EXPECT_EQ(sizes.rows(0), rows);
    EXPECT_EQ(sizes.rows(1), (4'999 % 5 + 1) * (4'999 % 3 + 1u));
    EXPECT_EQ(sizes.rows(9'999), rows);
    draw_from(sizes, 0, 2'000, 0);
    for (const std::int64_t number : draw_from(sizes, 10, 500, 1)) EXPECT_GE(number, 4'990);
    EXPECT_EQ(draw_from(sizes, 0, 100, 3), draw_from(sizes, 0, 100, 3));
    EXPECT_NE(draw_from(sizes, 0, 100, 3), draw_from(sizes, 0, 100, 4));
    sizes.clear();
    EXPECT_EQ(sizes.rows(0), 0u);
    EXPECT_EQ(sizes.first(), 5'000u);
}

TEST(Trajectories, GiveTheSameRowsFromArraysAndFromRecords) {
    // A plain leaf of 12 bytes, flags with a row more at the start of each of two epochs, values with one at the end.
    constexpr std::uint64_t steps = 4, envs = 3;
    constexpr std::size_t wide = 12;
    std::vector<std::byte> arrays(steps * envs * wide + 2 * (steps + 2) * envs);
    for (std::size_t i = 0; i < arrays.size(); ++i) arrays[i] = static_cast<std::byte>(mix64(i));
    const std::uint64_t flags = steps * envs * wide, values = flags + (steps + 2) * envs;
    const SlabLayout columns{
        steps,
        envs,
        arrays.size(),
        0,
        {{0, wide, envs * wide, wide, 0, 0}, {flags, 1, envs, 1, 2, 1}, {values, 1, envs, 1, 2, 0}}};
    const SlabLayout record{steps, envs, steps * envs * 16, 16, {{0, wide}, {12, 1}, {13, 1}}};
    columns.check();
    record.check();
    std::vector<std::byte> records(steps * envs * 16);
    make_records(arrays.data(), columns, record, records.data());

    std::vector<RowPlace> rows;
    for (std::uint64_t i = 0; i < 100; ++i) {
        RowPlace row;
        const bool is_record = i % 2;
        row.slab = is_record ? records.data() : arrays.data();
        row.leaves = (is_record ? record : columns).leaves.data();
        row.record_bytes = is_record ? 16 : 0;
        row.envs = envs;
        row.step = i / 2 % steps;
        row.env = i / 2 % envs;
        rows.push_back(row);
    }
    std::vector<std::byte> out(100 * (wide + 2));
    const LeafTarget to[] = {{out.data(), wide}, {out.data() + 100 * wide, 1}, {out.data() + 101 * wide + 88, 1}};
    gather_rows(rows.data(), rows.size(), to, 3);
    for (std::size_t i = 0; i < 100; ++i) {
        const std::uint64_t step = rows[i].step, row = step * envs + rows[i].env;
        ASSERT_EQ(std::memcmp(to[0].to + i * wide, arrays.data() + row * wide, wide), 0);
        ASSERT_EQ(to[1].to[i], arrays[flags + (step + step / 2 + 1) * envs + rows[i].env]);
        ASSERT_EQ(to[2].to[i], arrays[values + (step + step / 2) * envs + rows[i].env]);
    }
}

TEST(Trajectories, LayoutsThatLeaveTheirSlabAreRefused) {
    constexpr std::uint64_t huge = std::uint64_t{1} << 63;
    const SlabLayout good{4, 3, 60, 0, {{0, 4, 12, 4, 0, 0}, {48, 1, 3, 1, 0, 0}}};
    good.check();
    const auto refused = [&](auto change) {
        SlabLayout bad = good;
        change(bad);
        EXPECT_THROW(bad.check(), Error);
    };
    refused([](SlabLayout& bad) { bad.leaves[1].offset = 49; });
    refused([](SlabLayout& bad) { bad.leaves[1].offset = huge; });
    refused([](SlabLayout& bad) { bad.leaves[0].step_bytes = huge; });
    refused([](SlabLayout& bad) { bad.leaves[0].env_bytes = ~std::uint64_t{0}; });
    refused([](SlabLayout& bad) { bad.leaves[0].row_bytes = ~std::uint64_t{0}; });
    refused([](SlabLayout& bad) { bad.leaves[1].period = 2; });
    refused([](SlabLayout& bad) { bad.steps = 5; });
    refused([](SlabLayout& bad) { bad.steps = 0; });
    refused([](SlabLayout& bad) { bad.envs = huge; });
    refused([](SlabLayout& bad) { bad.steps = bad.envs = std::uint64_t{1} << 40; });
    SlabLayout records{4, 3, 60, 5, {{0, 4}, {4, 1}}};
    records.check();
    records.bytes = 59;
    EXPECT_THROW(records.check(), Error);
    TrajectorySizes sizes;
    EXPECT_THROW(sizes.append(0, 1), Error);
    EXPECT_THROW(sizes.append(huge, 2), Error);
    EXPECT_THROW(sizes.append(static_cast<std::uint64_t>(-5), 1), Error);
    sizes.append(std::uint64_t{1} << 62, 1);
    EXPECT_THROW(sizes.append(1, 1), Error);
}

TEST(SlabArena, GivesMemoryThatIsNobodyElses) {
    SlabArena arena;
    std::vector<std::pair<SlabArena::Slab, std::size_t>> held;
    const Substream random(1, 0);
    for (std::uint64_t i = 0; i < 3'000; ++i) {
        const std::size_t bytes = i % 100 == 99 ? 5'000'000 : 1 + random.below(200'000, i);
        const SlabArena::Slab slab = arena.take(bytes);
        ASSERT_EQ(reinterpret_cast<std::uintptr_t>(slab.data) % 64, 0u);
        std::memset(slab.data, static_cast<int>(i % 251), bytes);
        held.emplace_back(slab, bytes);
        if (held.size() < 50) continue;
        const auto out = held.begin() + (i % 3 ? 0 : static_cast<std::ptrdiff_t>(random.below(50, i, 1)));
        const auto value = out->first.data[0];
        for (std::size_t at = 0; at < out->second; at += 61) ASSERT_EQ(out->first.data[at], value);
        arena.give(out->first);
        held.erase(out);
    }
    for (const auto& [slab, bytes] : held) arena.give(slab);
}
