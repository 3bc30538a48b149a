// Enums and structs that cross the border between Python and the engine by name.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind.h"
#include "settings.h"
#include "table/row_batch.h"

namespace {

void bind_enums(nb::module_& m) {
    using namespace sharpwave;
    nb::enum_<Role>(m, "Role", nb::is_arithmetic(), "Which row of an example a leaf comes from.")
        .value("own", Role::own)
        .value("reward", Role::reward)
        .value("last", Role::last)
        .value("next", Role::next);
    nb::enum_<Codec>(m, "Codec", nb::is_arithmetic())
        .value("none", Codec::none)
        .value("lz4", Codec::lz4)
        .value("zstd", Codec::zstd);
    nb::enum_<Order>(m, "Order", nb::is_arithmetic(), "How drawn rows follow each other.")
        .value("weighted", Order::weighted)
        .value("recent", Order::recent)
        .value("shuffle", Order::shuffle)
        .value("fifo", Order::fifo)
        .value("lifo", Order::lifo);
    nb::enum_<Normalize>(m, "Normalize", nb::is_arithmetic())
        .value("batch", Normalize::batch)
        .value("buffer", Normalize::buffer)
        .value("none", Normalize::none);
    nb::enum_<NewRows>(m, "NewRows", nb::is_arithmetic())
        .value("live_max", NewRows::live_max)
        .value("running_max", NewRows::running_max)
        .value("constant", NewRows::constant);
    nb::enum_<StartRule::Needs>(m, "StartNeeds", nb::is_arithmetic(), "What a row needs to start an example.")
        .value("nothing", StartRule::Needs::nothing)
        .value("rows", StartRule::Needs::rows)
        .value("end", StartRule::Needs::end);
    nb::enum_<GoalStrategy>(m, "GoalStrategy", nb::is_arithmetic())
        .value("future", GoalStrategy::future)
        .value("final", GoalStrategy::final)
        .value("episode", GoalStrategy::episode);
    nb::enum_<RowFlag>(m, "RowFlag", nb::is_arithmetic())
        .value("terminated", kRowTerminated)
        .value("truncated", kRowTruncated)
        .value("void", kRowVoid)
        .value("cut", kRowCut);
}

void bind_index_settings(nb::module_& m) {
    using namespace sharpwave;
    nb::class_<Exponents>(m, "Exponents", "alpha, and beta from a start to an end in so many sample calls.")
        .def(
            "__init__",
            [](Exponents* self, double alpha, double start, double end, double steps) {
                new (self) Exponents{alpha, start, end, steps};
            },
            nb::arg("alpha"), nb::arg("beta_start"), nb::arg("beta_end"), nb::arg("beta_steps"))
        .def_ro("alpha", &Exponents::alpha)
        .def_ro("beta_start", &Exponents::beta_start)
        .def_ro("beta_end", &Exponents::beta_end)
        .def_ro("beta_steps", &Exponents::beta_steps);
    nb::class_<IndexSetup>(m, "IndexSetup", "What a new table keeps for its index.")
        .def(
            "__init__",
            [](IndexSetup* self, bool by_priority, const Exponents& exponents, bool numbers_steps, bool counts_reads) {
                new (self) IndexSetup{{by_priority, true, numbers_steps, counts_reads}, exponents};
            },
            nb::arg("by_priority"), nb::arg("exponents"), nb::arg("numbers_steps"), nb::arg("counts_reads"));
    nb::class_<StartRule>(m, "StartRule", "Which rows may start an example.")
        .def(nb::init<>())
        .def_rw("needs", &StartRule::needs)
        .def_rw("length", &StartRule::length)
        .def_rw("stride", &StartRule::stride)
        .def_rw("across", &StartRule::across)
        .def_rw("first_rows", &StartRule::first_rows)
        .def_rw("per_episode", &StartRule::per_episode)
        .def_prop_ro("is_any", &StartRule::is_any);
    nb::class_<RowIndexConfig>(m, "IndexSettings", "How rows are drawn through the index.")
        .def(nb::init<>())
        .def_rw("eps", &RowIndexConfig::eps)
        .def_rw("rank_based", &RowIndexConfig::rank_based)
        .def_rw("stratified", &RowIndexConfig::stratified)
        .def_rw("normalize", &RowIndexConfig::normalize)
        .def_rw("mix", &RowIndexConfig::mix)
        .def_rw("new_rows", &RowIndexConfig::new_rows)
        .def_rw("new_priority", &RowIndexConfig::new_priority)
        .def_rw("order", &RowIndexConfig::order)
        .def_rw("recent", &RowIndexConfig::recent)
        .def_rw("max_reads", &RowIndexConfig::max_reads)
        .def_rw("starts", &RowIndexConfig::starts);
}

}  // namespace

