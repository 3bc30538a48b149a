// What a row holds, and where in the row each field stands.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace sharpwave {

// One leaf of a row. The engine moves bytes: `dtype` is NumPy's name of them ("<f4"), kept for whoever reads.
struct Field {
    std::string name;  // nested names joined with '/': "obs/image"
    std::string dtype;
    std::uint32_t item_bytes = 0;
    std::vector<std::int64_t> shape;
    std::uint64_t offset = 0;  // in the row; filled by the layout
    std::uint64_t bytes = 0;   // item_bytes times the product of shape; filled by the layout
};

// Fields at fixed offsets in one record. The largest items come first, so that each field is aligned to its item
// and padding stands only at the end. Rows are padded to 8 bytes: their word is read atomically.
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

private:
    std::vector<Field> fields_;
    std::uint64_t stride_ = 0;
    std::uint64_t payload_bytes_ = 0;
    bool embedded_ = true;
};

}  // namespace sharpwave
