// Predicted latencies of requests, learnt for each rank: tests/reference/forecasts.py has the rules. Knows nothing of Python.
#pragma once

#include "rates.hpp"

namespace kv {

// One linear law of a latency, fitted to each rank by recursive least squares with forgetting.
class LatencyModel {
public:
    LatencyModel(Ranks& ranks, std::vector<double> coefficients, std::vector<double> scales);

    // Features without the constant.
    void learn(u32 row, const std::vector<double>& features, double seconds);
    // The coefficients of the rank; those of the law for one that has served nothing.
    const std::vector<double>& coefficients(u32 row) const;
    void forget(std::string_view worker_id);
    i64 refused_total = 0;

    void rows(Parts& parts) const;
    void restore(Unpack& in);

private:
    struct Fit {
        std::vector<double> weights;  // of the scaled features
        std::vector<std::vector<double>> covariance;
        std::vector<double> coefficients;
    };
    void update(Fit& fit, const std::vector<double>& features, double seconds) const;
    void show(Fit& fit) const;

    Ranks& ranks_;
    const std::vector<double> law_, scales_;
    std::vector<double> variances_;
    RankMap<Fit> fits_;
};

class Forecasts {
public:
    explicit Forecasts(Ranks& ranks);

    struct Features {
        Held rank;
        double uncached_tokens, queued_tokens, running_requests, active_blocks;
    };
    double ttft_s(u32 row, i64 uncached, i64 queued, i64 running) const;
    double itl_s(u32 row, i64 running, i64 blocks) const;
    void decided(std::string_view decision_id, Features features);
    void ended(std::string_view decision_id, const Outcome& outcome);
    void forget(std::string_view worker_id);

    void rows(Parts& parts) const;
    void restore(Unpack& in);
    LatencyModel ttft, itl;

private:
    Ranks& ranks_;
    OrderedMap<Features> pending_;
};

}  // namespace kv
