#include "table/packed_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "base/error.h"
#include "base/wide.h"

namespace sharpwave {

namespace {

enum BodyBit : std::uint32_t { kHasFlags = 1, kHasPriorities = 2 };
constexpr std::uint8_t kGivenFlags = kRowTruncated | kRowVoid | kRowCut;
constexpr std::uint64_t kMostRows = ~std::uint32_t{0};
constexpr std::uint64_t kKeptBytes = 1 << 20;  // of one section, from one body to the next

std::uint64_t padded(std::uint64_t bytes) { return (bytes + 7) / 8 * 8; }

[[noreturn]] void refuse(const std::string& what, const std::string& expected, const std::string& got) {
    throw Error(ErrorKind::schema, "packed rows: " + what + ": expected " + expected + ", got " + got);
}
[[noreturn]] void refuse(const std::string& what, const std::string& expected, std::uint64_t got) {
    refuse(what, expected, std::to_string(got));
}

// What is read, for messages: most bodies need none.
struct Part {
    const char* name;
    const Field* field = nullptr;
    std::string text(const std::string& more = "") const {
        return name + (field ? " '" + field->name + "'" : std::string()) + more;
    }
};

std::string row_text(std::uint64_t row) { return ", row " + std::to_string(row); }

// Goes through a body section by section; no section is given out that does not lie in it.
class Sections {
public:
    Sections(const std::byte* body, std::uint64_t bytes) : at_(body), left_(bytes) {}

