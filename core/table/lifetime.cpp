// How a table comes to be and ends: create, attach with its checks and repairs, and the last one out.
#include <bit>
#include <cstring>
#include <filesystem>

#include "base/error.h"
#include "base/fault.h"
#include "base/process.h"
#include "storage/new_file.h"
#include "table/check.h"
#include "table/client_rows.h"
#include "table/dead_writers.h"
#include "table/geometry.h"
#include "table/recovery.h"
#include "table/table.h"

namespace sharpwave {

using namespace format;

namespace {

// The runtime region has a mutex of the C library in it: only processes with the same one may share it.
#if defined(__GLIBC__)
constexpr char kLibc[16] = "glibc";
#elif defined(__APPLE__)
constexpr char kLibc[16] = "macos";
#else
constexpr char kLibc[16] = "musl";
#endif

void remember_system(Counters& counters) {
    std::memset(counters.boot_id, 0, sizeof counters.boot_id);
    std::strncpy(counters.boot_id, boot_id().c_str(), sizeof counters.boot_id - 1);
    std::memcpy(counters.libc, kLibc, sizeof counters.libc);
}

// How long closing waits for an opener at the door before it leaves the file as after a crash.
constexpr double kLeavePatience = 2.0;

}  // namespace

Table::Table(Storage storage, RowLayout layout)
    : storage_(std::move(storage)),
      layout_(std::make_unique<RowLayout>(std::move(layout))),
      generation_(process_generation()) {
    std::byte* base = storage_.data();
    header_ = reinterpret_cast<Header*>(base);
    const auto at = [&](RegionId id) { return base + header_->regions[id].offset; };
    counters_ = reinterpret_cast<Counters*>(at(kCounters));
    writers_ = reinterpret_cast<WriterRecord*>(at(kWriters));
    blocks_ = reinterpret_cast<BlockRecord*>(at(kBlocks));
    rows_ = at(kRows);
    words_ = header_->word_is_embedded ? rows_ : at(kWords);
    word_stride_ = header_->word_is_embedded ? header_->row_bytes : 8;
    checksums_ = header_->has_checksums ? reinterpret_cast<std::uint32_t*>(at(kChecksums)) : nullptr;
    head_bits_ = static_cast<unsigned>(std::bit_width(header_->block_rows));
    by_block_ = Divider(header_->block_rows, header_->slots + header_->block_rows);
    given_ = header_->sampler == 1 ? reinterpret_cast<float*>(at(kGiven)) : nullptr;
    finals_ = layout_->gives_next() ? reinterpret_cast<std::uint64_t*>(at(kFinals)) : nullptr;
}

std::shared_ptr<Table> Table::create(const TableConfig& config, const std::string& path, bool replace) {
    RowLayout layout(config.fields);
    Header header = plan(config, layout);
    std::error_code ignored;
    if (!path.empty() && !replace && std::filesystem::exists(path, ignored)) refuse_existing(path);
    Storage storage = path.empty() ? Storage::anonymous(header.total_bytes)
                                   : Storage::create(path, header.total_bytes, sparse_offset(header));
    write_plan(storage.data(), header, config, layout);
    for (RegionId id : {kRows, kPriorities, kMutables})
        storage.advise_huge_pages(header.regions[id].offset, header.regions[id].bytes);
    std::shared_ptr<Table> table(new Table(std::move(storage), std::move(layout)));
    table->shared_lock().initialise();
    table->write_lock().initialise();
    remember_system(table->counters());
    if (path.empty()) return table;
    table->presence_ = std::make_unique<Presence>(table->storage_, table->runtime(), Deadline::in(0));
    table->presence_->sit(table->runtime());
    SHARPWAVE_FAULT(create_before_name);
    table->storage_.publish(replace);
    table->is_settled_ = true;
    table->presence_->settle();
    return table;
}

std::shared_ptr<Table> Table::attach(const std::string& path, const Opening& opening) {
    for (;;) {
        Storage storage = Storage::attach(path);
        const Header header = check_header(storage.data(), storage.bytes(), path, opening.recover);
        if (header.kind != kLive) {
            throw Error(ErrorKind::storage, "'" + path + "' is a snapshot; open it without file:// to load a copy");
        }
        const auto& runtime = *reinterpret_cast<Runtime*>(storage.data() + header.regions[kRuntime].offset);
        auto presence = std::make_unique<Presence>(storage, runtime, opening.deadline);
        if (!presence->is_named()) {  // replaced or removed during the wait
            check_interrupt();
            continue;
        }
        SHARPWAVE_FAULT(attach_at_door);
        const bool is_shorter = storage.bytes() < header.total_bytes;
        if (is_shorter && !presence->is_first()) {
            throw Error(ErrorKind::storage,
                        "'" + path + "' has lost its end while others have it open; close them first");
        }
        if (is_shorter) storage.extend(header.total_bytes);
        if (presence->is_first()) storage.fill_holes(sparse_offset(header));
        RowLayout layout = read_layout(storage.data(), header, path);
        std::shared_ptr<Table> table(new Table(std::move(storage), std::move(layout)));
        // From here on ~Table() gives the opening lock back.
        table->presence_ = std::move(presence);
        const bool is_first = table->presence_->is_first();
        const bool remakes = opening.recover && is_first && !TableCheck(*table).are_records_sane();
        if (!remakes) TableCheck(*table).check_records();
        for (RegionId id : {kRows, kMutables})
            table->storage_.advise_huge_pages(header.regions[id].offset, header.regions[id].bytes);
        if (sparse_offset(header) < header.total_bytes) table->storage_.advise_small_pages(sparse_offset(header));
        if (is_first) {
            table->look_over(opening, remakes);
        } else {
            if (std::memcmp(table->counters_->libc, kLibc, sizeof kLibc) != 0) {
                throw Error(ErrorKind::storage, "'" + path + "' is open in a process with another C library; " +
                                                    "share buffers between processes of one container image only");
            }
            table->presence_->sit(table->runtime());
        }
        table->is_settled_ = true;
        table->presence_->settle();
        DeadWriters(*table).reclaim();  // so that their episodes are over for this reader
        return table;
    }
}

// Everything but the seal that a file may be refused for: see attach().
void Table::check_rows(std::uint64_t left_as) const {
    const TableCheck check(*this);
    if (check.has_wrong_link()) {
        throw Error(ErrorKind::storage, "'" + path() + "' is damaged: its blocks contradict each other; " +
                                            "open it with recover=True to save what is whole");
    }
    if (const auto slot = check.first_damaged_slot()) {
        throw Error(ErrorKind::storage, "'" + path() + "' is damaged: the row in slot " + std::to_string(*slot) +
                                            " has a wrong checksum; open it with recover=True to save what is "
                                            "whole, or with verify=False to open it as it is");
    }
    if (left_as == kOpen && !check.are_counts_plausible()) {
        throw Error(ErrorKind::storage, "'" + path() + "' is damaged: it holds another number of rows than it " +
                                            "counted; open it with recover=True to keep those that are whole");
    }
}

void Table::look_over(const Opening& opening, bool remakes) {
    std::memset(static_cast<void*>(&runtime()), 0, sizeof(Runtime));
    shared_lock().initialise();
    write_lock().initialise();
    presence_->sit(runtime());
    const std::uint64_t left_as = counters_->clean.value.load(std::memory_order_acquire);
    const bool was_clean = left_as == kClean;
    const bool looks = opening.verify || opening.recover;
    const bool is_sealed = was_clean && (!looks || TableCheck(*this).seal() == counters_->seal.value.load());
    if (was_clean && !is_sealed && !opening.recover && opening.verify) {
        throw Error(ErrorKind::storage, "'" + path() + "' is damaged: its counts and index have a wrong checksum; " +
                                            "open it with recover=True to save what is whole");
    }
    // The same boot: the kernel kept every byte that a killed process wrote. Another: only checksums tell which pages
    // reached the disk.
    const bool was_cut_off = !was_clean && (boot_id().empty() || boot_id() != counters_->boot_id);
    if (opening.verify && !opening.recover && !was_cut_off) check_rows(left_as);
    counters_->index_origin.value.store(kNone, std::memory_order_relaxed);  // sums are made anew, not believed
    if (!was_clean || opening.recover) {
        mend(opening, remakes, was_cut_off, was_clean && !is_sealed);
    }
    remember_system(*counters_);
    counters_->clean.value.store(kOpen, std::memory_order_release);
    // Before the first row: a file that is written to never says on the disk that it was closed.
    storage_.flush(header_->regions[kCounters].offset, sizeof(Counters));
    SHARPWAVE_FAULT(attach_before_settled);
}

// After a crash, and with `recover`: what is half done is finished or dropped.
void Table::mend(const Opening& opening, bool remakes, bool was_cut_off, bool is_seal_broken) {
    Recovery recovery(*this);
    counters_->clean.value.store(kInRecovery, std::memory_order_release);  // counts mean nothing meanwhile
    const bool drops = opening.recover || (was_cut_off && opening.verify);
    // Rows that were accepted may be gone: counts of them would promise too much, and serials may be met twice. A
    // killed process alone loses nothing of that.
    if (opening.recover || was_cut_off) {
        for (std::uint64_t i = 0; i < header_->max_writers; ++i) ClientRows(writers_[i]).forget();
        counters_->incarnation.value.fetch_add(1, std::memory_order_relaxed);
    }
    if (opening.recover && is_seal_broken) recovery.forget_index();
    const std::uint64_t lost_before = counters_->rows_lost.value.load();
    const std::uint64_t counted = drops ? TableCheck(*this).rows_counted() : 0;
    std::uint64_t unnamed = 0;
    if (remakes) {
        recovery.remake_records();
        unnamed = recovery.drop_unnamed_rows();
        counters_->rows_lost.value.fetch_add(unnamed);
    }
    if (drops) {
        if (was_cut_off) recovery.choose_whole_places();
        recovery.drop_wrong_waiting();
        recovery.catch_up_with_words();
    }
    for (std::uint64_t i = 0; i < header_->max_writers; ++i) {
        if (writers_[i].owner.load()) DeadWriters(*this).settle(i);
    }
    const std::uint64_t lost = unnamed + recovery.run(drops), left = size();
    // Rows whose words are gone too are known by their number alone.
    if (counted > left + lost) counters_->rows_lost.value.fetch_add(counted - left - lost);
    counters_->recoveries.value.fetch_add(1, std::memory_order_relaxed);
    if (drops) lost_at_open_ = counters_->rows_lost.value.load() - lost_before;
}

std::vector<std::uint64_t> Table::holders(const std::string& path) {
    const Storage storage = Storage::attach(path, true);
    const Header header = check_header(storage.data(), storage.bytes(), path, true);
    if (header.kind != kLive || storage.bytes() < header.total_bytes) return {};
    return Presence::holders(storage, *reinterpret_cast<Runtime*>(storage.data() + header.regions[kRuntime].offset));
}

Table::~Table() {
    if (!presence_ || is_from_another_process() || !is_settled_) return;
    try {
        // Mostly one flush would do; the first one comes before the opening lock is taken, so no opener waits for the
        // disk.
        if (!presence_->is_named()) return;  // removed: no process opens it again
        if (presence_->is_only()) storage_.flush();
        if (!presence_->begin_leave(Deadline::in(kLeavePatience))) return;
        SHARPWAVE_FAULT(leave_at_door);
        counters_->seal.value.store(TableCheck(*this).seal());
        storage_.flush();
        SHARPWAVE_FAULT(leave_flushed);
        counters_->clean.value.store(kClean, std::memory_order_release);
        storage_.flush(header_->regions[kCounters].offset, sizeof(Counters));
    } catch (const Error&) {
        // Left unclean: the next opener looks it over as after a crash, which is always right.
    }
}

}  // namespace sharpwave
