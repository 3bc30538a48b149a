// What Python asks of a table, as the engine's own structs with named fields.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "sampling/exponents.h"
#include "sampling/pace.h"
#include "sampling/row_index_config.h"
#include "table/table.h"
#include "views/goals.h"
#include "views/windows.h"

// What a new table keeps for its index.
struct IndexSetup {
    sharpwave::IndexColumns columns;
    sharpwave::Exponents exponents;
};

// Hindsight, by the numbers of leaves in the tree.
struct GoalSettings {
    sharpwave::GoalStrategy strategy;
    double ratio;
    std::size_t achieved;
    std::vector<std::size_t> desired;
};

struct BatchSettings {
    std::uint32_t n_step = 1;
    double gamma = 1;
    std::uint64_t newest = 0;  // the first positions of a batch are the newest rows
    std::optional<sharpwave::RowIndexConfig> index;
    std::optional<sharpwave::WindowConfig> windows;
    std::optional<GoalSettings> goals;
    std::vector<std::pair<std::size_t, std::size_t>> agents;  // leaves of dones and of rewards, see AgentLeaves
    std::optional<sharpwave::PaceConfig> pace;
};
