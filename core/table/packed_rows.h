// Rows as one piece of memory, as a message carries them: docs/format.md, "Packed rows". PackedRows reads such a body
// where it lies, RowPacker writes one. Neither needs a table: a process that only sends rows has none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "schema/schema.h"
#include "table/row_batch.h"

namespace sharpwave {

// What a body must fit.
struct PackedShape {
    const RowLayout& layout;
    std::uint64_t width = 1;      // rows come in whole steps of so many
    std::uint64_t capacity = 0;   // the most rows
    bool has_priorities = false;  // rows may have some
};

class PackedRows {
public:
    // Checks every length, flag and truth value. What does not fit is ErrorKind::schema. The body must lie at a
    // multiple of 8 and stay where it is while the batch is used: the inputs of the batch point into it.
    PackedRows(const PackedShape& shape, const std::byte* body, std::uint64_t bytes);

    // Without kRowTerminated: which rows end their episodes follows from their values.
    RowBatch batch() const { return {fields_.data(), rows_, flags_, next_.data(), priorities_}; }
    std::size_t rows() const { return rows_; }

private:
    std::size_t rows_ = 0;
    const std::uint8_t* flags_ = nullptr;
    const float* priorities_ = nullptr;
    std::vector<FieldInput> fields_, next_;
};

// Collects rows and writes them as one body. Not for several threads at once.
class RowPacker {
public:
    explicit RowPacker(const RowLayout& layout);

    // Whether these rows can be in one body with those that are pending: stacks or single frames, priorities or none.
    // Always true while nothing is pending.
    bool fits(const RowBatch& batch) const;

    // Copies rows that fit(). Throws std::bad_alloc, and nothing has changed then.
    void add(const RowBatch& batch);

    // Takes the newest rows back.
    void drop(std::uint64_t rows);

    std::uint64_t rows() const { return rows_; }
    std::uint64_t bytes() const;  // of the body
    void write(std::byte* body) const;
    void clear();  // memory is kept for the next rows, unless it is much

private:
    // Memory that grows by doubling and is not cleared.
    class Section {
    public:
        void reserve(std::uint64_t more) {
            if (more > room_ - used_) [[unlikely]]
                grow(more);
        }
        std::byte* append(std::uint64_t bytes) {  // after reserve()
            std::byte* place = data_.get() + used_;
            used_ += bytes;
            return place;
        }
        const std::byte* data() const { return data_.get(); }
        std::uint64_t bytes() const { return used_; }
        void cut(std::uint64_t bytes) { used_ = bytes; }  // to its first ones
        void clear();

    private:
        void grow(std::uint64_t more);
        std::unique_ptr<std::byte[]> data_;
        std::uint64_t used_ = 0, room_ = 0;
    };
    struct Column {
        std::uint64_t frame_bytes;
        bool is_ragged;
        std::uint32_t frames = 1;  // of the pending rows
        Section starts, values;    // starts: the end of each row's value, from the values' start
    };
    static std::uint64_t added_bytes(const Column& column, const FieldInput& input, std::uint64_t rows);
    static void append(Column& column, const FieldInput& input, std::uint64_t rows);
    std::byte* write(const Column& column, std::byte* to) const;

    std::vector<Column> fields_, next_;
    Section flags_, priorities_;
    std::uint64_t rows_ = 0;
    bool has_flags_ = false, has_priorities_ = false;
};

}  // namespace sharpwave