    // `count` items of so many bytes, and the padding behind them.
    const std::byte* take(const Part& part, std::uint64_t count, std::uint64_t item_bytes) {
        const Wide bytes = static_cast<Wide>(count) * item_bytes, whole = (bytes + 7) / 8 * 8;
        if (whole > left_) {
            const auto needed = static_cast<std::uint64_t>(std::min<Wide>(bytes, ~std::uint64_t{0}));
            refuse(part.text(), std::to_string(needed) + " bytes and padding to a multiple of 8",
                   std::to_string(left_) + " bytes to the end of the body");
        }
        const std::byte* section = at_;
        at_ += static_cast<std::uint64_t>(whole);
        left_ -= static_cast<std::uint64_t>(whole);
        return section;
    }
    std::uint64_t left() const { return left_; }

private:
    const std::byte* at_;
    std::uint64_t left_;
};

std::uint32_t number_at(const std::byte* place) {
    std::uint32_t number;
    std::memcpy(&number, place, sizeof number);
    return number;
}

void check_truths(const Part& part, const std::byte* values, std::uint64_t bytes) {
    if (part.field->dtype != "|b1") return;
    const auto* wrong = std::find_if(values, values + bytes, [](std::byte item) { return item > std::byte{1}; });
    if (wrong != values + bytes)
        refuse(part.text(), "0 or 1 for a truth value", std::to_integer<std::uint64_t>(*wrong));
}

FieldInput read_ragged(const Part& part, std::uint64_t rows, Sections& body) {
    const auto* starts = reinterpret_cast<const std::uint64_t*>(body.take(part, rows + 1, 8));
    const std::uint64_t item_bytes = part.field->item_row_bytes(), most = part.field->full_bytes;
    if (starts[0] != 0) refuse(part.text(", start of row 0"), "0", starts[0]);
    for (std::uint64_t i = 0; i < rows; ++i) {
        if (starts[i + 1] < starts[i]) {
            refuse(part.text(row_text(i) + ", end"), "at least its start " + std::to_string(starts[i]), starts[i + 1]);
        }
        const std::uint64_t bytes = starts[i + 1] - starts[i];
        if (bytes > most) refuse(part.text(row_text(i)), "at most " + std::to_string(most) + " bytes", bytes);
        if (bytes % item_bytes != 0)
            refuse(part.text(row_text(i)), "a multiple of " + std::to_string(item_bytes) + " bytes", bytes);
    }
    const std::byte* values = body.take(part, starts[rows], 1);
    check_truths(part, values, starts[rows]);
    return {values, 0, 1, starts};
}

FieldInput read_fixed(const Part& part, std::uint64_t rows, Sections& body) {
    const Field& field = *part.field;
    const std::byte* head = body.take(part, 1, 8);
    const std::uint32_t frames = number_at(head);
    if (frames != 1 && frames != field.stack)
        refuse(part.text(", frames"), field.stack > 1 ? "1 or " + std::to_string(field.stack) : "1", frames);
    if (number_at(head + 4) != 0) refuse(part.text(", reserved number"), "0", number_at(head + 4));
    const std::uint64_t row_bytes = field.full_bytes * frames;  // below 2^48: see RowLayout
    const std::byte* values = body.take(part, rows, row_bytes);
    check_truths(part, values, rows * row_bytes);
    return {values + (frames - 1) * field.full_bytes, row_bytes, frames, nullptr};
}

FieldInput read_input(const Part& part, std::uint64_t rows, Sections& body) {
    return part.field->is_ragged ? read_ragged(part, rows, body) : read_fixed(part, rows, body);
}

}  // namespace

PackedRows::PackedRows(const PackedShape& shape, const std::byte* body, std::uint64_t bytes) {
    Sections sections(body, bytes);
    const std::byte* head = sections.take({"rows"}, 1, 8);
    rows_ = number_at(head);
    const std::uint32_t bits = number_at(head + 4);
    if (rows_ == 0 || rows_ > shape.capacity) refuse("rows", "1 to " + std::to_string(shape.capacity), rows_);
    if (rows_ % shape.width != 0) refuse("rows", "a multiple of " + std::to_string(shape.width), rows_);
    if (bits & ~(std::uint32_t{kHasFlags} | kHasPriorities)) refuse("bits", "0 to 3", bits);
    if ((bits & kHasPriorities) && !shape.has_priorities)
        refuse("bits", "no priorities, because rows are not drawn by priority", bits);
    if (bits & kHasFlags) {
        flags_ = reinterpret_cast<const std::uint8_t*>(sections.take({"flags"}, rows_, 1));
        for (std::size_t i = 0; i < rows_; ++i) {
            if (flags_[i] & ~kGivenFlags)
                refuse("flags of row " + std::to_string(i), "bits of " + std::to_string(kGivenFlags), flags_[i]);
        }
    }
    if (bits & kHasPriorities) {
        priorities_ = reinterpret_cast<const float*>(sections.take({"priorities"}, rows_, 4));
        for (std::size_t i = 0; i < rows_; ++i) {
            if (!(priorities_[i] >= 0) || std::isinf(priorities_[i]))
                refuse("priority of row " + std::to_string(i), "a finite number, at least 0",
                       std::to_string(priorities_[i]));
        }
    }
    fields_.reserve(shape.layout.fields().size());
    for (const Field& field : shape.layout.fields()) fields_.push_back(read_input({"field", &field}, rows_, sections));
    for (const Field& field : shape.layout.fields()) {
        if (field.gives_next) next_.push_back(read_input({"next value of field", &field}, rows_, sections));
    }
    if (sections.left() != 0) refuse("end", "no bytes behind the last section", sections.left());
}

// ---- writing --------------------------------------------------------------------------------------------------------

void RowPacker::Section::grow(std::uint64_t more) {
    const std::uint64_t room = std::max<std::uint64_t>({256, 2 * room_, used_ + more});
    std::unique_ptr<std::byte[]> larger(new std::byte[room]);
    if (used_) std::memcpy(larger.get(), data_.get(), used_);
    data_ = std::move(larger);
    room_ = room;
}

void RowPacker::Section::clear() {
    used_ = 0;
    if (room_ <= kKeptBytes) return;
    data_.reset();
    room_ = 0;
}

RowPacker::RowPacker(const RowLayout& layout) {
    for (const Field& field : layout.fields()) {
        fields_.push_back({field.full_bytes, field.is_ragged, 1, {}, {}});
        if (field.gives_next) next_.push_back({field.full_bytes, field.is_ragged, 1, {}, {}});
    }
}

bool RowPacker::fits(const RowBatch& batch) const {
    if (rows_ == 0) return true;
    if ((batch.priorities != nullptr) != has_priorities_ || rows_ + batch.rows > kMostRows) return false;
    bool is_same = true;
    for (std::size_t f = 0; f < fields_.size(); ++f) is_same &= fields_[f].frames == batch.fields[f].frames;
    for (std::size_t f = 0; f < next_.size(); ++f) is_same &= next_[f].frames == batch.next[f].frames;
    return is_same;
}

std::uint64_t RowPacker::added_bytes(const Column& column, const FieldInput& input, std::uint64_t rows) {
    if (column.is_ragged) return input.starts[rows] - input.starts[0];
    return rows * input.frames * column.frame_bytes;
}

void RowPacker::append(Column& column, const FieldInput& input, std::uint64_t rows) {
    column.frames = input.frames;
    const std::uint64_t bytes = added_bytes(column, input, rows), before = column.values.bytes();
    std::byte* to = column.values.append(bytes);
    if (column.is_ragged) {
        if (bytes) std::memcpy(to, input.flat + input.starts[0], bytes);
        for (std::uint64_t i = 1; i <= rows; ++i) {
            const std::uint64_t end = before + input.starts[i] - input.starts[0];
            std::memcpy(column.starts.append(sizeof end), &end, sizeof end);
        }
        return;
    }
    const std::uint64_t row_bytes = input.frames * column.frame_bytes;
    const std::byte* oldest = input.flat - (input.frames - 1) * column.frame_bytes;
    if (rows == 1 || input.stride == row_bytes) {
        std::memcpy(to, oldest, bytes);
        return;
    }
    for (std::uint64_t i = 0; i < rows; ++i) std::memcpy(to + i * row_bytes, oldest + i * input.stride, row_bytes);
}

void RowPacker::add(const RowBatch& batch) {
    // All memory first: what comes then cannot fail.
    const std::uint64_t rows = batch.rows;
    const auto reserve = [&](Column& column, const FieldInput& input) {
        column.values.reserve(added_bytes(column, input, rows));
        if (column.is_ragged) column.starts.reserve(rows * 8);
    };
    for (std::size_t f = 0; f < fields_.size(); ++f) reserve(fields_[f], batch.fields[f]);
    for (std::size_t f = 0; f < next_.size(); ++f) reserve(next_[f], batch.next[f]);
    flags_.reserve(rows);
    if (batch.priorities) priorities_.reserve(rows * 4);

    for (std::size_t f = 0; f < fields_.size(); ++f) append(fields_[f], batch.fields[f], rows);
    for (std::size_t f = 0; f < next_.size(); ++f) append(next_[f], batch.next[f], rows);
    std::byte* flags = flags_.append(rows);
    std::memset(flags, 0, rows);
    for (std::uint64_t i = 0; batch.flags && i < rows; ++i) {
        flags[i] = std::byte{static_cast<std::uint8_t>(batch.flags[i] & kGivenFlags)};
        has_flags_ = has_flags_ || flags[i] != std::byte{0};
    }
    if (batch.priorities) std::memcpy(priorities_.append(rows * 4), batch.priorities, rows * 4);
    has_priorities_ = batch.priorities != nullptr;
    rows_ += rows;
}

void RowPacker::drop(std::uint64_t rows) {
    rows_ -= rows;
    if (rows_ == 0) return clear();
    for (std::vector<Column>* columns : {&fields_, &next_}) {
        for (Column& column : *columns) {
            std::uint64_t end = rows_ * column.frames * column.frame_bytes;
            if (column.is_ragged) {
                column.starts.cut(rows_ * 8);
                std::memcpy(&end, column.starts.data() + (rows_ - 1) * 8, 8);
            }
            column.values.cut(end);
        }
    }
    flags_.cut(rows_);
    if (has_priorities_) priorities_.cut(rows_ * 4);
}

std::uint64_t RowPacker::bytes() const {
    if (rows_ == 0) return 0;
    std::uint64_t bytes = 8 + (has_flags_ ? padded(rows_) : 0) + (has_priorities_ ? padded(4 * rows_) : 0);
    for (const std::vector<Column>* columns : {&fields_, &next_}) {
        for (const Column& column : *columns)
            bytes += (column.is_ragged ? 8 * (rows_ + 1) : 8) + padded(column.values.bytes());
    }
    return bytes;
}

namespace {

std::byte* put(std::byte* to, const std::byte* from, std::uint64_t bytes) {
    if (bytes) std::memcpy(to, from, bytes);
    std::memset(to + bytes, 0, padded(bytes) - bytes);
    return to + padded(bytes);
}

std::byte* put_numbers(std::byte* to, std::uint32_t first, std::uint32_t second) {
    std::memcpy(to, &first, 4);
    std::memcpy(to + 4, &second, 4);
    return to + 8;
}

}  // namespace

std::byte* RowPacker::write(const Column& column, std::byte* to) const {
    if (column.is_ragged) {
        to = put_numbers(to, 0, 0);  // the first row's start
        to = put(to, column.starts.data(), column.starts.bytes());
    } else {
        to = put_numbers(to, column.frames, 0);
    }
    return put(to, column.values.data(), column.values.bytes());
}

void RowPacker::write(std::byte* body) const {
    const std::uint32_t bits = (has_flags_ ? kHasFlags : 0u) | (has_priorities_ ? kHasPriorities : 0u);
    std::byte* to = put_numbers(body, static_cast<std::uint32_t>(rows_), bits);
    if (has_flags_) to = put(to, flags_.data(), flags_.bytes());
    if (has_priorities_) to = put(to, priorities_.data(), priorities_.bytes());
    for (const Column& column : fields_) to = write(column, to);
    for (const Column& column : next_) to = write(column, to);
}

void RowPacker::clear() {
    for (std::vector<Column>* columns : {&fields_, &next_}) {
        for (Column& column : *columns) {
            column.starts.clear();
            column.values.clear();
        }
    }
    flags_.clear();
    priorities_.clear();
    rows_ = 0;
    has_flags_ = has_priorities_ = false;
}

}  // namespace sharpwave