void bind_settings(nb::module_& m) {
    using namespace sharpwave;
    bind_enums(m);
    bind_index_settings(m);
    nb::class_<Field>(m, "FieldLayout", "A field of the table's rows.")
        .def(
            "__init__",
            [](Field* self, const std::string& name, const std::string& dtype, std::uint32_t item_bytes,
               const std::vector<std::int64_t>& shape, std::uint32_t stack, bool pads_zero, Codec codec, bool is_ragged,
               bool gives_next, int follows, bool is_mutable) {
                Field made{name, dtype, item_bytes, shape};
                made.stack = stack;
                made.pads_zero = pads_zero;
                made.codec = codec;
                made.is_ragged = is_ragged;
                made.gives_next = gives_next;
                made.follows = follows;
                made.is_mutable = is_mutable;
                new (self) Field(std::move(made));
            },
            nb::arg("name"), nb::arg("dtype"), nb::arg("item_bytes"), nb::arg("shape"), nb::arg("stack"),
            nb::arg("pads_zero"), nb::arg("codec"), nb::arg("is_ragged"), nb::arg("gives_next"), nb::arg("follows"),
            nb::arg("is_mutable"))
        .def_ro("name", &Field::name);
    nb::class_<WindowConfig>(m, "WindowSettings")
        .def(
            "__init__",
            [](WindowConfig* self, std::uint64_t length, std::uint64_t burn_in, std::uint64_t bootstrap, bool across) {
                new (self) WindowConfig{length, burn_in, bootstrap, across};
            },
            nb::arg("length"), nb::arg("burn_in"), nb::arg("bootstrap"), nb::arg("across"));
    nb::class_<GoalSettings>(m, "GoalSettings", "Hindsight; leaves by their numbers in the tree.")
        .def(
            "__init__",
            [](GoalSettings* self, GoalStrategy strategy, double ratio, std::size_t achieved,
               const std::vector<std::size_t>& desired) {
                new (self) GoalSettings{strategy, ratio, achieved, desired};
            },
            nb::arg("strategy"), nb::arg("ratio"), nb::arg("achieved"), nb::arg("desired"));
    nb::class_<PaceConfig>(m, "PaceSettings")
        .def(
            "__init__",
            [](PaceConfig* self, double min_size, double ratio, double min_diff, double max_diff) {
                new (self) PaceConfig{min_size, ratio, min_diff, max_diff};
            },
            nb::arg("min_size"), nb::arg("ratio"), nb::arg("min_diff"), nb::arg("max_diff"));
    nb::class_<BatchSettings>(m, "BatchSettings", "A sampler, a view and a pace.")
        .def(nb::init<>())
        .def_rw("n_step", &BatchSettings::n_step)
        .def_rw("gamma", &BatchSettings::gamma)
        .def_rw("newest", &BatchSettings::newest)
        .def_rw("index", &BatchSettings::index, nb::arg().none())
        .def_rw("windows", &BatchSettings::windows, nb::arg().none())
        .def_rw("goals", &BatchSettings::goals, nb::arg().none())
        .def_rw("agents", &BatchSettings::agents)
        .def_rw("pace", &BatchSettings::pace, nb::arg().none());
}
