#include "table/table.h"

#include <bit>
#include <cstring>
#include <filesystem>
#include <map>

#include "base/crc32c.h"
#include "base/error.h"
#include "base/fault.h"
#include "base/futex.h"
#include "base/process.h"
#include "storage/new_file.h"
#include "table/geometry.h"
#include "table/writer.h"

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
    for (RegionId id : {kRows, kPriorities})
        storage.advise_huge_pages(header.regions[id].offset, header.regions[id].bytes);
    std::shared_ptr<Table> table(new Table(std::move(storage), std::move(layout)));
    table->shared_lock().initialise();
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
        if (!presence->is_named()) {  // replaced or removed while we waited at the door
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
        // Only from here on does ~Table() leave through the door.
        table->presence_ = std::move(presence);
        const bool is_first = table->presence_->is_first();
        const bool remakes = opening.recover && is_first && !table->are_records_sane();
        if (!remakes) table->check_records();
        table->storage_.advise_huge_pages(header.regions[kRows].offset, header.regions[kRows].bytes);
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
        table->reclaim_dead_writers();  // so that their episodes are over for this reader
        return table;
    }
}

void Table::look_over(const Opening& opening, bool remakes) {
    std::memset(static_cast<void*>(&runtime()), 0, sizeof(Runtime));
    shared_lock().initialise();
    presence_->sit(runtime());
    const std::uint64_t left_as = counters_->clean.value.load(std::memory_order_acquire);
    const bool was_clean = left_as == kClean;
    const bool looks = opening.verify || opening.recover;
    const bool is_sealed = was_clean && (!looks || seal() == counters_->seal.value.load());
    if (was_clean && !is_sealed && !opening.recover && opening.verify) {
        throw Error(ErrorKind::storage, "'" + path() + "' is damaged: its counts and index have a wrong checksum; " +
                                            "open it with recover=True to save what is whole");
    }
    // The same boot: the kernel kept every byte that a killed process wrote. Another: only checksums tell which pages
    // reached the disk.
    const bool was_cut_off = !was_clean && (boot_id().empty() || boot_id() != counters_->boot_id);
    if (opening.verify && !opening.recover && !was_cut_off) {
        if (has_wrong_link()) {
            throw Error(ErrorKind::storage, "'" + path() + "' is damaged: its blocks contradict each other; " +
                                                "open it with recover=True to save what is whole");
        }
        if (const auto slot = first_damaged_slot()) {
            throw Error(ErrorKind::storage, "'" + path() + "' is damaged: the row in slot " + std::to_string(*slot) +
                                                " has a wrong checksum; open it with recover=True to save what is "
                                                "whole, or with verify=False to open it as it is");
        }
        if (left_as == kOpen && !are_counts_plausible()) {
            throw Error(ErrorKind::storage, "'" + path() + "' is damaged: it holds another number of rows than it " +
                                                "counted; open it with recover=True to keep those that are whole");
        }
    }
    counters_->index_origin.value.store(kNone, std::memory_order_relaxed);  // sums are made anew, not believed
    if (!was_clean || opening.recover) {
        counters_->clean.value.store(kInRecovery, std::memory_order_release);  // counts mean nothing meanwhile
        const bool drops = opening.recover || (was_cut_off && opening.verify);
        if (opening.recover && was_clean && !is_sealed) forget_index();
        const std::uint64_t lost_before = counters_->rows_lost.value.load();
        const std::uint64_t counted = drops ? rows_counted() : 0;
        std::uint64_t unnamed = 0;
        if (remakes) {
            remake_records();
            unnamed = drop_unnamed_rows();
            counters_->rows_lost.value.fetch_add(unnamed);
        }
        if (drops) {
            drop_wrong_waiting();
            catch_up_with_words();
        }
        for (std::uint64_t i = 0; i < header_->max_writers; ++i) {
            if (writers_[i].owner.load()) settle_writer(writers_[i]);
        }
        const std::uint64_t lost = unnamed + recover(drops), left = size();
        // Rows whose words are gone too are known by their number alone.
        if (counted > left + lost) counters_->rows_lost.value.fetch_add(counted - left - lost);
        counters_->recoveries.value.fetch_add(1, std::memory_order_relaxed);
        counters_->incarnation.value.fetch_add(1, std::memory_order_relaxed);
        if (drops) lost_at_open_ = counters_->rows_lost.value.load() - lost_before;
    }
    remember_system(*counters_);
    counters_->clean.value.store(kOpen, std::memory_order_release);
    // Before the first row: a file that is written to never says on the disk that it was closed.
    storage_.flush(header_->regions[kCounters].offset, sizeof(Counters));
    SHARPWAVE_FAULT(attach_before_settled);
}

