// What a row holds, and where in the row each field stands.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace sharpwave {

enum class Codec : std::uint32_t { none = 0, lz4 = 1, zstd = 2 };

// One leaf of a row. The engine moves bytes: `dtype` is NumPy's name of them ("<f4"), kept for whoever reads.
struct Field {
    std::string name;  // nested names joined with '/': "obs/image"
    std::string dtype;
    std::uint32_t item_bytes = 0;
    std::vector<std::int64_t> shape;
    std::uint32_t stack = 1;    // frames of a stack that batches give; the row holds one
    bool pads_zero = false;     // frames before an episode's first are zeros; otherwise the first one repeated
    Codec codec = Codec::none;  // how its bytes are kept
    bool is_ragged = false;     // shape[0] is the most; a value may have fewer items there
    int follows = -1;           // the field whose stack this one's goes on from (a stored next observation); -1: none
    bool gives_next = false;    // an observation whose next one is that of the row after (next_obs="derived")
    bool is_mutable = false;    // written back by index: its value is not in the row (table/mutable_values.h)
    std::uint64_t offset = 0;   // in the row, or among the mutable values; filled by the layout
    std::uint64_t bytes = 0;    // there; filled by the layout
    std::uint64_t full_bytes = 0;  // item_bytes times the product of shape; filled by the layout

    // Values of no fixed size stand in the heap of their block, and the row holds where.
    bool is_in_heap() const { return codec != Codec::none || is_ragged; }
    std::uint64_t item_row_bytes() const { return is_ragged ? full_bytes / static_cast<std::uint64_t>(shape[0]) : 0; }
};

// What the row holds of a value that is in the heap.
struct HeapPlace {
    std::uint64_t offset;       // of the first byte, from the heap region's start
    std::uint32_t kept_bytes;   // as they are kept
    std::uint32_t value_bytes;  // and as the user gave them; equal: kept as given
};

// Fields at fixed offsets in one record. The largest items come first, so that each field is aligned to its item
// and padding stands only at the end; among equals the smaller field. Rows are padded to 8 bytes: their word is read
// atomically.
class RowLayout {
public:
    // Rows whose payload is below this carry their word in front: it shares a cache line with the payload and costs
    // no second miss. Larger rows keep words in a column, where a scan over them touches little memory.
    static constexpr std::uint64_t kEmbeddedBelow = 1024;

    explicit RowLayout(std::vector<Field> fields);

    const std::vector<Field>& fields() const { return fields_; }
    std::uint64_t stride() const { return stride_; }
    std::uint64_t payload_offset() const { return embedded_ ? 8 : 0; }
    std::uint64_t payload_bytes() const { return payload_bytes_; }
    bool word_is_embedded() const { return embedded_; }

    std::uint32_t stack() const { return stack_; }           // the longest
    bool gives_next() const { return gives_next_; }          // next observations are derived
    bool uses_heap() const { return heap_row_bytes_ != 0; }  // apart from final observations

    // The mutable values of one row, side by side, rounded up to 8; 0: no field is mutable.
    std::uint64_t mutable_bytes() const { return mutable_bytes_; }

    // The most that one row's values take in a heap, with headers.
    std::uint64_t heap_row_bytes() const { return heap_row_bytes_; }

    // The most that one final observation takes: for each field its sizes (16 bytes) and its value, rounded up to 16.
    std::uint64_t final_bytes() const { return final_bytes_; }

    // A place in the waiting region: the row's serial (16 bytes), then for each field the same.
    std::uint64_t waiting_bytes() const { return 16 + final_bytes_; }

private:
    std::vector<Field> fields_;
    std::uint64_t stride_ = 0;
    std::uint64_t payload_bytes_ = 0;
    std::uint64_t heap_row_bytes_ = 0;
    std::uint64_t mutable_bytes_ = 0;
    std::uint64_t final_bytes_ = 0;
    std::uint32_t stack_ = 1;
    bool gives_next_ = false;
    bool embedded_ = true;
};

}  // namespace sharpwave
