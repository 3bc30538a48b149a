#include "buffer/row_settings.h"

#include <cmath>
#include <limits>
#include <string>

#include "base/error.h"

namespace sharpwave {
namespace {

constexpr std::int64_t kMany = std::numeric_limits<std::int64_t>::max();

[[noreturn]] void refuse_settings(const std::string& what) { throw Error(ErrorKind::storage, "JSON: " + what); }

double number_in(const json::Value& plain, const char* name, double least, double most) {
    const double number = plain.at(name, "settings").number(name);
    if (!(number >= least && number <= most)) refuse_settings(std::string(name) + ": out of its bounds");
    return number;
}

std::uint64_t whole_in(const json::Value& plain, const char* name, std::int64_t least, std::int64_t most) {
    return static_cast<std::uint64_t>(plain.at(name, "settings").whole(name, least, most));
}

// A member that older descriptions lack.
bool truth_or(const json::Value& plain, const char* name, bool otherwise) {
    const json::Value* found = plain.find(name);
    return found ? found->truth(name) : otherwise;
}

std::uint64_t max_reads(const json::Value& sampler) {
    const json::Value* found = sampler.find("max_reads");
    return !found || found->is_null() ? 0 : static_cast<std::uint64_t>(found->whole("max_reads", 1, 0xffffffff));
}

Order order_of(const std::string& kind) {
    if (kind == "Uniform" || kind == "Prioritized") return Order::weighted;
    if (kind == "Recent") return Order::recent;
    if (kind == "Shuffle") return Order::shuffle;
    if (kind == "Fifo") return Order::fifo;
    if (kind == "Lifo") return Order::lifo;
    refuse_settings("sampler: unknown kind '" + kind + "'");
}

void read_priorities(const json::Value& sampler, RowIndexConfig& index) {
    index.eps = number_in(sampler, "eps", 0, 1e30);
    index.rank_based = sampler.at("rank_based", "sampler").truth("rank_based");
    index.stratified = sampler.at("stratified", "sampler").truth("stratified");
    index.mix = number_in(sampler, "mix", 0, 1);
    const std::string& normalize = sampler.at("normalize", "sampler").text("normalize");
    if (normalize == "batch") {
        index.normalize = Normalize::batch;
    } else if (normalize == "buffer") {
        index.normalize = Normalize::buffer;
    } else if (normalize == "none") {
        index.normalize = Normalize::none;
    } else {
        refuse_settings("sampler: normalize: unknown '" + normalize + "'");
    }
    const json::Value& new_rows = sampler.at("new_rows", "sampler");
    if (new_rows.is_number()) {
        index.new_rows = NewRows::constant;
        index.new_priority = static_cast<float>(number_in(sampler, "new_rows", 0, 1e30));
    } else if (new_rows.text("new_rows") == "live_max") {
        index.new_rows = NewRows::live_max;
    } else if (new_rows.text("new_rows") == "running_max") {
        index.new_rows = NewRows::running_max;
    } else {
        refuse_settings("sampler: new_rows: unknown '" + new_rows.text("new_rows") + "'");
    }
}

}  // namespace

RowSettings::RowSettings(const json::Value& description) {
    read_view(description.at("view", "description"));
    read_sampler(description.at("sampler", "description"));
    read_pace(description.at("pace", "description"));
}

void RowSettings::read_view(const json::Value& view) {
    const std::string& kind = view.at("kind", "view").text("view: kind");
    n_step_ = static_cast<std::uint32_t>(whole_in(view, "n_step", 1, 10'000));
    gamma_ = number_in(view, "gamma", 0, 1);
    has_truncated_ = truth_or(view, "truncated", false);
    if (kind == "Transitions") {
        const json::Value* hindsight = view.find("hindsight");
        if (hindsight && !hindsight->is_null()) {
            throw Error(
                ErrorKind::schema,
                "the view is Transitions(hindsight=Hindsight(...)), whose reward is a function of Python (" +
                    hindsight->at("reward", "hindsight").text("reward") +
                    "); C++ cannot call it: sample this buffer from Python, or relabel in C++ what a buffer with "
                    "another view gives");
        }
        return;
    }
    if (kind != "Windows") refuse_settings("view: unknown kind '" + kind + "'");
    constexpr std::int64_t kMostRows = 1'000'000;
    const std::string& end = view.at("end", "view").text("view: end");
    const std::string& start = view.at("start", "view").text("view: start");
    if (end != "pad" && end != "stop" && end != "cross") refuse_settings("view: end: unknown '" + end + "'");
    if (start != "uniform" && start != "episode" && start != "per_episode")
        refuse_settings("view: start: unknown '" + start + "'");
    windows_ = WindowConfig{whole_in(view, "length", 1, kMostRows), whole_in(view, "burn_in", 0, kMostRows),
                            whole_in(view, "bootstrap", 0, kMostRows), end == "cross"};
    has_place_indices_ = truth_or(view, "place_indices", false);
    starts_.needs = end == "pad" ? StartRule::Needs::nothing : StartRule::Needs::rows;
    starts_.length = windows_->length;
    starts_.stride = whole_in(view, "stride", 1, kMostRows);
    starts_.across = end == "cross";
    starts_.first_rows = start == "episode";
    starts_.per_episode = start == "per_episode";
}

void RowSettings::read_sampler(const json::Value& sampler) {
    const std::string& kind = sampler.at("kind", "sampler").text("sampler: kind");
    const Order order = order_of(kind);
    is_prioritized_ = kind == "Prioritized";
    if (sampler.find("newest")) newest_ = whole_in(sampler, "newest", 0, kMany);
    const std::uint64_t reads = max_reads(sampler);
    if (kind == "Uniform" && reads == 0 && starts_.is_any()) return;
    RowIndexConfig index;
    index.starts = starts_;
    index.order = order;
    if (order == Order::recent) index.recent = whole_in(sampler, "n", 1, kMany);
    index.max_reads = reads;
    if (is_prioritized_) {
        read_priorities(sampler, index);
    } else {
        index.eps = 0;
        index.stratified = false;
        index.normalize = Normalize::none;
        index.new_rows = NewRows::constant;
        index.new_priority = order == Order::shuffle ? 0 : 1;  // rows get their mass when an epoch begins
    }
    index_ = index;
}

void RowSettings::read_pace(const json::Value& pace) {
    if (pace.is_null()) return;
    const std::vector<json::Value>& numbers = pace.list("pace");
    if (numbers.size() != 4) refuse_settings("pace: expected four numbers");
    pace_ = PaceConfig{numbers[0].number("pace"), numbers[1].number("pace"), numbers[2].number("pace"),
                       numbers[3].number("pace")};
    if (!(pace_->min_size >= 1 && pace_->ratio > 0 && pace_->ratio <= 1e15 && pace_->min_diff <= pace_->max_diff)) {
        refuse_settings("pace: out of its bounds");
    }
}

void RowSettings::put(RowSpec& spec) const {
    spec.is_prioritized = is_prioritized_;
    spec.least_batch = newest_ > 1 ? newest_ : 1;
    if (index_ && index_->order != Order::weighted && index_->order != Order::recent) {
        spec.most_batch = std::min(spec.most_batch, spec.capacity);
    }
    spec.config.view.n_step = n_step_;
    spec.config.view.gamma = gamma_;
    spec.config.index = index_;
    spec.config.windows = windows_;
    spec.config.newest = newest_;
    spec.pace = pace_;
    spec.has_truncated = has_truncated_;
    spec.has_place_indices = has_place_indices_;
    spec.places = windows_ ? windows_->length + windows_->burn_in + windows_->bootstrap : 0;
}

}  // namespace sharpwave
