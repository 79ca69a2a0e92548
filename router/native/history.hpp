// The decaying sum of each rank's prefill work: tests/reference/history.py has the rules. Knows nothing of Python.
#pragma once

#include <cmath>

#include "rows.hpp"

namespace kv {

class History {
public:
    explicit History(Ranks& ranks) : ranks_(ranks), sums_(ranks) {}

    void add(u32 row, double blocks, double now_s) {
        as_of_s = as_of_s.value_or(now_s);
        double halvings = (now_s - *as_of_s) / kHalfLifeS;
        if (halvings > kHalvingsMax) {
            const double whole = std::floor(halvings);
            for (const u32 each : sums_.rows()) {
                sums_[each] *= std::ldexp(1.0, -static_cast<int>(whole));
            }
            *as_of_s += whole * kHalfLifeS;
            halvings = (now_s - *as_of_s) / kHalfLifeS;
        }
        sums_.add(row) += blocks * std::exp2(halvings);
    }
    void column(const u32* rows, std::size_t count, double now_s, double* out) const {
        const double factor = as_of_s.has_value() ? std::exp2((*as_of_s - now_s) / kHalfLifeS) : 1.0;
        for (std::size_t at = 0; at < count; ++at) {
            const double* const sum = sums_.find(rows[at]);
            out[at] = (sum == nullptr ? 0.0 : *sum) * factor;
        }
    }
    void forget(std::string_view worker_id) {
        for (const u32 row : sums_.of(worker_id)) {
            sums_.erase(row);
        }
    }

    void rows(Parts& parts) const {
        for (const u32 row : sums_.rows()) {
            parts.row(ranks_.key(row), sums_[row]);
        }
    }
    void restore(Unpack& in) {
        RankKey key;
        double blocks = 0;
        in.row(key, blocks);
        const Held rank(ranks_, key);
        sums_.add(rank.row()) = blocks;
    }
    std::optional<double> as_of_s;  // the moment of all sums; none: nothing was routed

private:
    static constexpr double kHalfLifeS = 30.0, kHalvingsMax = 64.0;

    Ranks& ranks_;
    RankMap<double> sums_;
};

}  // namespace kv
