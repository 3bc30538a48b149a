// The shape of a row as Python sees it: top-level names, under them leaves or nested dicts and tuples of leaves.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "numpy_api.h"
#include "table/copy.h"
#include "table/table.h"
#include "views/transitions.h"

struct Leaf {
    PyArray_Descr* dtype = nullptr;     // owned by the tree
    std::vector<npy_intp> shape;        // of one frame, as a row holds it
    std::vector<npy_intp> batch_shape;  // with the stack in front
    std::uint32_t stack = 1;
    bool is_ragged = false;
    std::uint64_t frame_bytes = 0;
    std::uint64_t bytes = 0;      // of one row: all frames
    sharpwave::ViewLeaf place{};  // where it is in the table
    std::size_t input = 0;        // where it goes in an add: a field, or for a next observation its place among those
    std::string name;             // for messages: "obs/image"
    bool is_next() const { return place.role == sharpwave::Role::next; }
};

struct Node {
    PyObject* key = nullptr;  // interned str; owned by the tree
    int leaf = -1;            // index of the leaf, or -1 for a nested node
    bool is_tuple = false;
    std::vector<Node> children;
};

class Tree {
public:
    // nodes: (name, leaf index) or (name, "dict" | "tuple", [nodes]);
    // leaves: (name, dtype, shape, stack, is ragged, field, role, field of older frames).
    // dones and rows_from are leaf indices: which leaves flag termination, and which one's rank tells how many rows an
    // add brings. by_agent: the dones are of agents, and a row ends when all of them have ended. discount: the shape of
    // the discounts of an example, None where batches carry none. weights, relabelled, truncated and place_indices:
    // whether batches carry those. window: how many rows an example is, 0 where it is one and has no axis of its own.
    Tree(nb::list nodes, nb::list leaves, nb::list dones, bool by_agent, int rows_from, nb::object discount,
         bool weights, bool relabelled, bool truncated, bool place_indices, npy_intp window);
    ~Tree();
    Tree(const Tree&) = delete;
    Tree& operator=(const Tree&) = delete;

    void meet(const sharpwave::RowLayout& layout);

    const std::vector<Node>& top() const { return top_; }
    PyObject* batch_template() const { return batch_template_; }  // the keys of a batch, each with None
    const std::vector<Leaf>& leaves() const { return leaves_; }
    int done() const { return done_; }  // the leaf of a row's one truth value; -1: none, or one for each agent
    const std::vector<std::size_t>& dones() const { return dones_; }
    bool is_by_agent() const { return by_agent_; }
    const Node* done_node() const { return done_node_; }  // null: none
    int rows_from() const { return rows_from_; }
    bool has_discount() const { return discount_; }
    const std::vector<npy_intp>& discount_shape() const { return discount_shape_; }
    bool has_weights() const { return weights_; }
    bool has_relabelled() const { return relabelled_; }
    bool has_truncated() const { return truncated_; }
    bool has_place_indices() const { return place_indices_; }
    bool has_ragged() const { return ragged_; }
    npy_intp window() const { return window_; }
    const std::vector<npy_intp>& window_shape() const { return window_shape_; }
    std::size_t next_inputs() const { return next_inputs_; }

private:
    std::vector<Node> read_nodes(nb::list nodes);

    std::vector<Node> top_;
    std::vector<Leaf> leaves_;
    std::vector<std::size_t> dones_;
    std::vector<npy_intp> discount_shape_, window_shape_;
    const Node* done_node_ = nullptr;
    int done_ = -1, rows_from_;
    bool by_agent_, discount_, weights_, relabelled_, truncated_, place_indices_, ragged_ = false;
    npy_intp window_;
    std::size_t next_inputs_ = 0;
    PyObject* batch_template_ = nullptr;
};
