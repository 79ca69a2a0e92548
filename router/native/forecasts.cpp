#include "forecasts.hpp"

#include <algorithm>

namespace kv {

namespace {

constexpr double kForgetting = 0.99, kNoise = 0.2, kFloorS = 1e-3, kOutlier = 3.0, kUncertainty = 3.0, kVarianceMax = 1e4,
                 kVarianceMin = 1e-6, kFeatureMax = 1e9;

// As Python squares a float: by `pow`, whose last bit may differ from the product's.
double squared(double value) {
    const volatile double two = 2.0;
    return std::pow(value, two);
}

double dot(const std::vector<double>& left, const std::vector<double>& right) {
    double total = 0.0;
    for (std::size_t at = 0; at < left.size(); ++at) {
        total += left[at] * right[at];
    }
    return total;
}

}  // namespace

LatencyModel::LatencyModel(Ranks& ranks, std::vector<double> coefficients, std::vector<double> scales)
    : ranks_(ranks), law_(std::move(coefficients)), scales_(std::move(scales)), fits_(ranks) {
    for (std::size_t at = 0; at < law_.size(); ++at) {
        variances_.push_back(squared(kUncertainty * law_[at] * scales_[at]));
    }
}

void LatencyModel::learn(u32 row, const std::vector<double>& features, double seconds) {
    const bool is_possible = 0.0 < seconds && seconds <= kSecondsMax &&
                             std::all_of(features.begin(), features.end(), [](double each) { return 0.0 <= each && each <= kFeatureMax; });
    if (!is_possible) {
        ++refused_total;
        return;
    }
    const bool is_new = fits_.find(row) == nullptr;
    Fit& fit = fits_.add(row);
    if (is_new) {
        fit.covariance.assign(law_.size(), std::vector<double>(law_.size()));
        for (std::size_t at = 0; at < law_.size(); ++at) {
            fit.weights.push_back(law_[at] * scales_[at]);
            fit.covariance[at][at] = variances_[at];
        }
    }
    std::vector<double> scaled{1.0 / scales_[0]};
    for (std::size_t at = 0; at < features.size(); ++at) {
        scaled.push_back(features[at] / scales_[at + 1]);
    }
    update(fit, scaled, seconds);
    show(fit);
}

void LatencyModel::update(Fit& fit, const std::vector<double>& features, double seconds) const {
    std::vector<double> reach, growth;
    for (const std::vector<double>& row : fit.covariance) {
        reach.push_back(dot(row, features));
    }
    const double predicted = dot(fit.weights, features);
    const double spread = dot(features, reach) + squared(kNoise * std::max(predicted, kFloorS));
    const double bound = kOutlier * std::sqrt(spread);
    const double error = std::min(std::max(seconds - predicted, -bound), bound);
    for (std::size_t at = 0; at < reach.size(); ++at) {
        fit.weights[at] = std::max(0.0, fit.weights[at] + reach[at] * error / spread);
        for (std::size_t other = 0; other < reach.size(); ++other) {
            fit.covariance[at][other] = fit.covariance[at][other] - reach[at] * reach[other] / spread;
        }
        double& left = fit.covariance[at][at];
        left = std::max(left, kVarianceMin * variances_[at]);
        growth.push_back(std::sqrt(std::max(1.0, std::min(1.0 / kForgetting, kVarianceMax * variances_[at] / left))));
    }
    for (std::size_t at = 0; at < reach.size(); ++at) {
        for (std::size_t other = 0; other < reach.size(); ++other) {
            fit.covariance[at][other] = fit.covariance[at][other] * growth[at] * growth[other];
        }
    }
}

void LatencyModel::show(Fit& fit) const {
    fit.coefficients.resize(law_.size());
    for (std::size_t at = 0; at < law_.size(); ++at) {
        fit.coefficients[at] = fit.weights[at] / scales_[at];
    }
}

const std::vector<double>& LatencyModel::coefficients(u32 row) const {
    const Fit* const fit = fits_.find(row);
    return fit == nullptr ? law_ : fit->coefficients;
}

void LatencyModel::forget(std::string_view worker_id) {
    for (const u32 row : fits_.of(worker_id)) {
        fits_.erase(row);
    }
}

void LatencyModel::rows(Parts& parts) const {
    for (const u32 row : fits_.rows()) {
        parts.row(ranks_.key(row), fits_[row].weights, fits_[row].covariance);
    }
}

void LatencyModel::restore(Unpack& in) {
    RankKey key;
    Fit fit;
    in.row(key, fit.weights, fit.covariance);
    const auto is_other = [this](const std::vector<double>& row) { return row.size() != law_.size(); };
    if (is_other(fit.weights) || fit.covariance.size() != law_.size() ||
        std::any_of(fit.covariance.begin(), fit.covariance.end(), is_other)) {
        throw std::invalid_argument("a fit has another number of features");
    }
    show(fit);
    const Held rank(ranks_, key);
    fits_.add(rank.row()) = std::move(fit);
}

Forecasts::Forecasts(Ranks& ranks)
    : ttft(ranks, {17.0e-3, 24.4e-6, 24.4e-6, 48e-6}, {1.0, 4096.0, 4096.0, 64.0}),
      itl(ranks, {5.52e-3, 12.7e-6, 1.11e-6}, {1.0, 64.0, 4096.0}),
      ranks_(ranks) {}

double Forecasts::ttft_s(u32 row, i64 uncached, i64 queued, i64 running) const {
    const std::vector<double>& of = ttft.coefficients(row);
    double seconds = of[0];
    seconds += of[1] * static_cast<double>(uncached);
    seconds += of[2] * static_cast<double>(queued);
    seconds += of[3] * static_cast<double>(running);
    return seconds;
}

double Forecasts::itl_s(u32 row, i64 running, i64 blocks) const {
    const std::vector<double>& of = itl.coefficients(row);
    double seconds = of[0];
    seconds += of[1] * static_cast<double>(running);
    seconds += of[2] * static_cast<double>(blocks);
    return seconds;
}

void Forecasts::decided(std::string_view decision_id, Features features) {
    if (pending_.size() >= kPendingMax) {
        pending_.erase_first();
    }
    pending_.put(decision_id, std::move(features));
}

void Forecasts::ended(std::string_view decision_id, const Outcome& outcome) {
    const std::optional<Features> known = pending_.pop(decision_id);
    if (!known.has_value() || !outcome.is_ok) {
        return;
    }
    if (outcome.ttft_s.has_value()) {
        ttft.learn(known->rank.row(), {known->uncached_tokens, known->queued_tokens, known->running_requests}, *outcome.ttft_s);
    }
    if (outcome.itl_s.has_value()) {
        itl.learn(known->rank.row(), {known->running_requests, known->active_blocks}, *outcome.itl_s);
    }
}

void Forecasts::forget(std::string_view worker_id) {
    ttft.forget(worker_id);
    itl.forget(worker_id);
    pending_.erase_if([&](const auto&, const Features& each) { return each.rank.key().worker_id == worker_id; });
}

void Forecasts::rows(Parts& parts) const {
    for (const auto& [decision_id, each] : pending_) {
        Pack packed;
        packed.array(2);
        packed.put(decision_id);
        packed.row(each.rank, each.uncached_tokens, each.queued_tokens, each.running_requests, each.active_blocks);
        parts.packed(packed.view());
    }
}

void Forecasts::restore(Unpack& in) {
    std::string decision_id;
    RankKey key;
    double uncached_tokens = 0, queued_tokens = 0, running_requests = 0, active_blocks = 0;
    if (in.array() != 2) {
        throw std::invalid_argument("a decision has 2 fields");
    }
    in.take(decision_id);
    in.row(key, uncached_tokens, queued_tokens, running_requests, active_blocks);
    pending_.put(decision_id, Features{Held(ranks_, key), uncached_tokens, queued_tokens, running_requests, active_blocks});
}

}  // namespace kv