std::vector<std::uint64_t> Table::holders(const std::string& path) {
    const Storage storage = Storage::attach(path, true);
    const Header header = check_header(storage.data(), storage.bytes(), path, true);
    if (header.kind != kLive || storage.bytes() < header.total_bytes) return {};
    return Presence::holders(storage, *reinterpret_cast<Runtime*>(storage.data() + header.regions[kRuntime].offset));
}

// How long closing waits for an opener at the door before it leaves the file as after a crash.
constexpr double kLeavePatience = 2.0;

Table::~Table() {
    if (!presence_ || is_from_another_process() || !is_settled_) return;
    try {
        // Mostly one flush would do; the first one is outside the door, where nobody waits for the disk.
        if (!presence_->is_named()) return;  // removed: nobody opens it again
        if (presence_->is_only()) storage_.flush();
        if (!presence_->begin_leave(Deadline::in(kLeavePatience))) return;
        SHARPWAVE_FAULT(leave_at_door);
        counters_->seal.value.store(seal());
        storage_.flush();
        SHARPWAVE_FAULT(leave_flushed);
        counters_->clean.value.store(kClean, std::memory_order_release);
        storage_.flush(header_->regions[kCounters].offset, sizeof(Counters));
    } catch (const Error&) {
        // Left unclean: the next opener looks it over as after a crash, which is always right.
    }
}

void Table::refuse() const {
    if (is_closed()) throw Error(ErrorKind::closed, "the buffer is closed");
    const std::string mend = storage_.is_file() ? "open it again in this process with sharpwave.open()"
                                                : "give storage=\"shm://name\" to share a buffer between processes";
    throw Error(ErrorKind::closed, "the buffer was opened by the parent process of this one; " + mend);
}

Table::IndexLock::IndexLock(const Table& table, Deadline deadline) : table_(table) {
    SharedLock::Taken taken = table.shared_lock().take(0, table.presence_.get());
    if (taken == SharedLock::Taken::no) [[unlikely]]
        taken = wait(deadline);
    if (taken == SharedLock::Taken::after_death) {
        table.counters_->index_takeovers.value.fetch_add(1, std::memory_order_relaxed);
        table.counters_->index_origin.value.store(kNone, std::memory_order_relaxed);
    }
    SHARPWAVE_FAULT(index_locked);
}

SharedLock::Taken Table::IndexLock::wait(Deadline deadline) {
    yield_.begin();
    const Deadline until = deadline.at_least(kLockGrace);
    SharedLock& lock = table_.shared_lock();
    for (;;) {
        const SharedLock::Taken taken = lock.take(std::min(until.left_s(), kWaitSlice), table_.presence_.get());
        if (taken != SharedLock::Taken::no) return taken;
        if (until.is_over()) break;
        check_interrupt();
    }
    throw Error(ErrorKind::not_ready, "the buffer's index is held by process " + std::to_string(lock.owner_pid.load()) +
                                          ", which did not let go of it before the timeout; is that process stopped?");
}

Table::IndexLock::~IndexLock() { table_.shared_lock().unlock(table_.presence_.get()); }

Table::AddHold::AddHold(const Table& table, double seconds)
    : table_(table), until_(steady_ns() + static_cast<std::uint64_t>(seconds * 1e9)) {
    Hold& hold = table.hold();
    hold.seat.store(table.seat(), std::memory_order_relaxed);
    hold.tag.store(table.tag(), std::memory_order_relaxed);
    hold.until.store(until_, std::memory_order_release);
}

Table::AddHold::~AddHold() {
    Hold& hold = table_.hold();
    // Another saver may have begun a hold since: that one is not ours to end.
    if (!hold.until.compare_exchange_strong(until_, 0, std::memory_order_acq_rel)) return;
    hold.changes.fetch_add(1, std::memory_order_release);
    wake_all(hold.changes);
}

