// Rows as one piece of memory: what is packed is read back, and what does not fit is refused before anything is read.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "base/error.h"
#include "rows.h"
#include "table/packed_rows.h"

namespace sharpwave::test {
namespace {

using Body = std::vector<std::uint64_t>;  // lies at a multiple of 8

std::vector<Field> all_kinds() {
    std::vector<Field> fields = {{"id", "<u8", 8, {}},
                                 {"eye", "|u1", 1, {3}},
                                 {"words", "<i4", 4, {4, 2}},
                                 {"done", "|b1", 1, {}},
                                 {"state", "<f4", 4, {2}}};
    fields[1].stack = 3;
    fields[1].gives_next = true;
    fields[2].is_ragged = true;
    fields[4].is_mutable = true;
    return fields;
}

// Rows of all_kinds() whose bytes follow from their number.
struct Given {
    Given(std::size_t count, std::size_t first, std::uint32_t frames) : rows(count), starts{0} {
        for (std::size_t i = 0; i < count; ++i) {
            const std::uint64_t number = first + i;
            ids.push_back(number);
            for (std::uint32_t k = 0; k < frames * 3; ++k) eye.push_back(static_cast<std::uint8_t>(number + k));
            for (std::uint32_t k = 0; k < frames * 3; ++k) next.push_back(static_cast<std::uint8_t>(number + k + 100));
            for (std::uint64_t k = 0; k < number % 5 * 2; ++k)
                words.push_back(static_cast<std::int32_t>(number * 10 + k));
            starts.push_back(words.size() * 4);
            done.push_back(number % 2);
            state.push_back(static_cast<float>(number));
            state.push_back(-1);
            flags.push_back(number % 3 == 0 ? kRowTruncated : number % 3 == 1 ? kRowVoid | kRowTerminated : 0);
            priorities.push_back(static_cast<float>(number) / 2);
        }
        const auto at = [](const auto& column) { return reinterpret_cast<const std::byte*>(column.data()); };
        fields = {{at(ids), 8},
                  {at(eye) + (frames - 1) * 3, frames * 3, frames},
                  {at(words), 0, 1, starts.data()},
                  {at(done), 1},
                  {at(state), 8}};
        after = {{at(next) + (frames - 1) * 3, frames * 3, frames}};
    }
    RowBatch batch(bool flagged = true, bool weighted = true) const {
        return {fields.data(), rows, flagged ? flags.data() : nullptr, after.data(),
                weighted ? priorities.data() : nullptr};
    }
    std::size_t rows;
    std::vector<std::uint64_t> ids, starts;
    std::vector<std::uint8_t> eye, next, done, flags;
    std::vector<std::int32_t> words;
    std::vector<float> state, priorities;
    std::vector<FieldInput> fields, after;
};

Body written(const RowPacker& packer) {
    EXPECT_EQ(packer.bytes() % 8, 0u);
    Body body(packer.bytes() / 8, ~std::uint64_t{0});
    packer.write(reinterpret_cast<std::byte*>(body.data()));
    return body;
}

const std::byte* bytes_of(const Body& body) { return reinterpret_cast<const std::byte*>(body.data()); }

PackedRows read(const RowLayout& layout, const Body& body, std::uint64_t width = 1, std::uint64_t capacity = 100) {
    return PackedRows({layout, width, capacity, true}, bytes_of(body), body.size() * 8);
}

std::string refusal(const RowLayout& layout, const Body& body, std::uint64_t width = 1, std::uint64_t capacity = 100) {
    try {
        read(layout, body, width, capacity);
    } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::schema);
        return error.what();
    }
    return "";
}

