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

Tree::Tree(nb::list nodes, nb::list leaves, int done, int rows_from) : done_(done), rows_from_(rows_from) {
    for (nb::handle item : leaves) {
        const nb::tuple parts = nb::cast<nb::tuple>(item);
        Leaf leaf;
        leaf.name = nb::cast<std::string>(parts[0]);
        if (!PyArray_DescrConverter(parts[1].ptr(), &leaf.dtype)) throw nb::python_error();
        leaf.bytes = static_cast<std::uint64_t>(PyDataType_ELSIZE(leaf.dtype));
        for (nb::handle extent : nb::cast<nb::tuple>(parts[2])) {
            leaf.shape.push_back(nb::cast<npy_intp>(extent));
            leaf.bytes *= static_cast<std::uint64_t>(leaf.shape.back());
        }
        leaves_.push_back(std::move(leaf));
    }
    top_ = read_nodes(nodes);
    nb::dict keys;
    for (const Node& node : top_) keys[nb::handle(node.key)] = nb::none();
    keys["indices"] = nb::none();
    batch_template_ = keys.release().ptr();
}

Tree::~Tree() {
    Py_XDECREF(batch_template_);
    release(top_);
    for (Leaf& leaf : leaves_) Py_XDECREF(reinterpret_cast<PyObject*>(leaf.dtype));
}

void Tree::meet(const sharpwave::RowLayout& layout) {
    if (layout.fields().size() != leaves_.size()) throw nb::value_error("the tree and the table differ");
    for (std::size_t i = 0; i < leaves_.size(); ++i) {
        const sharpwave::Field& field = layout.fields()[i];
        if (field.bytes != leaves_[i].bytes) throw nb::value_error("the tree and the table differ");
        leaves_[i].offset = field.offset;
    }
}

void bind_tree(nb::module_& m) {
    nb::class_<Tree>(m, "Tree", "The shape of a row: names, nesting, dtypes.")
        .def(nb::init<nb::list, nb::list, int, int>(), nb::arg("nodes"), nb::arg("leaves"), nb::arg("done"),
             nb::arg("rows_from"),
             nb::sig("def __init__(self, nodes: list[typing.Any], leaves: list[typing.Any], done: int, "
                     "rows_from: int) -> None"));
}