bool Table::wait_while_held(Deadline deadline, bool is_interruptible) const {
    constexpr double kLook = 5e-3;  // seconds between looks whether the holder still lives
    Hold& hold = this->hold();
    for (double since_check = 0;;) {
        const std::uint32_t seen = hold.changes.load(std::memory_order_acquire);
        std::uint64_t until = hold.until.load(std::memory_order_acquire);
        const std::uint64_t now = steady_ns();
        if (until == 0) return true;
        const bool is_over = until <= now || !is_alive(hold.seat.load(std::memory_order_relaxed),
                                                       hold.tag.load(std::memory_order_relaxed));
        if (is_over) {
            hold.until.compare_exchange_strong(until, 0, std::memory_order_acq_rel);
            continue;
        }
        if (deadline.is_over()) return false;
        const double left = std::min({kLook, static_cast<double>(until - now) * 1e-9, deadline.left_s()});
        wait_for_change(hold.changes, seen, left);
        since_check += left;
        if (is_interruptible && since_check >= kWaitSlice) {
            since_check = 0;
            check_interrupt();
        }
    }
}

std::string Table::description() const {
    const Region& region = header_->regions[kDescription];
    return std::string(reinterpret_cast<const char*>(storage_.data() + region.offset), region.bytes);
}

std::uint64_t Table::size() const {
    const std::uint64_t origin = counters_->origin_ticket.value.load(std::memory_order_acquire);
    const std::uint64_t used = counters_->writers_used.value.load(std::memory_order_acquire);
    std::int64_t live = 0;
    for (std::uint64_t i = 0; i < used; ++i) {
        if (writers_[i].origin.load(std::memory_order_acquire) == origin) {
            live += writers_[i].live.load(std::memory_order_relaxed);
        }
    }
    return live > 0 ? static_cast<std::uint64_t>(live) : 0;
}

std::uint64_t Table::visible_slots() const {
    const std::uint64_t origin = counters_->origin_ticket.value.load(std::memory_order_acquire);
    const std::uint64_t next = counters_->next_ticket.value.load(std::memory_order_acquire);
    if (next > origin && next - origin > header_->blocks) return header_->slots;
    const std::uint64_t used = counters_->writers_used.value.load(std::memory_order_acquire);
    std::uint64_t reach = 0;
    for (std::uint64_t i = 0; i < used; ++i) {
        const auto [ticket, head] = position(i);
        if (ticket == kNone || ticket < origin) continue;
        reach = std::max(reach, (ticket - origin) * header_->block_rows + head);
    }
    return std::min(reach, header_->slots);
}

bool Table::is_worth_filling(const Position& position) const {
    if (position.ticket == kNone || position.head >= block_length(position.ticket % header_->blocks)) return false;
    const std::uint64_t next = counters_->next_ticket.value.load(std::memory_order_acquire);
    const std::uint64_t origin = counters_->origin_ticket.value.load(std::memory_order_acquire);
    const std::uint64_t writers = counters_->writers_used.value.load(std::memory_order_acquire);
    return position.ticket >= origin && next - position.ticket <= writers;
}

std::unique_ptr<Writer> Table::writer() {
    check_open();
    reclaim_dead_writers();
    const std::uint64_t me = owner_word(seat(), tag());
    // Records with a half-full block first, then any.
    for (const bool choosy : {true, false}) {
        for (std::uint64_t i = 0; i < header_->max_writers; ++i) {
            if (choosy && !is_worth_filling(position(i))) continue;
            std::uint64_t nobody = 0;
            if (!writers_[i].owner.compare_exchange_strong(nobody, me, std::memory_order_acq_rel)) continue;
            SHARPWAVE_FAULT(writer_taken);
            std::uint64_t used = counters_->writers_used.value.load(std::memory_order_relaxed);
            while (used < i + 1 && !counters_->writers_used.value.compare_exchange_weak(used, i + 1)) {
            }
            try {
                return std::make_unique<Writer>(shared_from_this(), i);
            } catch (...) {
                writers_[i].owner.store(0, std::memory_order_release);
                throw;
            }
        }
    }
    std::map<std::uint64_t, int> holders;  // by process id, 0 for those whose process is gone
    for (std::uint64_t i = 0; i < header_->max_writers; ++i) {
        const std::uint64_t owner = writers_[i].owner.load();
        const bool is_parked = owner_seat(owner) >= kSeats;
        ++holders[!presence_ ? process_id() : is_parked ? 0 : runtime().seats[owner_seat(owner)].pid.load()];
    }
    std::string who;
    for (const auto& [pid, count] : holders) {
        who += (who.empty() ? "" : ", ") + std::to_string(count) +
               (pid ? " by process " + std::to_string(pid)
                    : " by closed writers whose last observations need disk or shared-memory space; free some");
        if (pid == process_id()) who += " (this one)";
    }
    throw Error(ErrorKind::buffer_full, "writer(): all " + std::to_string(header_->max_writers) +
                                            " writers are taken; close one, or give writers= a larger number; held " +
                                            who);
}

