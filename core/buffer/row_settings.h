// The sampler, the view and the pace of a description as the engine's settings: what src/sharpwave/settings.py makes of
// them, number by number, so that C++ draws what Python draws.
#pragma once

#include <cstdint>

#include "base/json.h"
#include "buffer/row_spec.h"

namespace sharpwave {

class RowSettings {
public:
    explicit RowSettings(const json::Value& description);

    std::uint32_t n_step() const { return n_step_; }
    void put(RowSpec& spec) const;  // all but the leaves of the view

private:
    void read_view(const json::Value& view);
    void read_sampler(const json::Value& sampler);
    void read_pace(const json::Value& pace);

    std::uint32_t n_step_ = 1;
    double gamma_ = 0.99;
    bool has_truncated_ = false, has_place_indices_ = false;
    StartRule starts_;
    std::optional<WindowConfig> windows_;
    std::optional<RowIndexConfig> index_;
    std::optional<PaceConfig> pace_;
    bool is_prioritized_ = false;
    std::uint64_t newest_ = 0;
};

}  // namespace sharpwave
