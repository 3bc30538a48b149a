#include "buffer/row_spec.h"

#include <algorithm>

#include "base/error.h"
#include "base/json.h"
#include "buffer/item_types.h"
#include "buffer/row_settings.h"

namespace sharpwave {
namespace {

constexpr std::int64_t kMostExtent = std::int64_t{1} << 40;

[[noreturn]] void refuse_damage(const std::string& what) { throw Error(ErrorKind::storage, what); }

bool is_under(std::string_view path, std::string_view name) {
    return path.substr(0, name.size()) == name && (path.size() == name.size() || path[name.size()] == '/');
}

bool is_next(std::string_view path) { return is_under(path, "next_obs"); }

Field read_field(const std::string& path, const json::Value& plain) {
    const std::vector<json::Value>& parts = plain.list("schema");
    if (parts.size() != 3) refuse_damage("JSON: schema: '" + path + "': expected shape, dtype and options");
    Field field;
    field.name = path;
    std::uint64_t items = 1;
    for (const json::Value& extent : parts[0].list("schema: shape")) {
        field.shape.push_back(extent.whole("schema: shape", 1, kMostExtent));
        items *= static_cast<std::uint64_t>(field.shape.back());
        if (items > static_cast<std::uint64_t>(kMostExtent)) refuse_damage("JSON: schema: '" + path + "' is too large");
    }
    field.dtype = parts[1].text("schema: dtype");
    field.item_bytes = dtype_bytes(field.dtype);
    for (const auto& [name, value] : parts[2].object("schema: options")) {
        if (name == "stack") {
            field.stack = static_cast<std::uint32_t>(value.whole("schema: stack", 1, 256));
        } else if (name == "padding") {
            field.pads_zero = value.text("schema: padding") == "zero";
        } else if (name == "compression") {
            field.codec = value.text("schema: compression") == "lz4" ? Codec::lz4 : Codec::zstd;
        } else if (name == "ragged") {
            field.is_ragged =
                value.is_text() ? value.text("schema: ragged") == "padded" : value.truth("schema: ragged");
        } else if (name == "mutable") {
            field.is_mutable = value.truth("schema: mutable");
        } else {
            refuse_damage(std::string("JSON: schema: unknown option of a field: ").append(name));
        }
    }
    field.full_bytes = items * field.item_bytes;
    return field;
}

void read_node(const std::string& path, const json::Value& plain, std::vector<Field>& leaves) {
    if (plain.is_list()) {
        leaves.push_back(read_field(path, plain));
        return;
    }
    if (const json::Value* parts = plain.find("tuple")) {
        std::size_t number = 0;
        for (const json::Value& part : parts->list("schema: tuple")) {
            read_node(path + "/" + std::to_string(number++), part, leaves);
        }
        return;
    }
    for (const auto& [name, part] : plain.at("dict", "schema").object("schema: dict")) {
        read_node(std::string(path).append("/").append(name), part, leaves);
    }
}

// The schema's own order: the five names of a transition first.
std::vector<Field> read_leaves(const json::Value& fields) {
    constexpr std::string_view kStandard[] = {"obs", "action", "reward", "next_obs", "done"};
    std::vector<Field> leaves;
    for (const std::string_view name : kStandard) {
        if (const json::Value* node = fields.find(name)) read_node(std::string(name), *node, leaves);
    }
    for (const auto& [name, node] : fields.object("schema: fields")) {
        if (std::find(std::begin(kStandard), std::end(kStandard), name) == std::end(kStandard)) {
            read_node(name, node, leaves);
        }
    }
    if (leaves.empty()) refuse_damage("JSON: schema: expected at least one field, got none");
    return leaves;
}

// Which leaves are fields of the table, and what each becomes in a batch: Schema.__init__ of src/sharpwave/schema.py.
void place_leaves(RowSpec& spec, std::vector<Field> leaves, bool derives_next) {
    for (const Field& leaf : leaves) {
        if (derives_next && is_next(leaf.name)) continue;
        spec.fields.push_back(leaf);
        spec.fields.back().gives_next = derives_next && is_under(leaf.name, "obs");
    }
    const auto field_of = [&](std::string_view name) -> std::uint32_t {
        for (std::size_t i = 0; i < spec.fields.size(); ++i) {
            if (spec.fields[i].name == name) return static_cast<std::uint32_t>(i);
        }
        refuse_damage("JSON: schema: expected a field '" + std::string(name) + "', got none");
    };
    std::vector<std::size_t> next_of(spec.fields.size());
    for (std::size_t i = 0; i < spec.fields.size(); ++i) {
        if (spec.fields[i].gives_next) next_of[i] = spec.next_inputs++;
    }
    for (Field& leaf : leaves) {
        const std::string name = leaf.name;
        RowLeaf made{std::move(leaf), {0, Role::own, 0}, 0};
        if (is_next(name)) {
            const std::string now = name.substr(5);
            if (derives_next) {
                made.place = {field_of(now), Role::next, 0};
            } else {
                const bool has_now = std::any_of(spec.fields.begin(), spec.fields.end(),
                                                 [&](const Field& field) { return field.name == now; });
                made.place = {field_of(name), Role::last, has_now ? field_of(now) : 0};
                if (made.field.stack > 1) spec.fields[made.place.field].follows = static_cast<int>(field_of(now));
            }
        } else if (is_under(name, "done")) {
            made.place = {field_of(name), Role::last, 0};
        } else {
            made.place = {field_of(name), is_under(name, "reward") ? Role::reward : Role::own, 0};
        }
        made.input = made.is_next() ? next_of[made.place.field] : made.place.field;
        if (is_under(name, "done")) spec.dones.push_back(spec.leaves.size());
        spec.leaves.push_back(std::move(made));
    }
    spec.by_agent =
        spec.dones.size() > 1 || (spec.dones.size() == 1 && (spec.leaves[spec.dones[0]].field.name != "done" ||
                                                             !spec.leaves[spec.dones[0]].field.shape.empty()));
    const auto first = [&](auto is_it) {
        const auto found = std::find_if(spec.leaves.begin(), spec.leaves.end(), is_it);
        return static_cast<std::size_t>(found - spec.leaves.begin());
    };
    spec.rows_from = first([](const RowLeaf& leaf) { return is_under(leaf.field.name, "reward"); });
    if (spec.rows_from == spec.leaves.size()) {
        spec.rows_from = first([](const RowLeaf& leaf) { return leaf.field.shape.empty() && leaf.field.stack == 1; });
    }
    if (spec.rows_from == spec.leaves.size()) {
        spec.rows_from = first([](const RowLeaf& leaf) { return !leaf.field.is_ragged && leaf.field.stack == 1; });
    }
    if (spec.rows_from == spec.leaves.size()) spec.rows_from = 0;
}

// Leaves of agents' dones and of their rewards; empty where rewards are not given for each agent.
std::vector<AgentLeaves> agents(const RowSpec& spec) {
    std::vector<AgentLeaves> pairs;
    for (const std::size_t done : spec.dones) {
        const Field& field = spec.leaves[done].field;
        const RowLeaf* reward = spec.find("reward" + field.name.substr(4));
        if (!reward || reward->field.shape.size() < field.shape.size() ||
            !std::equal(field.shape.begin(), field.shape.end(), reward->field.shape.begin())) {
            return {};
        }
        pairs.push_back({done, static_cast<std::size_t>(reward - spec.leaves.data())});
    }
    return pairs;
}

RowSpec read_spec(std::string_view description, std::uint64_t capacity) {
    const json::Value plain = json::parse(description, true);
    RowSpec spec;
    spec.capacity = capacity;
    const json::Value& schema = plain.at("schema", "description");
    place_leaves(spec, read_leaves(schema.at("fields", "schema")), schema.at("derives_next", "schema").truth("schema"));
    if (const json::Value& envs = plain.at("num_envs", "description"); !envs.is_null()) {
        spec.num_envs = static_cast<std::uint64_t>(envs.whole("num_envs", 1, std::int64_t{1} << 32));
    }
    spec.config = BatchConfig{};
    const RowSettings settings(plain);
    settings.put(spec);
    for (const RowLeaf& leaf : spec.leaves) spec.config.view.leaves.push_back(leaf.place);
    if (settings.n_step() > 1) {
        spec.discounts = 1;
        if (spec.by_agent) {
            spec.config.view.agents = agents(spec);
            if (spec.config.view.agents.empty()) refuse_damage("JSON: schema: agents have no rewards of their own");
            spec.discounts = 0;
            for (const AgentLeaves& pair : spec.config.view.agents) {
                spec.config.view.leaves[pair.done].role = Role::reward;  // made of all steps, as the rewards are
                spec.discounts += spec.leaves[pair.done].frame_items();
            }
        }
    }
    const auto has_stack = [](const RowLeaf& leaf) { return leaf.field.stack > 1; };
    if (spec.next_inputs > 0) {
        spec.order_reason = "next_obs='derived'";
    } else if (std::any_of(spec.leaves.begin(), spec.leaves.end(), has_stack)) {
        spec.order_reason = "stack";
    } else if (spec.places > 0) {
        spec.order_reason = "a window";
    } else if (settings.n_step() > 1) {
        spec.order_reason = "n_step";
    }
    return spec;
}

}  // namespace

const RowLeaf* RowSpec::find(std::string_view name) const {
    for (const RowLeaf& leaf : leaves) {
        if (leaf.field.name == name) return &leaf;
    }
    return nullptr;
}

std::string RowSpec::names() const {
    std::string listed;
    for (const RowLeaf& leaf : leaves) listed += (listed.empty() ? "" : ", ") + leaf.field.name;
    return listed;
}

RowSpec RowSpec::parse(std::string_view description, std::uint64_t capacity, const std::string& where) {
    try {
        return read_spec(description, capacity);
    } catch (const Error& error) {
        if (error.kind() == ErrorKind::schema) throw Error(ErrorKind::schema, where + ": " + error.what());
        throw Error(ErrorKind::storage, where +
                                            ": the description is damaged, or not of a ReplayBuffer of the Python " +
                                            "package (" + error.what() + ")");
    }
}

void RowSpec::check(const Table& table, const std::string& where) const {
    const std::vector<Field>& there = table.layout().fields();
    bool fits = there.size() == fields.size() && table.width() == width();
    for (std::size_t i = 0; fits && i < there.size(); ++i) {
        const Field &a = there[i], &b = fields[i];
        fits = a.name == b.name && a.item_bytes == b.item_bytes && a.shape == b.shape && a.stack == b.stack &&
               a.is_ragged == b.is_ragged && a.gives_next == b.gives_next && a.is_mutable == b.is_mutable;
    }
    const auto& index = config.index;
    fits = fits && index.has_value() == table.has_index() && is_prioritized == (table.given() != nullptr);
    if (fits && index) {
        fits = (index->max_reads > 1) == (table.reads() != nullptr) &&
               !index->starts.is_any() == (table.episodes() != nullptr);
    }
    if (!fits) throw Error(ErrorKind::storage, where + ": the description is damaged: it is not that of the table");
}

}  // namespace sharpwave
