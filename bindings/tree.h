// The shape of a row as Python sees it: top-level names, under them leaves or nested dicts and tuples of leaves.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "numpy_api.h"
#include "table/copy.h"
#include "table/table.h"

struct Leaf {
    PyArray_Descr* dtype = nullptr;  // owned by the tree
    std::vector<npy_intp> shape;
    std::uint64_t bytes = 0;   // of one row
    std::uint64_t offset = 0;  // in the row; filled when the tree meets its table
    std::string name;          // for messages: "obs/image"
};

struct Node {
    PyObject* key = nullptr;  // interned str; owned by the tree
    int leaf = -1;            // index of the leaf, or -1 for a nested node
    bool is_tuple = false;
    std::vector<Node> children;
};

class Tree {
public:
    // nodes: (name, leaf index) or (name, "dict" | "tuple", [nodes]); leaves: (name, dtype, shape).
    // done and rows_from are leaf indices: which leaf flags termination (-1: none), and which one's rank tells how
    // many rows an add brings.
    Tree(nb::list nodes, nb::list leaves, int done, int rows_from);
    ~Tree();
    Tree(const Tree&) = delete;
    Tree& operator=(const Tree&) = delete;

    void meet(const sharpwave::RowLayout& layout);

    const std::vector<Node>& top() const { return top_; }
    PyObject* batch_template() const { return batch_template_; }  // the keys of a batch, each with None
    const std::vector<Leaf>& leaves() const { return leaves_; }
    int done() const { return done_; }
    int rows_from() const { return rows_from_; }

private:
    std::vector<Node> read_nodes(nb::list nodes);

    std::vector<Node> top_;
    std::vector<Leaf> leaves_;
    int done_, rows_from_;
    PyObject* batch_template_ = nullptr;
};
