#include "rates.hpp"

#include <algorithm>

namespace kv {

namespace {

constexpr double kGain = 0.03, kRatioMax = 3.0, kRankMax = 2.0, kMax = 64.0, kOutputTokensMax = 1e6, kDoubt = 8.0, kAlike = 1.25;
constexpr i64 kGainFirst = 3, kWeightMax = 32;
constexpr double kForgetS = 30.0, kRamp = (kAlike + 1.0) / kAlike, kHalvingsMax = 64.0;

double gain(i64 measurements) { return std::max(1.0 / static_cast<double>(measurements + kGainFirst), kGain); }

double nearer(double factor, double ratio, i64 measurements) {
    const double near = std::min(std::max(ratio, factor / kRatioMax), factor * kRatioMax);
    return factor + gain(measurements) * (near - factor);
}

double within(double factor, double span) { return std::min(std::max(factor, 1.0 / span), span); }

double belief(i64 measured) { return static_cast<double>(measured) / (static_cast<double>(measured) + kDoubt); }

// The factor to use: `mean` if both are up to `kAlike` times apart, `believed` from `kAlike`^2 on, linear between.
double whole(double believed, double mean) {
    const double far = std::max(believed, mean) / std::min(believed, mean);
    const double taken = std::min(far, std::max(1.0, 1.0 + (far - kAlike) * kRamp));
    return believed < mean ? mean / taken : mean * taken;
}

}  // namespace

double SharedFactor::learn(double own, i64 of_rank, double ratio) {
    shared = within(nearer(shared, ratio / own, measured), kMax);
    ++measured;
    const double learnt = within(nearer(own, ratio / shared, of_rank), kRankMax);
    const i64 before = std::min(of_rank, kWeightMax), after = std::min(of_rank + 1, kWeightMax);
    weighted += learnt * static_cast<double>(after) - own * static_cast<double>(before);
    weights += after - before;
    return learnt;
}

void SharedFactor::left(double own, i64 of_rank) {
    const i64 weight = std::min(of_rank, kWeightMax);
    if (weight != 0 && weight == weights) {
        shared = within(shared * own, kMax);
    }
    weights -= weight;
    weighted = weights != 0 ? weighted - own * static_cast<double>(weight) : 0.0;
}

std::pair<double, bool> Rates::read(std::string_view name, const std::vector<u32>& rows, double now_s, std::vector<RankNumbers>& to) {
    const Model none;
    const ModelRef* const found = models_.find(name);
    const Model& of = found == nullptr ? none : **found;
    const Rank unknown;
    bool is_any_old = false;
    asked_.clear();
    for (const u32 row : rows) {
        const Rank* const known = known_.find(row);
        asked_.push_back(known == nullptr ? &unknown : known);
        is_any_old = is_any_old || (known != nullptr && now_s - known->measured_s >= kForgetS);
    }
    const auto used = [&](double own, i64 measured, double mean, double shared, double measured_s) {
        double left = (own - mean) * belief(measured);
        if (is_any_old) {
            const double ages = std::min(std::max((now_s - measured_s) / kForgetS, 0.0), kHalvingsMax);
            left = left * std::ldexp(1.0, -static_cast<int>(ages));
        }
        return whole(mean + left, mean) * shared;
    };
    const double prefill_mean = of.prefill.mean(), decode_mean = of.decode.mean();
    for (std::size_t at = 0; at < rows.size(); ++at) {
        const Rank& rank = *asked_[at];
        to[at].prefill = used(rank.prefill, rank.prefills, prefill_mean, of.prefill.shared, rank.measured_s);
        to[at].decode = used(rank.decode, rank.decodes, decode_mean, of.decode.shared, rank.measured_s);
    }
    return {of.output_tokens, of.prefill.measured > 0};
}

bool Rates::is_possible(double seconds) {
    const bool is_so = 0.0 < seconds && seconds <= kSecondsMax;
    refused_total += !is_so;
    return is_so;
}

Rates::ModelRef Rates::model(const std::string& name) {
    if (const ModelRef* const known = models_.find(name)) {
        return *known;
    }
    return models_.put(name, std::make_shared<Model>());
}

void Rates::learn(u32 row, const Expected& expected, const Outcome& outcome) {
    if (!outcome.is_ok) {
        return;
    }
    const bool is_new = known_.find(row) == nullptr;
    Rank& rank = known_.add(row);
    if (is_new) {
        rank.name = expected.model;
        rank.model = model(expected.model);
    }
    Model& of = *rank.model;
    if (outcome.ttft_s.has_value() && expected.ttft_s != 0.0 && is_possible(*outcome.ttft_s)) {
        rank.prefill = of.prefill.learn(rank.prefill, rank.prefills, *outcome.ttft_s / expected.ttft_s);
        ++rank.prefills;
    }
    if (outcome.itl_s.has_value() && is_possible(*outcome.itl_s)) {
        rank.decode = of.decode.learn(rank.decode, rank.decodes, *outcome.itl_s / expected.itl_s);
        ++rank.decodes;
    }
    rank.measured_s = outcome.now_s;
    if (outcome.output_tokens != 0) {
        const double tokens = std::min(static_cast<double>(outcome.output_tokens), kOutputTokensMax);
        of.output_tokens += gain(of.answers) * (tokens - of.output_tokens);
        ++of.answers;
    }
}

void Rates::forget(std::string_view worker_id) {
    for (const u32 row : known_.of(worker_id)) {
        const Rank& gone = known_[row];
        gone.model->prefill.left(gone.prefill, gone.prefills);
        gone.model->decode.left(gone.decode, gone.decodes);
        known_.erase(row);
    }
}

void Rates::restore_learnt(const std::string& name, double prefill, double decode, double output_tokens, i64 answers) {
    if (models_.find(name) != nullptr) {
        return;
    }
    Model& made = *model(name);
    made.prefill.shared = prefill;
    made.decode.shared = decode;
    made.output_tokens = output_tokens;
    made.prefill.measured = made.decode.measured = made.answers = answers;
}

std::vector<std::tuple<std::string, double, double, double, i64>> Rates::learnt() const {
    std::vector<std::tuple<std::string, double, double, double, i64>> found;
    for (const auto& [name, each] : models_) {
        found.emplace_back(name, within(each->prefill.shared * each->prefill.mean(), kMax), within(each->decode.shared * each->decode.mean(), kMax),
                           each->output_tokens, each->answers);
    }
    return found;
}

void Rates::model_rows(Part& part) const {
    for (const auto& [name, each] : models_) {
        part.row(name, each->prefill.fields(), each->decode.fields(), each->output_tokens, each->answers);
    }
}

void Rates::restore_model(const Row& row) {
    std::string name;
    Model made;
    row.take(name, made.prefill.fields(), made.decode.fields(), made.output_tokens, made.answers);
    models_.put(name, std::make_shared<Model>(made));
}

void Rates::rank_rows(Part& part) {
    for (const u32 row : known_.rows()) {
        part.row(ranks_.key(row), known_[row].fields());
    }
}

void Rates::restore_rank(const Row& row) {
    RankKey key;
    Rank rank;
    row.take(key, rank.fields());
    const ModelRef* const of = models_.find(rank.name);
    if (of == nullptr) {
        throw std::invalid_argument("a model was not restored");
    }
    rank.model = *of;
    const Held held(ranks_, key);
    known_.add(held.row()) = std::move(rank);
}

}  // namespace kv
