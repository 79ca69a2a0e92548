#include "time_terms.hpp"

#include <algorithm>
#include <cmath>

namespace kv {

void time_terms(const ReferenceEngine& engine, const Sizes& sizes, const RankColumns& ranks, std::size_t count,
                double* out) {
    double* const wait = out;
    double* const prefill = wait + count;
    double* const lateness = prefill + count;
    double* const stall = lateness + count;
    double* const decode = stall + count;
    double* const slowdown = decode + count;
    double* const cost = slowdown + count;
    std::fill(out, out + kTerms * count, 0.0);
    const double own_ms = engine.sequence + sizes.own_blocks * sizes.block_size * engine.kv_token;
    for (std::size_t at = 0; at < count; ++at) {
        if (sizes.is_prefilled) {
            const double left = sizes.tokens - ranks.credit[at] * sizes.block_size;
            const double uncached = left > 0.0 ? left : 0.0;
            const double pairs = uncached * (sizes.tokens - uncached * 0.5);
            wait[at] = static_cast<double>(ranks.queued_tokens[at]) * engine.token * ranks.prefill[at];
            prefill[at] = (uncached * engine.token + pairs * engine.pair) * ranks.prefill[at];
            const double until_first = wait[at] + prefill[at];
            lateness[at] = until_first * until_first / sizes.lateness_ms;
        }
        if (sizes.is_decoded) {
            const double active = static_cast<double>(ranks.active_requests[at]);
            const double blocks = static_cast<double>(ranks.active_blocks[at] - ranks.shared_blocks[at]);
            const double kv_tokens = (blocks + sizes.own_blocks) * sizes.block_size;
            const double step = engine.step + (active + 1.0) * engine.sequence + kv_tokens * engine.kv_token;
            stall[at] = prefill[at] * active;
            decode[at] = step * sizes.output_tokens * ranks.decode[at];
            slowdown[at] = active * own_ms * sizes.output_tokens * ranks.decode[at];
        }
        cost[at] = (wait[at] + prefill[at] + lateness[at]) * sizes.ttft_weight + stall[at] + decode[at] + slowdown[at];
    }
}

void used_factors(const FactorRules& rules, const RankFactors& ranks, const ModelFactor& model, double now_s,
                  std::size_t count, double* out) {
    bool is_any_old = false;
    for (std::size_t at = 0; at < count; ++at) {
        is_any_old = is_any_old || now_s - ranks.measured_s[at] >= rules.forget_s;
    }
    for (std::size_t at = 0; at < count; ++at) {
        double left = (ranks.own[at] - model.mean) * ranks.belief[at];
        if (is_any_old) {
            const double ages = std::max((now_s - ranks.measured_s[at]) / rules.forget_s, 0.0);
            const int halvings = static_cast<int>(std::min(ages, static_cast<double>(rules.halvings_max)));
            left = left * std::ldexp(1.0, -halvings);
        }
        const double believed = model.mean + left;
        out[at] = std::min(std::max(model.mean, believed / rules.alike), believed * rules.alike) * model.shared;
    }
}

}  // namespace kv
