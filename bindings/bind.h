// What the rooms give each other and the module.
#pragma once

#include <memory>

#include "base/error.h"
#include "numpy_api.h"
#include "results.h"
#include "sampling/sampler.h"
#include "table/table.h"
#include "tree.h"

void bind_tree(nb::module_& m);
void bind_table(nb::module_& m);
void bind_writer(nb::module_& m);

// A table together with the shape that its rows have in Python.
struct BoundTable {
    std::shared_ptr<sharpwave::Table> table;  // null after close()
    std::shared_ptr<Tree> tree;
    std::shared_ptr<LastArrays> last;
    std::shared_ptr<sharpwave::Sampler> sampler;

    // A reference of the caller's own: close() in another thread must not take the table away during a call.
    std::shared_ptr<sharpwave::Table> open() const {
        if (!table) throw sharpwave::Error(sharpwave::ErrorKind::closed, "the buffer is closed");
        table->check_open();
        return table;
    }
};