bool Table::far_successor(std::uint64_t& slot, std::uint64_t& seen, bool across) const {
    if (!across && (seen & kEndMask)) return false;
    const std::uint64_t width = header_->width, rows = header_->block_rows;
    std::uint64_t serial = serial_of(seen), at = slot;
    for (;;) {
        const std::uint64_t block = block_of(at), offset = at - block * rows;
        if (offset + width < block_length(block)) {
            serial += width;
            at += width;
        } else {
            const BlockRecord& record = blocks_[block];
            const std::uint64_t lap = serial / rows;
            if (record.linked_ticket.load(std::memory_order_acquire) != lap) return false;
            const std::uint64_t ticket = record.next_ticket.load(std::memory_order_acquire);
            if (record.linked_ticket.load(std::memory_order_relaxed) != lap || ticket == kNone) return false;
            if (ticket <= lap || ticket > kMaxSerial / rows) return false;  // a damaged file: no circles
            serial = ticket * rows + offset % width;
            at = slot_of(serial);
            if (at >= header_->slots) return false;
        }
        const std::uint64_t word = std::atomic_ref<std::uint64_t>(this->word(at)).load(std::memory_order_acquire);
        if (serial_of(word) != serial) return false;
        if (state_of(word) == kVoid) continue;
        if (state_of(word) != kCommitted || (!across && (word & kEpisodeStart))) return false;
        seen = word;
        slot = at;
        return true;
    }
}

bool Table::predecessor(std::uint64_t& slot, std::uint64_t& seen, bool& gone, bool across) const {
    gone = false;
    if (!across && (seen & kEpisodeStart)) return false;
    gone = true;
    const std::uint64_t width = header_->width, rows = header_->block_rows, least = least_word();
    std::uint64_t serial = serial_of(seen), at = slot;
    for (;;) {
        const std::uint64_t block = block_of(at), offset = at - block * rows;
        if (offset >= width) {
            serial -= width;
            at -= width;
        } else {
            const BlockRecord& record = blocks_[block];
            const std::uint64_t lap = serial / rows;
            if (record.ticket.load(std::memory_order_acquire) != lap) return false;
            const std::uint64_t ticket = record.previous_ticket.load(std::memory_order_acquire);
            if (record.ticket.load(std::memory_order_relaxed) != lap || ticket == kNone) return false;
            if (ticket >= lap) return false;  // a damaged file: no circles
            serial = ticket * rows + block_length(ticket % header_->blocks) - width + offset % width;
            at = slot_of(serial);
            if (at >= header_->slots) return false;
        }
        const std::uint64_t word = std::atomic_ref<std::uint64_t>(this->word(at)).load(std::memory_order_acquire);
        if (serial_of(word) != serial || word < least) return false;
        if (state_of(word) == kVoid) continue;
        if (state_of(word) != kCommitted) return false;
        seen = word;
        slot = at;
        gone = false;
        return true;
    }
}

// A live row less, which `by` took out.
void Table::take_off(std::uint64_t block, WriterRecord& by) const {
    mark_uneven(block);
    mark_changed(block);
    blocks_[block].live.fetch_sub(1, std::memory_order_relaxed);
    // Its owner may have died while it counted: whoever settles that must not take the row off twice.
    const std::uint32_t owner = blocks_[block].owner.load(std::memory_order_relaxed);
    if (owner && owner <= header_->max_writers && writers_[owner - 1].settling.load() == block + 1)
        writers_[owner - 1].settled_block.fetch_sub(1, std::memory_order_relaxed);
    SHARPWAVE_FAULT(retired_uncounted);
    by.gone.store(by.gone_then.load(std::memory_order_relaxed), std::memory_order_release);
}

