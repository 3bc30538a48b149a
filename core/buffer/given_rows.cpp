#include "buffer/given_rows.h"

#include <cmath>
#include <cstring>
#include <string>

#include "base/error.h"
#include "buffer/item_types.h"

namespace sharpwave {
namespace {

[[noreturn]] void refuse_add(const std::string& what) { throw Error(ErrorKind::schema, "add(): " + what); }

[[noreturn]] void refuse_field(const Field& field, const std::string& what) {
    refuse_add("field '" + field.name + "': " + what);
}

void refuse_type(const Field& field, ItemType got) {
    const bool has_type = type_of(field).kind != 'V';
    refuse_field(field, "expected " + name_of(field) + ", got " + name_of(got) + "; give " +
                            (has_type ? "a span of that type" : "a span of std::byte"));
}

std::string rows_of(std::size_t rows) { return std::to_string(rows) + (rows == 1 ? " row" : " rows"); }

// Whether an item of a `done` is true; NaN is neither.
bool is_done(const Field& field, const std::byte* item) {
    const ItemType type = type_of(field);
    if (type.kind == 'V') {
        for (std::uint32_t i = 0; i < field.item_bytes; ++i) {
            if (item[i] != std::byte{0}) return true;
        }
        return false;
    }
    const double number = number_at(type, item);
    if (std::isnan(number)) refuse_field(field, "expected 0 or 1, or truth values, got NaN");
    return number != 0;
}

}  // namespace

const RowBatch& GivenRows::read(const RowSpec& spec, std::span<const Given> values) {
    match(spec, values);
    count(spec);
    fields_.resize(spec.fields.size());
    next_.resize(spec.next_inputs);
    numbers_.resize(spec.leaves.size());
    starts_.resize(spec.leaves.size());
    for (std::size_t i = 0; i < spec.leaves.size(); ++i) accept(spec, i);
    flag(spec);
    accept_priorities(spec);
    std::uint8_t any = 0;
    for (const std::uint8_t flags : flags_) any |= flags;
    batch_ = {fields_.data(), rows_, any ? flags_.data() : nullptr, next_.empty() ? nullptr : next_.data(),
              priority_ ? priorities_.data() : nullptr};
    return batch_;
}

void GivenRows::match(const RowSpec& spec, std::span<const Given> values) {
    by_leaf_.assign(spec.leaves.size(), nullptr);
    truncated_ = mask_ = priority_ = nullptr;
    for (const Given& given : values) {
        const Value** place = nullptr;
        // As a rule they come in the schema's order.
        const auto guess = static_cast<std::size_t>(&given - values.data());
        if (guess < spec.leaves.size() && spec.leaves[guess].field.name == given.name) {
            place = &by_leaf_[guess];
        } else if (given.name == "truncated") {
            place = &truncated_;
        } else if (given.name == "mask") {
            place = &mask_;
        } else if (given.name == "priority") {
            if (!spec.is_prioritized) {
                refuse_add("priority: rows are not drawn by priority; give the buffer sampler=Prioritized()");
            }
            place = &priority_;
        } else {
            const bool is_terminated = given.name == "terminated" || given.name.starts_with("terminated/");
            const RowLeaf* leaf =
                spec.find(is_terminated ? "done" + std::string(given.name.substr(10)) : std::string(given.name));
            if (!leaf) refuse_add("unknown field '" + std::string(given.name) + "'; the schema has " + spec.names());
            place = &by_leaf_[static_cast<std::size_t>(leaf - spec.leaves.data())];
        }
        if (*place) refuse_add("field '" + std::string(given.name) + "': given twice; leave one out");
        *place = &given.value;
    }
    std::string missing;
    for (std::size_t i = 0; i < by_leaf_.size(); ++i) {
        if (!by_leaf_[i]) missing += (missing.empty() ? "'" : ", '") + spec.leaves[i].field.name + "'";
    }
    if (!missing.empty()) refuse_add("missing " + missing + "; the schema has " + spec.names());
}

void GivenRows::count(const RowSpec& spec) {
    const Field& field = spec.leaves[spec.rows_from].field;
    const Value& value = *by_leaf_[spec.rows_from];
    if (field.is_ragged) {
        rows_ = value.has_lengths() ? value.lengths().size() : 1;
    } else {
        const std::uint64_t row =
            spec.leaves[spec.rows_from].frame_items() * (value.type().kind == 'V' ? field.item_bytes : 1);
        rows_ = value.items() / row;
        if (value.items() % row != 0) {
            refuse_field(field, "expected a multiple of " + std::to_string(row) + " items, the size of shape " +
                                    shape_of(field) + ", got " + std::to_string(value.items()));
        }
    }
    if (rows_ == 0) refuse_field(field, "expected at least one row, got none");
    if (rows_ > spec.capacity) {
        refuse_add("got " + std::to_string(rows_) + " rows, the capacity is " + std::to_string(spec.capacity) +
                   "; add fewer at once or give a larger capacity");
    }
    if (rows_ % spec.width() != 0) {
        refuse_add("expected a multiple of num_envs=" + std::to_string(spec.width()) + " rows, got " +
                   std::to_string(rows_));
    }
    if (rows_ > 1 && !spec.num_envs && !spec.order_reason.empty()) {
        refuse_add(
            "got " + std::to_string(rows_) + " rows, and " + spec.order_reason +
            " needs their order; give the buffer num_envs= (1 if they are successive steps of one environment), or "
            "add one row at a time");
    }
}

void GivenRows::accept(const RowSpec& spec, std::size_t place) {
    const RowLeaf& leaf = spec.leaves[place];
    const Field& field = leaf.field;
    const Value& value = *by_leaf_[place];
    FieldInput& input = leaf.is_next() ? next_[leaf.input] : fields_[leaf.input];
    if (value.is_number() && field.shape.empty() && field.stack == 1 && rows_ == 1) {
        const ItemType wanted = type_of(field);
        if (wanted.kind == 'V') refuse_type(field, value.type());
        if (!convert_number(value.type(), value.data(), wanted, numbers_[place].data())) {
            refuse_field(field, "expected " + name_of(wanted) + ", got a number of " + name_of(value.type()) +
                                    " that it cannot hold");
        }
        input = {numbers_[place].data(), field.full_bytes, 1, nullptr};
        return;
    }
    if (value.is_number() ? value.type() != type_of(field) : !is_of(value.type(), field))
        refuse_type(field, value.type());
    if (field.is_ragged) return accept_ragged(leaf, place, value, input);
    if (value.has_lengths()) refuse_field(field, "it is not ragged; give no lengths");
    const std::uint64_t bytes = value.items() * value.type().bytes;
    if (bytes == rows_ * field.full_bytes) {
        input = {value.data(), field.full_bytes, 1, nullptr};
        return;
    }
    if (field.stack > 1 && bytes == rows_ * leaf.example_bytes()) {
        input = {value.data() + (field.stack - 1) * field.full_bytes, leaf.example_bytes(), field.stack, nullptr};
        return;
    }
    const std::uint64_t unit = value.type().kind == 'V' ? 1 : field.item_bytes;
    refuse_field(field, "expected " + std::to_string(rows_ * field.full_bytes / unit) + " items, " + rows_of(rows_) +
                            " of shape " + shape_of(field) + (field.stack > 1 ? ", or whole stacks of them" : "") +
                            ", got " + std::to_string(value.items()));
}

void GivenRows::accept_ragged(const RowLeaf& leaf, std::size_t place, const Value& value, FieldInput& input) {
    const Field& field = leaf.field;
    const std::uint64_t item = field.item_row_bytes(), bytes = value.items() * value.type().bytes;
    std::vector<std::uint64_t>& starts = starts_[place];
    starts.resize(rows_ + 1);
    starts[0] = 0;
    const auto refuse_length = [&](std::uint64_t got, std::size_t row) {
        refuse_field(field, "expected shape " + shape_of(field) + ", got " + std::to_string(got) + " items in row " +
                                std::to_string(row) + " of " + std::to_string(rows_));
    };
    if (!value.has_lengths()) {
        if (rows_ != 1)
            refuse_field(field,
                         "expected the length of each of " + rows_of(rows_) + ", got none; give Value(items, lengths)");
        if (bytes % item != 0 || bytes > field.full_bytes) refuse_length(value.items(), 0);
        starts[1] = bytes;
    } else {
        if (value.lengths().size() != rows_) {
            refuse_field(
                field, "expected " + std::to_string(rows_) + " lengths, got " + std::to_string(value.lengths().size()));
        }
        for (std::size_t row = 0; row < rows_; ++row) {
            const std::uint64_t length = value.lengths()[row];
            if (length > static_cast<std::uint64_t>(field.shape[0])) refuse_length(length, row);
            starts[row + 1] = starts[row] + length * item;
        }
        if (starts[rows_] != bytes) {
            refuse_field(field, "expected lengths that add up to " + std::to_string(bytes / item) + ", got " +
                                    std::to_string(starts[rows_] / item));
        }
    }
    input = {value.data(), 0, 1, starts.data()};
}

void GivenRows::flag_truths(const char* name, const Value& value, std::uint8_t flag, bool when) {
    if (value.items() != rows_) {
        refuse_add(std::string(name) + ": expected " + std::to_string(rows_) + " truth values, one per row, got " +
                   std::to_string(value.items()));
    }
    for (std::size_t row = 0; row < rows_; ++row) {
        const double truth = number_at(value.type(), value.data() + row * value.type().bytes);
        if (truth != 0 && truth != 1)
            refuse_add(std::string(name) + ": expected truth values, got " + name_of(value.type()));
        if ((truth == 1) == when) flags_[row] |= flag;
    }
}

void GivenRows::flag(const RowSpec& spec) {
    flags_.assign(rows_, 0);
    const Value* truncated = truncated_;
    if (spec.by_agent) {
        std::uint64_t agents = 0;
        for (const std::size_t done : spec.dones) agents += spec.leaves[done].frame_items();
        const bool is_told_by_agent = truncated && agents > 1 && truncated->items() == rows_ * agents;
        if (is_told_by_agent && spec.dones.size() > 1) {
            refuse_add("truncated: expected one truth value per row where done has several fields, got " +
                       std::to_string(truncated->items()));
        }
        flag_agents(spec, is_told_by_agent ? truncated : nullptr);
        if (is_told_by_agent) truncated = nullptr;
    } else if (!spec.dones.empty()) {
        const RowLeaf& leaf = spec.leaves[spec.dones[0]];
        const FieldInput& input = fields_[leaf.input];
        for (std::size_t row = 0; row < rows_; ++row) {
            if (is_done(leaf.field, input.flat + row * input.stride)) flags_[row] |= kRowTerminated;
        }
    }
    if (truncated) flag_truths("truncated", *truncated, kRowTruncated, true);
    if (mask_) flag_truths("mask", *mask_, kRowVoid, false);
}

// A row is terminated when all agents are done, truncated when all are over and one is truncated, and cut when one is
// truncated and another goes on.
void GivenRows::flag_agents(const RowSpec& spec, const Value* truncated) {
    for (std::size_t row = 0; row < rows_; ++row) {
        bool all_done = true, all_over = true, any_told = false;
        for (const std::size_t done : spec.dones) {
            const RowLeaf& leaf = spec.leaves[done];
            const std::byte* item = fields_[leaf.input].flat + row * fields_[leaf.input].stride;
            for (std::uint64_t agent = 0; agent < leaf.frame_items(); ++agent, item += leaf.field.item_bytes) {
                const bool is_over = is_done(leaf.field, item);
                bool is_told = false;
                if (truncated) {
                    const std::size_t at = row * leaf.frame_items() + agent;
                    is_told = number_at(truncated->type(), truncated->data() + at * truncated->type().bytes) != 0;
                }
                all_done = all_done && is_over;
                all_over = all_over && (is_over || is_told);
                any_told = any_told || is_told;
            }
        }
        if (all_done) flags_[row] |= kRowTerminated;
        if (any_told) flags_[row] |= all_over ? kRowTruncated : kRowCut;
    }
}

void GivenRows::accept_priorities(const RowSpec& spec) {
    if (!priority_ || !spec.is_prioritized) return;
    if (priority_->items() != rows_) {
        refuse_add("priority: expected " + std::to_string(rows_) + " numbers, one per row, got " +
                   std::to_string(priority_->items()));
    }
    priorities_.resize(rows_);
    for (std::size_t row = 0; row < rows_; ++row) {
        const double number = number_at(priority_->type(), priority_->data() + row * priority_->type().bytes);
        priorities_[row] = static_cast<float>(std::fabs(number));
        if (!std::isfinite(priorities_[row])) {
            refuse_add("priority: expected finite numbers, got " + std::to_string(number) + " at position " +
                       std::to_string(row) + "; nothing was changed");
        }
    }
}

}  // namespace sharpwave
