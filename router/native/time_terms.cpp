#include "time_terms.hpp"

#include <algorithm>
#include <cmath>

namespace kv {

void credit_blocks(const CreditRules& rules, const Sizes& sizes, const RankColumns& ranks, std::size_t count, double* out) {
    std::fill(out, out + count, 0.0);
    if (rules.overlap_credit == 0.0) {
        return;
    }
    std::int64_t least = count == 0 ? 0 : ranks.queued_tokens[0];
    bool has_lower_tiers = false;
    for (std::size_t at = 0; at < count; ++at) {
        least = std::min(least, ranks.queued_tokens[at]);
        has_lower_tiers = has_lower_tiers || ranks.device[at] != ranks.disk[at];
    }
    const double own_tokens = std::max(1.0, sizes.own_blocks * sizes.block_size);
    for (std::size_t at = 0; at < count; ++at) {
        const std::int64_t predicted = ranks.predicted[at];
        const std::int64_t device = std::max<std::int64_t>(ranks.device[at], predicted);
        double credit = static_cast<double>(device) * rules.overlap_credit;
        if (rules.decay != 0.0) {
            const double excess = static_cast<double>(ranks.queued_tokens[at] - least) / own_tokens;
            credit *= 1.0 / (rules.decay * excess + 1.0);
        }
        if (has_lower_tiers) {
            const std::int64_t host = std::max<std::int64_t>(ranks.host[at], predicted);
            const std::int64_t disk = std::max<std::int64_t>(ranks.disk[at], predicted);
            credit += static_cast<double>(host - device) * rules.host_weight;
            credit += static_cast<double>(disk - host) * rules.disk_weight;
        }
        out[at] = ranks.trust_factor.data == nullptr ? credit : credit * ranks.trust_factor[at];
    }
}

void time_terms(const ReferenceEngine& engine, const Sizes& sizes, const RankColumns& ranks, std::size_t count,
                double* out) {
    double* const wait = out;
    double* const prefill = wait + count;
    double* const lateness = prefill + count;
    double* const stall = lateness + count;
    double* const decode = stall + count;
    double* const slowdown = decode + count;
    double* const cost = slowdown + count;
    const double* const credit = cost + count;
    std::fill(out, cost, 0.0);
    const double own_ms = engine.sequence + sizes.own_blocks * sizes.block_size * engine.kv_token;
    for (std::size_t at = 0; at < count; ++at) {
        if (sizes.is_prefilled) {
            const double left = sizes.tokens - credit[at] * sizes.block_size;
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

namespace {

double whole(const FactorRules& rules, double believed, double mean) {
    const double far = std::max(believed, mean) / std::min(believed, mean);
    const double taken = std::min(far, std::max(1.0, 1.0 + (far - rules.alike) * rules.ramp));
    return believed < mean ? mean / taken : mean * taken;
}

double lessened(const FactorRules& rules, double believed, double mean) {
    return std::min(std::max(mean, believed / rules.alike), believed * rules.alike);
}

}  // namespace

void used_factors(const FactorRules& rules, const RankFactors& ranks, const ModelFactor& model, double now_s, bool is_whole,
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
        out[at] = (is_whole ? whole(rules, believed, model.mean) : lessened(rules, believed, model.mean)) * model.shared;
    }
}

}  // namespace kv
