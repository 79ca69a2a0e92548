// Counts and histograms of the decisions that were taken, for metrics. Knows nothing of Python.
#pragma once

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "ordered_map.hpp"

namespace kv {

class Verdict;

using CountsByNames = std::map<std::pair<std::string, std::string>, u64>;

inline void count(CountsByNames& counts, std::string_view first, std::string_view second) {
    ++counts[{std::string(first), std::string(second)}];
}

// `counts[i]` counts what is above `bounds[i - 1]` and at most `bounds[i]`; the last, what is above every bound.
struct Histogram {
    explicit Histogram(std::vector<double> most) : bounds(std::move(most)), counts(bounds.size() + 1) {}

    void add(double seen) {
        ++counts[static_cast<std::size_t>(std::lower_bound(bounds.begin(), bounds.end(), seen) - bounds.begin())];
        total += seen;
    }

    std::vector<double> bounds;
    std::vector<u64> counts;
    double total = 0;
};

// Seconds that decisions took: to ask the index, all else, and both.
struct StageSums {
    void add(double match_s, double choose_s) {
        match.add(match_s);
        choose.add(choose_s);
        total.add(match_s + choose_s);
    }

    Histogram match{{1e-5, 2.5e-5, 6e-5, 1.6e-4, 4e-4, 1e-3, 2.5e-3, 6e-3, 0.016, 0.04, 0.1, 0.25, 1.0}};
    Histogram choose{match.bounds}, total{match.bounds};
};

struct DecisionSums {
    CountsByNames decisions;  // by policy and reason
    Histogram regret_blocks{{0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096}};
    Histogram margin_s{{0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100}};
    i64 predicted_blocks = 0;  // blocks that winners were expected to hold, and did not hold yet
    u64 approximate = 0;       // decisions for ranks without events

    void add(const Verdict& verdict);
};

}  // namespace kv
