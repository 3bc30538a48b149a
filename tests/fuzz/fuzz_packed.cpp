// Reads any bytes as packed rows and adds what was accepted: an Error of the kind schema, or rows in a table. Anything
// else (a signal, a sanitizer's report, another exception, a hang) is a defect. The entry point is libFuzzer's.
//
//     sharpwave_fuzz_packed [--rounds 100000] [--seed 1]
//
// Without libFuzzer it makes bodies itself: whole ones, whole ones with some bytes or numbers changed, and random ones.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "table/client_rows.h"
#include "table/codec.h"
#include "table/packed_rows.h"
#include "table/writer.h"

using namespace sharpwave;

namespace {

constexpr std::uint64_t kCapacity = 64;

std::shared_ptr<Table> make_table(std::size_t kind) {
    TableConfig config;
    config.capacity = kCapacity;
    config.width = kind % 2 + 1;
    config.block_rows = 8;
    config.description = "{}";
    config.fields = {
        {"id", "<u8", 8, {}}, {"obs", "|u1", 1, {5}}, {"words", "<i4", 4, {3, 2}}, {"done", "|b1", 1, {2}}};
    config.fields[1].stack = kind & 2 ? 3 : 1;
    config.fields[1].gives_next = (kind & 4) != 0;
    config.fields[2].is_ragged = true;
    if ((kind & 8) && has_codecs()) config.fields[1].codec = Codec::lz4;
    config.fields.push_back({"state", "<f4", 4, {2}});
    config.fields[4].is_mutable = true;
    config.index.is_by_priority = config.index.has_index = (kind & 8) != 0;
    return Table::create(config);
}

// One table of each kind, with a client whose rows go on and on.
struct Target {
    explicit Target(std::size_t kind) : table(make_table(kind)), writer(table->writer({1, kind})) {}
    std::shared_ptr<Table> table;
    std::unique_ptr<Writer> writer;
};

Target& target(std::size_t kind) {
    static auto* all = new std::vector<std::unique_ptr<Target>>;  // never closed: what a thread keeps ends before it
    while (all->size() <= kind) all->push_back(std::make_unique<Target>(all->size()));
    return *(*all)[kind];
}

}  // namespace

// The first byte says which table, the others are the body.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size == 0) return 0;
    Target& to = target(data[0] % 16);
    // Memory of exactly that size: a read behind it is found out.
    const std::unique_ptr<std::byte[]> body(new std::byte[size - 1]);
    std::memcpy(body.get(), data + 1, size - 1);
    const std::uint64_t before = to.writer->accepted();
    try {
        const PackedRows rows({to.table->layout(), to.table->width(), kCapacity, to.table->given() != nullptr},
                              body.get(), size - 1);
        std::vector<std::uint64_t> serials(rows.rows());
        const std::uint64_t first = before - before % 3 / 2 * to.table->width();
        const std::uint64_t now = to.writer->append_once(rows.batch(), first, serials.data());
        if (now != first + rows.rows() && now != before) std::abort();
        // What was read can be packed again, and gives the same rows.
        RowPacker packer(to.table->layout());
        packer.add(rows.batch());
        const std::unique_ptr<std::byte[]> again(new std::byte[packer.bytes()]);
        packer.write(again.get());
        PackedRows({to.table->layout(), to.table->width(), kCapacity, true}, again.get(), packer.bytes());
    } catch (const Error& error) {
        if (error.kind() != ErrorKind::schema || to.writer->accepted() != before) std::abort();
    }
    return 0;
}

#if !defined(SHARPWAVE_LIBFUZZER)