// Says which row is about to be taken out, and what the count will be then: see finish_retiring().
class Table::Retiring {
public:
    Retiring(WriterRecord& by, std::uint64_t serial) : by_(by) {
        by.gone_then.store(by.gone.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
        by.retiring.store(serial + 1, std::memory_order_release);
    }
    ~Retiring() { by_.retiring.store(0, std::memory_order_release); }
    Retiring(const Retiring&) = delete;
    Retiring& operator=(const Retiring&) = delete;

private:
    WriterRecord& by_;
};

bool Table::retire(std::uint64_t slot, std::uint64_t named, std::uint64_t least, WriterRecord& by) const {
    std::atomic_ref<std::uint64_t> seen(word(slot));
    std::uint64_t now = seen.load(std::memory_order_relaxed);
    if (!is_live(now, least) || serial_of(now) != serial_of(named)) return false;
    const Retiring retiring(by, serial_of(named));
    while (is_live(now, least) && serial_of(now) == serial_of(named)) {
        if (!seen.compare_exchange_weak(now, now | kRetired, std::memory_order_relaxed)) continue;
        take_off(block_of(slot), by);
        return true;
    }
    return false;
}

std::int64_t Table::lose(std::uint64_t serial, WriterRecord& by) const {
    const std::uint64_t slot = slot_of(serial), least = least_word();
    if (slot >= header_->slots) return 0;
    std::atomic_ref<std::uint64_t> seen(word(slot));
    std::uint64_t now = seen.load(std::memory_order_relaxed);
    std::int64_t gone = 0;
    std::uint64_t neighbour = now, place = slot;
    if (serial_of(now) != serial || state_of(now) != kCommitted) return 0;
    for (std::uint32_t k = 1; k < layout_->stack(); ++k) {
        if (!successor(place, neighbour)) break;
        gone += retire(place, neighbour, least, by);
    }
    const Retiring retiring(by, serial);
    while (serial_of(now) == serial && state_of(now) == kCommitted) {
        if (!seen.compare_exchange_weak(now, make_word(serial, 0, kEmpty), std::memory_order_relaxed)) continue;
        if (is_live(now, least)) {
            take_off(block_of(slot), by);
            ++gone;
        }
        break;
    }
    return gone;
}

std::vector<std::uint64_t> Table::live_serials() const {
    std::vector<std::uint64_t> serials;
    serials.reserve(std::min(size(), header_->slots));
    const std::uint64_t least = least_word(), reach = visible_slots();
    for (std::uint64_t slot = 0; slot < reach; ++slot) {
        const std::uint64_t seen = std::atomic_ref<std::uint64_t>(word(slot)).load(std::memory_order_acquire);
        if (is_live(seen, least)) serials.push_back(serial_of(seen));
    }
    // One writer's ring is sorted but for one turn.
    const auto turn = std::is_sorted_until(serials.begin(), serials.end());
    std::rotate(serials.begin(), turn, serials.end());
    if (!std::is_sorted(serials.begin(), serials.end())) std::sort(serials.begin(), serials.end());
    return serials;
}

std::uint64_t Table::live_in_block(std::uint64_t block) const {
    const std::uint64_t origin = counters_->origin_ticket.value.load(std::memory_order_acquire);
    const std::uint64_t ticket = blocks_[block].ticket.load(std::memory_order_acquire);
    if (ticket == kNone || ticket < origin) return 0;
    return blocks_[block].live.load(std::memory_order_relaxed);
}

std::optional<std::uint64_t> Table::nth_live_slot(std::uint64_t block, std::uint64_t k) const {
    const std::uint64_t least = least_word();
    const std::uint64_t begin = block * header_->block_rows;
    for (std::uint64_t slot = begin; slot < begin + block_length(block); ++slot) {
        const std::uint64_t seen = std::atomic_ref<std::uint64_t>(word(slot)).load(std::memory_order_acquire);
        if (is_live(seen, least) && k-- == 0) return slot;
    }
    return std::nullopt;
}

// One store clears everything: rows below the origin are no more, and whatever else depends on a clear (counts of
// writers, the index, the pace) says which origin it is for. The next ticket follows; where this process dies before,
// the next claim moves it.
void Table::clear() {
    check_open();
    const std::uint64_t next = counters_->next_ticket.value.load(std::memory_order_acquire);
    const std::uint64_t aligned = (next + header_->blocks - 1) / header_->blocks * header_->blocks;
    raise(counters_->origin_ticket, aligned);  // never back: of two clears at once the later one holds
    SHARPWAVE_FAULT(clear_origin);
    raise(counters_->next_ticket, aligned);
    SHARPWAVE_FAULT(clear_ticket);
}

std::uint32_t Table::row_checksum(std::uint64_t slot, std::uint64_t word) const {
    const std::uint64_t lasting = lasting_part(word);
    std::uint32_t crc = crc32c(0, &lasting, sizeof lasting);
    if (state_of(word) == kVoid) return crc;  // its bytes mean nothing
    const std::byte* row = rows_ + slot * header_->row_bytes + header_->payload_offset;
    crc = crc32c(crc, row, layout_->payload_bytes());
    for (const Field& field : layout_->fields()) {
        if (!field.is_in_heap()) continue;
        HeapPlace place;
        std::memcpy(&place, row - header_->payload_offset + field.offset, sizeof place);
        const std::uint64_t room = header_->regions[kHeap].bytes;
        if (place.offset > room || place.kept_bytes > room - place.offset) return ~crc;
        crc = crc32c(crc, region(kHeap) + place.offset, place.kept_bytes);
    }
    return crc;
}

TableStats Table::stats() const {
    check_open();
    reclaim_dead_writers();
    TableStats stats{};
    stats.size = size();
    stats.capacity = header_->capacity;
    const std::uint64_t used = counters_->writers_used.value.load(std::memory_order_acquire);
    for (std::uint64_t i = 0; i < used; ++i) {
        stats.rows_added += writers_[i].added.load(std::memory_order_relaxed);
        stats.rows_voided += writers_[i].voided.load(std::memory_order_relaxed);
        stats.episodes += writers_[i].episodes.load(std::memory_order_relaxed);
        stats.writers_taken += writers_[i].owner.load(std::memory_order_relaxed) != 0;
    }
    stats.rows_sampled = counters_->rows_sampled.value.load(std::memory_order_relaxed);
    stats.sample_calls = counters_->call_number.value.load(std::memory_order_relaxed);
    stats.redraws = counters_->redraws.value.load(std::memory_order_relaxed);
    stats.max_writers = header_->max_writers;
    stats.blocks = header_->blocks;
    stats.block_rows = header_->block_rows;
    stats.row_bytes = header_->row_bytes;
    for (const Field& field : layout_->fields()) stats.payload_bytes += field.bytes;
    stats.storage_bytes = storage_.bytes();
    stats.huge_page_bytes = storage_.huge_page_bytes();
    stats.incarnation = counters_->incarnation.value.load(std::memory_order_relaxed);
    stats.recoveries = counters_->recoveries.value.load(std::memory_order_relaxed);
    stats.writers_reclaimed = counters_->writers_reclaimed.value.load(std::memory_order_relaxed);
    stats.index_takeovers = counters_->index_takeovers.value.load(std::memory_order_relaxed);
    stats.rows_lost = counters_->rows_lost.value.load(std::memory_order_relaxed);
    stats.seed = header_->seed;
    stats.resets_unflagged = counters_->resets_unflagged.value.load(std::memory_order_relaxed);
    stats.rows_retired = counters_->rows_retired.value.load(std::memory_order_relaxed);
    stats.shuffle_epoch = counters_->shuffle_epoch.value.load(std::memory_order_relaxed);
    stats.rows_consumed = counters_->rows_consumed.value.load(std::memory_order_relaxed);
    stats.updates_applied = counters_->updates_applied.value.load(std::memory_order_relaxed);
    stats.updates_stale = counters_->updates_stale.value.load(std::memory_order_relaxed);
    for (std::uint64_t b = 0; header_->block_heap_bytes && b < header_->blocks; ++b) {
        stats.heap_bytes += blocks_[b].heap_used.load(std::memory_order_relaxed);
    }
    stats.copy_kernel = kernels().name;
    return stats;
}

}  // namespace sharpwave
