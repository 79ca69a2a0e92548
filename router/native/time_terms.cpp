#include "costs.hpp"

namespace kv {

void credit_blocks(const RankNumbers& ranks, const Question& question, const Weights& weights, double* out) {
    const std::size_t count = ranks.count;
    std::fill(out, out + count, 0.0);
    if (weights.overlap_credit == 0.0 || count == 0) {
        return;
    }
    const std::int32_t *const gpu = ranks.tiers.data(), *const cpu = gpu + count, *const below = cpu + count;
    const i64 least = *std::min_element(ranks.queued.begin(), ranks.queued.end());
    const bool has_lower_tiers = !std::equal(gpu, gpu + count, below);
    const double own_tokens = std::max(1.0, static_cast<double>(question.own_blocks * question.block_size));
    for (std::size_t at = 0; at < count; ++at) {
        const i64 predicted = ranks.predicted[at], device = std::max<i64>(gpu[at], predicted);
        double credit = static_cast<double>(device) * weights.overlap_credit;
        if (weights.overlap_credit_decay != 0.0) {
            const double excess = static_cast<double>(ranks.queued[at] - least) / own_tokens;
            credit *= 1.0 / (weights.overlap_credit_decay * excess + 1.0);
        }
        if (has_lower_tiers) {
            const i64 host = std::max<i64>(cpu[at], predicted), disk = std::max<i64>(below[at], predicted);
            credit += static_cast<double>(host - device) * weights.host_weight;
            credit += static_cast<double>(disk - host) * weights.disk_weight;
        }
        if (question.foresees_evictions) {
            const double worth = weights.overlap_credit - (cpu[at] > gpu[at] ? weights.host_weight : 0.0);
            credit = std::max(0.0, credit - static_cast<double>(ranks.lost(at, question.own_blocks)) * worth);
        }
        out[at] = ranks.trust.empty() ? credit : credit * ranks.trust[at];
    }
}

void time_terms(const RankNumbers& ranks, const Question& question, const Weights& weights, double* out) {
    constexpr double kToken = 1e3 * kPrefillTokenS, kPair = 1e3 * kPrefillPairS;
    constexpr double kStep = 1e3 * kStepS, kSequence = 1e3 * kStepSequenceS, kKvToken = 1e3 * kStepKvTokenS;
    const std::size_t count = ranks.count;
    double* const wait = out;
    double* const prefill = wait + count;
    double* const lateness = prefill + count;
    double* const stall = lateness + count;
    double* const decode = stall + count;
    double* const slowdown = decode + count;
    double* const cost = slowdown + count;
    const double* const credit = cost + count;
    std::fill(out, cost, 0.0);
    const double tokens = static_cast<double>(question.tokens), block_size = static_cast<double>(question.block_size);
    const double own_blocks = static_cast<double>(question.own_blocks), lateness_ms = 1e3 * weights.lateness_s;
    const double own_ms = kSequence + own_blocks * block_size * kKvToken;
    for (std::size_t at = 0; at < count; ++at) {
        if (question.is_prefilled) {
            const double left = tokens - credit[at] * block_size;
            const double uncached = left > 0.0 ? left : 0.0;
            const double pairs = uncached * (tokens - uncached * 0.5);
            wait[at] = static_cast<double>(ranks.queued[at]) * kToken * ranks.prefill[at];
            prefill[at] = (uncached * kToken + pairs * kPair) * ranks.prefill[at];
            const double until_first = wait[at] + prefill[at];
            lateness[at] = until_first * until_first / lateness_ms;
        }
        if (question.is_decoded) {
            const double active = static_cast<double>(ranks.requests[at]);
            const double blocks = static_cast<double>(ranks.blocks[at] - ranks.shared[at]);
            const double kv_tokens = (blocks + own_blocks) * block_size;
            const double step = kStep + (active + 1.0) * kSequence + kv_tokens * kKvToken;
            stall[at] = prefill[at] * active;
            decode[at] = step * question.output_tokens * ranks.decode[at];
            slowdown[at] = active * own_ms * question.output_tokens * ranks.decode[at];
        }
        cost[at] = (wait[at] + prefill[at] + lateness[at]) * weights.ttft_weight + stall[at] + decode[at] + slowdown[at];
    }
}

}  // namespace kv
