// Opens any bytes as a file, and uses what was opened as a program would: an Error, or a table that can be read, drawn
// from, written to, saved and closed. Anything else (a signal, a sanitizer's report, another exception, a hang) is a
// defect. The entry point is libFuzzer's; driver.cpp calls it too.
#include "fuzz_open.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "batches/batch_maker.h"
#include "storage/format.h"
#include "table/snapshot.h"
#include "table/table.h"
#include "table/write_back.h"
#include "table/writer.h"

using namespace sharpwave;
using namespace sharpwave::format;

namespace {

// An honest file may ask for as much memory as there is; a fuzzer has little, and short runs.
constexpr std::uint64_t kMostSlots = 4096, kMostRowBytes = 1 << 16;

// A folder of this process's own, in memory where the system has such a place.
class Folder {
public:
    Folder() {
        std::string name = std::filesystem::is_directory("/dev/shm") ? "/dev/shm" : "/tmp";
        name += "/sharpwave-fuzz-XXXXXX";
        if (!mkdtemp(name.data())) std::abort();
        path_ = name;
    }
    ~Folder() { std::filesystem::remove_all(path_); }
    std::string file(const char* name) const { return path_ + "/" + name; }

private:
    std::string path_;
};

void write_file(const std::string& path, const std::uint8_t* data, std::size_t size) {
    std::FILE* file = std::fopen(path.c_str(), "wb");
    if (!file || std::fwrite(data, 1, size, file) != size) std::abort();
    std::fclose(file);
}

std::vector<std::uint8_t> read_file(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

// What a damaged table says to a call is no matter, as long as it says it.
template <class Call>
bool survives(Call call) {
    try {
        call();
        return true;
    } catch (const Error&) {
        return false;
    }
}

class Chooser {
public:
    explicit Chooser(std::uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15 + 1) {}
    std::uint64_t below(std::uint64_t count) {
        state_ ^= state_ << 13;
        state_ ^= state_ >> 7;
        state_ ^= state_ << 17;
        return state_ % count;
    }
    bool coin() { return below(2) == 0; }

private:
    std::uint64_t state_;
};

// Every field as the Python package gives it: the row's own value, and beside it the next one where it is derived.
ViewConfig choose_view(const Table& table, Chooser& choose) {
    const std::vector<Field>& fields = table.layout().fields();
    ViewConfig view{1, 0.9, {}};
    std::size_t reward = fields.size();
    for (std::size_t f = 0; f < fields.size(); ++f) {
        const bool is_real = fields[f].dtype == "<f4" || fields[f].dtype == "<f8";
        if (is_real && !fields[f].is_in_heap() && fields[f].stack == 1) reward = f;
    }
    if (reward < fields.size() && choose.coin()) view.n_step = 3;
    for (std::uint32_t f = 0; f < fields.size(); ++f) {
        ViewLeaf leaf{f, f == reward ? Role::reward : Role::own, f};
        if (fields[f].follows >= 0) {
            const auto older = static_cast<std::uint32_t>(fields[f].follows);
            const bool alike =
                fields[older].full_bytes == fields[f].full_bytes && fields[older].stack == fields[f].stack;
            if (alike) leaf = {f, Role::last, older};
        } else if (f != reward && fields[f].name == "done") {
            leaf.role = Role::last;
        }
        view.leaves.push_back(leaf);
    }
    for (std::uint32_t f = 0; f < fields.size(); ++f) {
        if (fields[f].gives_next) view.leaves.push_back({f, Role::next, f});
    }
    return view;
}

StartRule choose_starts(Chooser& choose) {
    StartRule rule;
    switch (choose.below(6)) {
        case 0:
            rule.needs = StartRule::Needs::end;
            break;
        case 1:
            rule.needs = StartRule::Needs::rows;
            rule.length = 3;
            break;
        case 2:
            rule.needs = StartRule::Needs::rows;
            rule.length = 2;
            rule.across = true;
            break;
        case 3:
            rule.stride = 2;
            break;
        case 4:
            rule.first_rows = true;
            rule.needs = choose.coin() ? StartRule::Needs::rows : StartRule::Needs::nothing;
            rule.length = 2;
            break;
        default:
            rule.per_episode = true;
    }
    return rule;
}

// A sampler that the table's columns were made for.
BatchConfig choose_sampler(const Table& table, Chooser& choose) {
    BatchConfig config{choose_view(table, choose)};
    config.newest = choose.below(3);
    bool wants_windows = choose.coin();
    if (table.has_index()) {
        RowIndexConfig index;
        index.max_reads = table.reads() ? 2 : choose.below(2);
        if (table.episodes()) index.starts = choose_starts(choose);
        if (table.given()) {
            index.rank_based = choose.coin();
            index.stratified = choose.coin();
            index.mix = choose.coin() ? 0.25 : 0;
            index.normalize = static_cast<Normalize>(choose.below(3));
            index.new_rows = static_cast<NewRows>(choose.below(3));
        } else {
            index.eps = 0;
            index.normalize = Normalize::none;
            index.new_rows = NewRows::constant;
            index.order = static_cast<Order>(choose.below(5));
            index.new_priority = index.order == Order::shuffle ? 0 : 1;
            index.recent = 3;
        }
        if (index.order == Order::shuffle || index.order == Order::fifo || index.order == Order::lifo)
            config.newest = 0;
        if (index.starts.needs == StartRule::Needs::end) {
            wants_windows = false;
            GoalConfig goals;
            goals.strategy = static_cast<GoalStrategy>(choose.below(3));
            goals.achieved = config.view.leaves.back();
            goals.n_step = config.view.n_step;
            goals.desired = {0};
            const std::uint64_t last = config.view.leaves.size() - 1;
            const auto bytes = [&](std::size_t leaf) {
                const Field& field = table.layout().fields()[config.view.leaves[leaf].field];
                return field.full_bytes * field.stack;
            };
            if (bytes(0) != bytes(last)) goals.desired.clear();
            config.goals = goals;
        } else if (!index.starts.is_any()) {
            wants_windows = true;
        }
        config.index = index;
        if (wants_windows) config.windows = {index.starts.length + 1, 2, 1, index.starts.across};
    } else if (wants_windows) {
        config.windows = {3, 1, 1, false};
    }
    if (config.windows && choose.coin()) {
        config.view.n_step = 1;
        for (ViewLeaf& leaf : config.view.leaves) {
            if (leaf.role == Role::last && table.layout().fields()[leaf.field].stack == 1) leaf.role = Role::own;
        }
    }
    return config;
}

// Arrays of exactly the size that a batch needs: a sanitizer sees the first byte too many.
struct Batch {
    Batch(const Table& table, BatchMaker& batches, const BatchConfig& config, std::size_t count)
        : places(config.windows ? config.windows->burn_in + config.windows->length + config.windows->bootstrap : 1),
          serials(count),
          words(count),
          weights(count),
          probabilities(count),
          discounts(count * places),
          masks(3 * count * places),
          truncated(count * places),
          relabelled(count),
          steps(count),
          place_serials(count * places) {
        for (const ViewLeaf& leaf : batches.view().config().leaves) {
            const Field& field = table.layout().fields()[leaf.field];
            values.emplace_back(count * places * batches.view().leaf_bytes(leaf));
            lengths.emplace_back(field.is_ragged ? count * places : 0);
        }
        for (auto& value : values) flats.push_back(value.data());
        for (auto& length : lengths) length_places.push_back(length.empty() ? nullptr : length.data());
        if (config.goals) {
            const std::uint64_t bytes = batches.view().leaf_bytes(config.goals->achieved);
            goals.resize(count * bytes);
            if (config.view.n_step > 1) achieved.resize(count * config.view.n_step * bytes);
        }
        const bool sums = config.view.n_step > 1;
        out = {flats.data(), length_places.data(), sums ? discounts.data() : nullptr};
        if (count % 2) out.truncated = truncated.data();
        drawn = {serials.data(), weights.data(), probabilities.data()};
        if (config.windows) {
            drawn.masks = {masks.data(), masks.data() + count * places, masks.data() + 2 * count * places,
                           count % 2 ? place_serials.data() : nullptr};
        }
        if (config.goals) {
            drawn.goals = {goals.data(), relabelled.data(), sums ? achieved.data() : nullptr,
                           sums ? steps.data() : nullptr};
        }
    }
    std::uint64_t places;
    std::vector<std::uint64_t> serials, words;
    std::vector<float> weights;
    std::vector<double> probabilities;
    std::vector<float> discounts;
    std::vector<std::uint8_t> masks, truncated, relabelled;
    std::vector<std::uint32_t> steps;
    std::vector<std::int64_t> place_serials;
    std::vector<std::vector<std::byte>> values;
    std::vector<std::vector<std::int64_t>> lengths;
    std::vector<std::int64_t*> length_places;
    std::vector<std::byte*> flats;
    std::vector<std::byte> goals, achieved;
    Outputs out{};
    BatchExtras drawn{};
};

void draw(const Table& table, BatchMaker& batches, const BatchConfig& config, std::size_t count) {
    Batch batch(table, batches, config, count);
    survives([&] {
        batches.sample(count, batch.out, batch.drawn);
        if (table.given()) batches.index()->update(batch.serials.data(), batch.weights.data(), count);
        if (batches.index() && count % 2) batches.index()->give_back(batch.serials.data(), count);
    });
}

void read_all(const Table& table, BatchMaker& batches) {
    std::vector<std::uint64_t> serials = table.live_serials();
    if (serials.empty()) return;
    const BatchConfig single{batches.view().config()};
    Batch batch(table, batches, single, serials.size());
    std::size_t skipped = 0;
    survives([&] { batches.read(serials.data(), serials.size(), batch.out, batch.words.data(), &skipped); });
}

// Rows of bytes that follow from a number; stacks are given whole, as one frame over and over.
void append(const Table& table, Writer& writer, std::size_t steps, Chooser& choose) {
    const std::vector<Field>& fields = table.layout().fields();
    const std::size_t rows = steps * table.width();
    std::vector<std::vector<std::byte>> values;
    std::vector<std::vector<std::uint64_t>> starts;
    std::vector<FieldInput> own, next;
    values.reserve(2 * fields.size());
    starts.reserve(2 * fields.size());
    const auto put = [&](const Field& field) {
        const bool is_stacked = field.stack > 1;
        const std::uint64_t row_bytes = field.full_bytes * field.stack;
        auto& bytes = values.emplace_back(rows * row_bytes);
        auto& ends = starts.emplace_back();
        for (std::size_t i = 0; i < rows; ++i) {
            std::memset(bytes.data() + i * row_bytes, static_cast<int>(choose.below(3)), row_bytes);
        }
        FieldInput input{bytes.data() + (field.stack - 1) * field.full_bytes, row_bytes, field.stack};
        if (!is_stacked) input = {bytes.data(), row_bytes};
        if (field.is_ragged) {
            ends.push_back(0);
            for (std::size_t i = 0; i < rows; ++i) {
                const std::uint64_t items = choose.below(static_cast<std::uint64_t>(field.shape[0]) + 1);
                ends.push_back(ends.back() + items * field.item_row_bytes());
            }
            input.starts = ends.data();
        }
        return input;
    };
    for (const Field& field : fields) own.push_back(put(field));
    for (const Field& field : fields) {
        if (field.gives_next) next.push_back(put(field));
    }
    std::vector<std::uint8_t> flags(rows);
    std::vector<float> priorities(rows, 2);
    for (std::uint8_t& flag : flags) flag = static_cast<std::uint8_t>(choose.below(12));
    for (std::uint8_t& flag : flags) flag = flag < 8 ? flag : 0;
    const float* given = table.given() && choose.coin() ? priorities.data() : nullptr;
    survives([&] { writer.append({own.data(), rows, flags.data(), next.data(), given}); });
}

// Zeros for every mutable field of every row.
void write_back_all(Table& table) {
    const std::vector<std::uint64_t> serials = table.live_serials();
    const std::vector<std::byte> zeros(serials.size() * table.layout().mutable_bytes());
    std::vector<FieldWrite> writes;
    for (std::size_t f = 0; f < table.layout().fields().size(); ++f) {
        if (table.layout().fields()[f].is_mutable) writes.push_back({f, zeros.data()});
    }
    if (!writes.empty()) survives([&] { write_back(table, serials.data(), serials.size(), writes, true); });
}

void use(const std::shared_ptr<Table>& table, const Folder& folder, std::uint64_t choice) {
    Chooser choose(choice);
    if (table->header().slots > kMostSlots) return;
    table->description();
    survives([&] { table->stats(); });
    const BatchConfig config = choose_sampler(*table, choose);
    std::unique_ptr<BatchMaker> batches;
    if (!survives([&] { batches = std::make_unique<BatchMaker>(table, config); })) return;
    read_all(*table, *batches);
    draw(*table, *batches, config, 3 + config.newest);
    draw(*table, *batches, config, 16);
    if (table->given()) survives([&] { batches->index()->set_alpha(0.3); });
    write_back_all(*table);
    const std::uint64_t lap = table->header().slots / table->width() + 2;
    std::unique_ptr<Writer> writer;
    if (survives([&] { writer = table->writer(); })) {
        append(*table, *writer, 1, choose);
        draw(*table, *batches, config, 5 + config.newest);
        append(*table, *writer, std::min<std::uint64_t>(lap, 5), choose);
        read_all(*table, *batches);
        for (std::uint64_t done = 0; done < std::min<std::uint64_t>(lap, 64); done += 3) {
            append(*table, *writer, 3, choose);
        }
        draw(*table, *batches, config, 16);
    }
    const std::string saved = folder.file("saved");
    const auto reload = [&] {
        std::shared_ptr<Table> copy;
        if (!survives([&] { copy = Table::load(saved); })) return;
        BatchMaker again(copy, config);
        read_all(*copy, again);
        draw(*copy, again, config, 4 + config.newest);
    };
    if (survives([&] { table->save(saved); })) {
        reload();
        // An increment of a snapshot that somebody damaged meanwhile.
        std::vector<std::uint8_t> bytes = read_file(saved);
        fuzz::mutate(bytes, choice);
        write_file(saved, bytes.data(), bytes.size());
        if (writer) append(*table, *writer, 1, choose);
        if (survives([&] { table->save(saved, true); })) reload();
        std::filesystem::remove(saved);
        std::filesystem::remove(increment_path(saved));
    }
    survives([&] { table->clear(); });
    if (writer) append(*table, *writer, 2, choose);
    draw(*table, *batches, config, 2 + config.newest);
    if (writer) survives([&] { writer->close(); });
    survives([&] { table->flush(); });
    table->close();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    static const Folder folder;
    std::uint64_t choice = 0;
    if (size >= sizeof(Header)) {
        Header header;
        std::memcpy(&header, data, sizeof header);
        const bool is_large = header.slots > kMostSlots || header.row_bytes > kMostRowBytes;
        if (std::memcmp(header.magic, kMagic, sizeof kMagic) == 0 && is_large) return 0;
        std::memcpy(&choice, header.uuid, sizeof choice);  // any number will do there
    }
    const std::string path = folder.file("table");
    const std::size_t length = fuzz::length_of_first(data, size);
    // Unverified too: what a wrong row says must not crash anything either.
    enum How { load, attach, attach_unverified };
    for (const How how : {load, attach, attach_unverified}) {
        for (const bool recover : {false, true}) {
            write_file(path, data, length);
            if (length < size) write_file(increment_path(path), data + length, size - length);
            std::shared_ptr<Table> table;
            const Table::Opening opening{recover, how == attach, Deadline::in(10)};
            if (survives([&] { table = how == load ? Table::load(path, recover) : Table::attach(path, opening); })) {
                use(table, folder, choice + recover);
            }
        }
    }
    std::filesystem::remove(increment_path(path));
    std::filesystem::remove(path);
    return 0;
}