namespace {

using Bytes = std::vector<std::uint8_t>;

// A body that fits the table.
Bytes whole_body(std::size_t kind, std::mt19937_64& random) {
    const Table& table = *target(kind).table;
    const std::vector<Field>& fields = table.layout().fields();
    RowPacker packer(table.layout());
    const bool is_weighted = table.given() && random() % 2;
    const bool is_stacked = random() % 2;
    for (std::uint64_t parts = random() % 3 + 1; parts--;) {
        const std::size_t rows = (random() % 4 + 1) * table.width();
        std::vector<Bytes> memory(2 * fields.size());
        std::vector<std::vector<std::uint64_t>> starts(2 * fields.size());
        std::vector<FieldInput> own, next;
        for (std::size_t f = 0; f < 2 * fields.size(); ++f) {
            const Field& field = fields[f % fields.size()];
            if (f >= fields.size() && !field.gives_next) continue;
            const std::uint32_t frames = is_stacked ? field.stack : 1;
            memory[f].assign(rows * frames * field.full_bytes, 0);
            if (random() % 2 && field.stack == 1) {
                for (std::uint8_t& byte : memory[f]) byte = random() % 2;
            }
            FieldInput input{reinterpret_cast<const std::byte*>(memory[f].data()) + (frames - 1) * field.full_bytes,
                             frames * field.full_bytes, frames};
            if (field.is_ragged) {
                starts[f] = {0};
                for (std::size_t i = 0; i < rows; ++i)
                    starts[f].push_back(starts[f].back() + random() % 4 * field.item_row_bytes());
                input = {reinterpret_cast<const std::byte*>(memory[f].data()), 0, 1, starts[f].data()};
            }
            (f < fields.size() ? own : next).push_back(input);
        }
        Bytes flags(rows);
        for (std::uint8_t& flag : flags) flag = random() % 4 ? 0 : kRowTruncated;
        const std::vector<float> priorities(rows, 0.5f);
        packer.add({own.data(), rows, random() % 2 ? flags.data() : nullptr, next.data(),
                    is_weighted ? priorities.data() : nullptr});
    }
    Bytes body(packer.bytes() + 1);
    body[0] = static_cast<std::uint8_t>(kind);
    const std::unique_ptr<std::byte[]> aligned(new std::byte[packer.bytes()]);
    packer.write(aligned.get());
    std::memcpy(body.data() + 1, aligned.get(), packer.bytes());
    return body;
}

void damage(Bytes& body, std::mt19937_64& random) {
    for (std::uint64_t changes = random() % 3 + 1; changes-- && body.size() > 1;) {
        const std::size_t at = 1 + random() % (body.size() - 1);
        const std::size_t word = 1 + (at - 1) / 4 * 4;
        switch (random() % 5) {
            case 0:
                body[at] = static_cast<std::uint8_t>(random());
                break;
            case 1:
                body[at] ^= static_cast<std::uint8_t>(1 << random() % 8);
                break;
            case 2: {  // a number of the head or of starts
                const std::uint32_t numbers[] = {0, 1, 2, 3, 8, 64, 65, 0x7fffffff, 0x80000000, 0xffffffff, 0xfffffff8};
                const std::uint32_t number = numbers[random() % std::size(numbers)];
                if (word + 4 <= body.size()) std::memcpy(body.data() + word, &number, 4);
                break;
            }
            case 3:
                body.resize(random() % 2 ? at : body.size() + random() % 24);
                break;
            default:
                body[0] = static_cast<std::uint8_t>(random());  // another table
        }
    }
}

}  // namespace

int main(int argc, char** argv) {
    std::uint64_t rounds = 100000, seed = 1;
    for (int i = 1; i + 1 < argc; i += 2) {
        const std::string name = argv[i];
        (name == "--rounds" ? rounds : seed) = std::strtoull(argv[i + 1], nullptr, 10);
    }
    std::mt19937_64 random(seed);
    std::uint64_t accepted = 0;
    for (std::uint64_t round = 0; round < rounds; ++round) {
        const std::size_t kind = random() % 16;
        Bytes body = whole_body(kind, random);
        if (round % 4) damage(body, random);
        if (round % 16 == 7) {
            body.resize(random() % 200);
            for (std::uint8_t& byte : body) byte = random() % 4 ? 0 : static_cast<std::uint8_t>(random());
        }
        const std::uint64_t before = target(kind).writer->accepted();
        LLVMFuzzerTestOneInput(body.data(), body.size());
        accepted += target(kind).writer->accepted() != before;
    }
    std::printf("%lu bodies, rows of %lu were accepted\n", static_cast<unsigned long>(rounds),
                static_cast<unsigned long>(accepted));
    return accepted * 8 < rounds;  // else it tests nothing but refusals
}

#endif
