// A buffer that a Python or a C++ process made, from C++: its fields by name, its draws those of Python.
//
//     sharpwave::Buffer buffer = sharpwave::open("shm://replay");
//     buffer.add({{"obs", obs}, {"action", action}, {"reward", 1.0f}, {"next_obs", next_obs}, {"done", false}});
//     sharpwave::Batch batch = buffer.sample(32);
//     std::span<const float> obs = batch.get<float>("obs");  // 32 observations, one after the other
//
// A Buffer is a handle: copies share it, and every method may be called from any thread. Failures are sharpwave::Error,
// whose kind() says which; a call that fails has changed nothing. Link against the CMake target sharpwave::core.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <ranges>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "sharpwave/batch.h"
#include "sharpwave/value.h"

namespace sharpwave {

class BufferRows;

struct OpenOptions {
    bool wait = false;  // for the buffer to be created
    std::optional<double> timeout_s =
        {};                 // seconds; nothing waits, 0 tries once: for the creator, and for other openers
    bool recover = false;   // opens a damaged file too, without the rows that the damage hit
    bool verify = true;     // compares the rows of a file with their checksums, if no other process has it open
    std::string keys = {};  // a server with keys: the path of this client's key file
};

// A field as add() and batches name it: "obs", or "obs/image" where observations are nested.
struct FieldInfo {
    std::string name;
    std::string dtype;                // NumPy's: "<f4"
    std::vector<std::int64_t> shape;  // of one row; of a ragged field the first is the most that a value may have
    std::uint32_t stack = 1;          // frames that batches have of it; an add brings the newest, or all
    bool is_ragged = false;
};

struct Updated {
    std::uint64_t applied = 0;  // rows that have their new priority
    std::uint64_t stale = 0;    // rows that had been overwritten
};

class Buffer {
public:
    explicit Buffer(std::shared_ptr<BufferRows> rows);  // see open()

    // Rows by field, all fields of the schema. The number of rows follows from the sizes; with num_envs the rows of a
    // step stand side by side. Returns when every row is committed. Besides the fields, as in Python: "terminated" for
    // "done", "truncated" and "mask" (truth values, one a row), "priority" (one number a row, drawn by priority only).
    // Where a pace makes it wait, it waits `timeout_s` at most: then ErrorKind::not_ready.
    //
    // All calls on one Buffer are one stream of rows, its threads take turns. For a second stream (another actor's
    // episodes) open the address again.
    void add(std::initializer_list<Given> values, std::optional<double> timeout_s = std::nullopt) {
        add_given({values.begin(), values.size()}, timeout_s);
    }
    template <std::ranges::contiguous_range Values>
        requires std::same_as<std::ranges::range_value_t<Values>, Given>
    void add(const Values& values, std::optional<double> timeout_s = std::nullopt) {
        add_given({std::ranges::data(values), std::ranges::size(values)}, timeout_s);
    }

    // Draws a batch as Python's sample() does: the same seed and the same order of calls give the same rows.
    // An empty buffer is ErrorKind::not_ready.
    Batch sample(std::size_t examples, std::optional<double> timeout_s = std::nullopt);

    // Memory for a batch, not filled; and the same draw into it, without an allocation. A batch that another buffer
    // made is ErrorKind::schema.
    Batch batch(std::size_t examples) const;
    void sample_into(Batch& batch, std::optional<double> timeout_s = std::nullopt);

    // New priorities by magnitude: TD errors as they are. A number that is not finite is refused, and nothing changes.
    Updated update_priorities(std::span<const std::int64_t> indices, std::span<const float> priorities,
                              std::optional<double> timeout_s = std::nullopt);

    std::size_t size() const;
    std::size_t capacity() const;
    const std::vector<FieldInfo>& fields() const;
    std::optional<std::size_t> num_envs() const;
    const std::string& address() const;
    std::map<std::string, double> stats() const;  // the numbers of Python's stats()
    void clear();
    void flush();  // a file: to the disk

    // Ends open episodes as truncated. From then on calls fail; a second close() does nothing. The last copy of a
    // Buffer closes it too.
    void close();

private:
    void add_given(std::span<const Given> values, std::optional<double> timeout_s);
    std::shared_ptr<BufferRows> rows_;
};

// Attaches to a buffer in place: "shm://name", "file://path". An address of another kind needs another component:
// "tcp://host:port/name" and "ipc://path/name" the CMake target sharpwave::net.
Buffer open(const std::string& address, const OpenOptions& options = {});

}  // namespace sharpwave