void expect_same(const RowLayout& layout, const RowBatch& found, const RowBatch& expected) {
    ASSERT_EQ(found.rows, expected.rows);
    std::size_t next = 0;
    const auto compare = [&](const Field& field, const FieldInput& one, const FieldInput& other) {
        ASSERT_EQ(one.frames, other.frames);
        for (std::size_t i = 0; i < expected.rows; ++i) {
            const GivenValue a = value_of(one, field, i), b = value_of(other, field, i);
            const std::uint64_t older = (one.frames - 1) * field.full_bytes;
            ASSERT_EQ(a.bytes, b.bytes);
            ASSERT_EQ(std::memcmp(a.data - older, b.data - older, a.bytes + older), 0) << field.name << ' ' << i;
        }
    };
    for (std::size_t f = 0; f < layout.fields().size(); ++f) {
        compare(layout.fields()[f], found.fields[f], expected.fields[f]);
        if (layout.fields()[f].gives_next) {
            compare(layout.fields()[f], found.next[next], expected.next[next]);
            ++next;
        }
    }
    for (std::size_t i = 0; i < expected.rows; ++i) {
        const std::uint8_t flags = expected.flags ? expected.flags[i] & ~kRowTerminated : 0;
        ASSERT_EQ(found.flags ? found.flags[i] : 0, flags);
        if (expected.priorities) {
            ASSERT_EQ(found.priorities[i], expected.priorities[i]);
        }
    }
    ASSERT_EQ(found.priorities == nullptr, expected.priorities == nullptr);
}

TEST(PackedRows, HoldWhatWasPackedInOneCallOrInMany) {
    const RowLayout layout(all_kinds());
    for (const std::uint32_t frames : {1u, 3u}) {
        for (const bool flagged : {false, true}) {
            RowPacker packer(layout);
            for (int round = 0; round < 2; ++round) {  // a packer that was emptied is as a new one
                for (std::size_t first = 0; first < 20;) {
                    const Given part(first % 4 + 1, first, frames);
                    ASSERT_TRUE(packer.fits(part.batch(flagged)));
                    packer.add(part.batch(flagged));
                    first += part.rows;
                }
                const Body body = written(packer);
                const Given whole(packer.rows(), 0, frames);
                expect_same(layout, read(layout, body).batch(), whole.batch(flagged));
                packer.clear();
                EXPECT_EQ(packer.rows() + packer.bytes(), 0u);
            }
        }
    }
}

TEST(PackedRows, OfStridedColumnsAreThoseOfContiguousOnes) {
    const RowLayout layout({{"id", "<u8", 8, {}}});
    const std::uint64_t apart[] = {1, 9, 2, 9, 3, 9};
    const FieldInput field{reinterpret_cast<const std::byte*>(apart), 16};
    RowPacker packer(layout);
    packer.add({&field, 3});
    EXPECT_EQ(written(packer), (Body{3, 1, 1, 2, 3}));
}

TEST(PackedRows, OfOtherFramesOrWithPrioritiesDoNotFit) {
    const RowLayout layout(all_kinds());
    RowPacker packer(layout);
    const Given single(2, 0, 1), stacks(2, 0, 3);
    EXPECT_TRUE(packer.fits(single.batch()) && packer.fits(stacks.batch()));
    packer.add(stacks.batch());
    EXPECT_FALSE(packer.fits(single.batch()));
    EXPECT_FALSE(packer.fits(stacks.batch(true, false)));
    EXPECT_TRUE(packer.fits(stacks.batch(false)));
    packer.clear();
    EXPECT_TRUE(packer.fits(single.batch()));
}

TEST(PackedRows, AreRefusedWhereTheyEndEarlyOrLate) {
    const RowLayout layout(all_kinds());
    RowPacker packer(layout);
    packer.add(Given(5, 0, 3).batch());
    const Body body = written(packer);
    for (std::size_t words = 0; words < body.size(); ++words) {
        const Body part(body.begin(), body.begin() + static_cast<std::ptrdiff_t>(words));
        EXPECT_NE(refusal(layout, part).find("to the end of the body"), std::string::npos) << words;
    }
    Body longer = body;
    longer.push_back(0);
    EXPECT_EQ(refusal(layout, longer), "packed rows: end: expected no bytes behind the last section, got 8");
}

