#include "tree.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "bind.h"

namespace {

void release(std::vector<Node>& nodes) {
    for (Node& node : nodes) {
        Py_XDECREF(node.key);
        release(node.children);
    }
}

}  // namespace

std::vector<Node> Tree::read_nodes(nb::list nodes) {
    std::vector<Node> result;
    for (nb::handle item : nodes) {
        const nb::tuple parts = nb::cast<nb::tuple>(item);
        Node node;
        node.key = parts[0].ptr();
        Py_INCREF(node.key);
        PyUnicode_InternInPlace(&node.key);
        if (parts.size() == 2) {
            node.leaf = nb::cast<int>(parts[1]);
        } else {
            node.is_tuple = nb::cast<std::string>(parts[1]) == "tuple";
            node.children = read_nodes(nb::cast<nb::list>(parts[2]));
        }
        result.push_back(std::move(node));
    }
    return result;
}

Tree::Tree(nb::list nodes, nb::list leaves, nb::list dones, bool by_agent, int rows_from, nb::object discount,
           bool weights, bool relabelled, bool truncated, bool place_indices, npy_intp window)
    : rows_from_(rows_from),
      by_agent_(by_agent),
      discount_(!discount.is_none()),
      weights_(weights),
      relabelled_(relabelled),
      truncated_(truncated),
      place_indices_(place_indices),
      window_(window) {
    if (window) window_shape_ = {window};
    for (nb::handle item : leaves) {
        const nb::tuple parts = nb::cast<nb::tuple>(item);
        Leaf leaf;
        leaf.name = nb::cast<std::string>(parts[0]);
        if (!PyArray_DescrConverter(parts[1].ptr(), &leaf.dtype)) throw nb::python_error();
        leaf.frame_bytes = static_cast<std::uint64_t>(PyDataType_ELSIZE(leaf.dtype));
        for (nb::handle extent : nb::cast<nb::tuple>(parts[2])) {
            leaf.shape.push_back(nb::cast<npy_intp>(extent));
            leaf.frame_bytes *= static_cast<std::uint64_t>(leaf.shape.back());
        }
        leaf.stack = nb::cast<std::uint32_t>(parts[3]);
        leaf.is_ragged = nb::cast<bool>(parts[4]);
        leaf.place = {nb::cast<std::uint32_t>(parts[5]), nb::cast<sharpwave::Role>(parts[6]),
                      nb::cast<std::uint32_t>(parts[7])};
        leaf.bytes = leaf.frame_bytes * leaf.stack;
        leaf.batch_shape = leaf.shape;
        if (leaf.stack > 1) leaf.batch_shape.insert(leaf.batch_shape.begin(), static_cast<npy_intp>(leaf.stack));
        ragged_ = ragged_ || leaf.is_ragged;
        leaves_.push_back(std::move(leaf));
    }
    for (nb::handle leaf : dones) dones_.push_back(nb::cast<std::size_t>(leaf));
    if (!by_agent && !dones_.empty()) done_ = static_cast<int>(dones_[0]);
    if (discount_) {
        discount_shape_ = window_shape_;
        for (nb::handle extent : nb::cast<nb::tuple>(discount)) discount_shape_.push_back(nb::cast<npy_intp>(extent));
    }
    top_ = read_nodes(nodes);
    for (const Node& node : top_) {
        if (PyUnicode_CompareWithASCIIString(node.key, "done") == 0) done_node_ = &node;
    }
    for (std::size_t leaf : dones_) {
        if (!done_node_ || leaf >= leaves_.size()) throw nb::value_error("the tree has no such done");
    }
    nb::dict keys;
    for (const Node& node : top_) keys[nb::handle(node.key)] = nb::none();
    if (truncated_) keys["truncated"] = nb::none();
    if (discount_) keys["discount"] = nb::none();
    if (weights_) keys["weights"] = keys["probabilities"] = nb::none();
    if (relabelled_) keys["relabelled"] = nb::none();
    if (window_) keys["valid"] = keys["mask"] = keys["first"] = nb::none();
    if (place_indices_) keys["place_indices"] = nb::none();
    keys["indices"] = nb::none();
    batch_template_ = keys.release().ptr();
}

Tree::~Tree() {
    Py_XDECREF(batch_template_);
    release(top_);
    for (Leaf& leaf : leaves_) Py_XDECREF(reinterpret_cast<PyObject*>(leaf.dtype));
}

void Tree::meet(const sharpwave::RowLayout& layout) {
    const std::vector<sharpwave::Field>& fields = layout.fields();
    // Next observations come in the order of their fields.
    std::vector<std::size_t> next_of(fields.size(), 0);
    next_inputs_ = 0;
    for (std::size_t f = 0; f < fields.size(); ++f) {
        if (fields[f].gives_next) next_of[f] = next_inputs_++;
    }
    std::size_t kept = 0;
    for (Leaf& leaf : leaves_) {
        if (leaf.place.field >= fields.size() || leaf.place.older >= fields.size()) {
            throw nb::value_error("the tree and the table differ");
        }
        const sharpwave::Field& field = fields[leaf.place.field];
        if (field.full_bytes != leaf.frame_bytes || field.stack != leaf.stack || field.is_ragged != leaf.is_ragged ||
            (leaf.is_next() && !field.gives_next)) {
            throw nb::value_error("the tree and the table differ");
        }
        kept += !leaf.is_next();
        leaf.input = leaf.is_next() ? next_of[leaf.place.field] : leaf.place.field;
    }
    if (kept != fields.size() || leaves_.size() != kept + next_inputs_)
        throw nb::value_error("the tree and the table differ");
}

void bind_tree(nb::module_& m) {
    nb::class_<Tree>(m, "Tree", "The shape of a row: names, nesting, dtypes.")
        .def(nb::init<nb::list, nb::list, nb::list, bool, int, nb::object, bool, bool, bool, bool, npy_intp>(),
             nb::arg("nodes"), nb::arg("leaves"), nb::arg("dones"), nb::arg("by_agent"), nb::arg("rows_from"),
             nb::arg("discount").none(), nb::arg("weights"), nb::arg("relabelled"), nb::arg("truncated"),
             nb::arg("place_indices"), nb::arg("window"),
             nb::sig("def __init__(self, nodes: list[typing.Any], leaves: list[typing.Any], dones: list[int], "
                     "by_agent: bool, rows_from: int, discount: tuple[int, ...] | None, weights: bool, "
                     "relabelled: bool, truncated: bool, place_indices: bool, window: int) -> None"))
        .def(
            "new_batch", [](const Tree& self, npy_intp rows) { return new_batch(self, rows, nullptr).dict; },
            nb::arg("rows"), nb::sig("def new_batch(self, rows: int) -> dict[str, typing.Any]"),
            "Arrays for so many examples, not filled.")
        .def(
            "check_out", [](const Tree& self, npy_intp rows, nb::handle out) { check_out(self, rows, out); },
            nb::arg("rows"), nb::arg("out"), nb::sig("def check_out(self, rows: int, out: object) -> None"),
            "Refuses arrays that a batch of so many examples cannot be put into.");
}