TEST(PackedRows, AreRefusedWithWhatIsWrong) {
    const RowLayout plain({{"id", "<u8", 8, {}}, {"done", "|b1", 1, {}}});
    const Body good = {1 | std::uint64_t{3} << 32, 2, std::uint64_t{0x3f800000}, 1, 7, 1, 1};
    EXPECT_EQ(refusal(plain, good), "");
    const auto changed = [&](std::size_t word, std::uint64_t to) {
        Body body = good;
        body[word] = to;
        return body;
    };
    EXPECT_EQ(refusal(plain, changed(0, std::uint64_t{3} << 32)), "packed rows: rows: expected 1 to 100, got 0");
    EXPECT_EQ(refusal(plain, changed(0, 101)), "packed rows: rows: expected 1 to 100, got 101");
    EXPECT_EQ(refusal(plain, good, 2), "packed rows: rows: expected a multiple of 2, got 1");
    EXPECT_EQ(refusal(plain, changed(0, 1 | std::uint64_t{7} << 32)), "packed rows: bits: expected 0 to 3, got 7");
    EXPECT_EQ(refusal(plain, changed(1, 1)), "packed rows: flags of row 0: expected bits of 70, got 1");
    EXPECT_EQ(refusal(plain, changed(2, 0xbf800000)),
              "packed rows: priority of row 0: expected a finite number, at least 0, got -1.000000");
    EXPECT_NE(refusal(plain, changed(2, 0x7f800000)).find("got inf"), std::string::npos);
    EXPECT_NE(refusal(plain, changed(2, 0x7fc00000)).find("got nan"), std::string::npos);
    EXPECT_EQ(refusal(plain, changed(3, 2)), "packed rows: field 'id', frames: expected 1, got 2");
    EXPECT_EQ(refusal(plain, changed(3, 1 | std::uint64_t{1} << 32)),
              "packed rows: field 'id', reserved number: expected 0, got 1");
    EXPECT_EQ(refusal(plain, changed(6, 2)), "packed rows: field 'done': expected 0 or 1 for a truth value, got 2");
    EXPECT_THROW(PackedRows({plain, 1, 100, false}, bytes_of(good), good.size() * 8), Error);  // priorities

    std::vector<Field> fields = {{"id", "<u8", 8, {}}, {"words", "<i4", 4, {4, 2}}};
    fields[1].is_ragged = true;
    const RowLayout ragged(fields);
    const auto body = [](std::uint64_t first, std::uint64_t second, std::uint64_t third) {
        return Body{2, 1, 0, 0, first, second, third, 0, 0, 0};
    };
    EXPECT_EQ(refusal(ragged, body(0, 16, 24)), "");
    EXPECT_EQ(refusal(ragged, body(8, 16, 24)), "packed rows: field 'words', start of row 0: expected 0, got 8");
    EXPECT_EQ(refusal(ragged, body(0, 16, 8)),
              "packed rows: field 'words', row 1, end: expected at least its start 16, got 8");
    EXPECT_EQ(refusal(ragged, body(0, 40, 40)), "packed rows: field 'words', row 0: expected at most 32 bytes, got 40");
    EXPECT_EQ(refusal(ragged, body(0, 4, 24)),
              "packed rows: field 'words', row 0: expected a multiple of 8 bytes, got 4");
    EXPECT_NE(refusal(ragged, body(0, std::numeric_limits<std::uint64_t>::max() - 7, 24)), "");
}

TEST(PackedRows, OfSizesWhoseProductOverflowsAreRefused) {
    // 2^32 - 1 rows of 2^39 bytes are 2^71: cut to 64 bits that would be little.
    std::vector<Field> fields = {{"large", "<u8", 8, {std::int64_t{1} << 36}}};
    const Body body = {0xffffffff, 1, 0, 0};
    EXPECT_NE(refusal(RowLayout(fields), body, 1, ~std::uint64_t{0}).find("to the end of the body"), std::string::npos);
}

}  // namespace
}  // namespace sharpwave::test
