// What candidates cost, in milliseconds: tests/reference/time_cost.py has the formulas. Knows nothing of Python.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>

#include "rows.hpp"

namespace kv {

constexpr std::size_t kTiers = 4;

// The reference engine's times in seconds. Source: worker_agent/engines/simulated/timing.py (H200, 8B parameters).
constexpr double kFirstS = 17.0e-3;
constexpr double kPrefillTokenS = 22.8e-6, kPrefillPairS = 0.830e-9;
constexpr double kStepS = 5.52e-3, kStepSequenceS = 12.7e-6, kStepKvTokenS = 34.7e-9;

// The numbers from which the cost at one rank is computed: `RANK_NUMBERS` of router/decision/view.py.
struct RankNumbers {
    std::array<std::int32_t, kTiers> held{};  // at t: leading blocks of the request on tiers 0..t
    i64 predicted = 0, queued = 0, requests = 0, blocks = 0, shared = 0;
    i64 capacity = 0;                // blocks of KV; 0: not known
    double trust = 1.0;              // share of the overlap that is credited
    double prefill = 0, decode = 0;  // learnt factors; 0: they were not read

    i64 expected() const { return std::max<i64>(held[0], predicted); }
    // Blocks that the rank lacks for its promised requests and one more; 0 if its capacity is not known.
    i64 over(i64 own_blocks) const { return capacity == 0 ? 0 : std::max<i64>(0, blocks - shared + own_blocks - capacity); }
    // How many of the `expected()` blocks will be evicted before the request is computed: `over` of them, but none that
    // promised requests use.
    i64 lost(i64 own_blocks) const { return std::min(over(own_blocks), std::max<i64>(0, expected() - shared)); }
};

// What a decision reads of a request, beside the ranks that it excludes. The texts are views of what the caller keeps.
struct Request {
    std::string_view decision_id, model, session_id, tenant, lora;
    i64 isl_tokens, block_size, max_tokens, expected_osl;
    i64 known_tokens;  // `isl_tokens`, or 0 if it is an estimate
    bool is_prefilled, is_decoded, is_pinned;
    std::optional<double> ttft_target_s, itl_target_s;
    Chain blocks;

    i64 own_blocks() const { return (isl_tokens + block_size - 1) / block_size; }
    i64 reusable_blocks() const { return std::max<i64>(0, isl_tokens - 1) / block_size; }
    // How many of `blocks` a cache could provide.
    std::size_t reusable() const { return std::min(static_cast<std::size_t>(reusable_blocks()), blocks.size()); }
};

// The fields of `router.decision.policy.CostParameters`, in their order.
struct Weights {
    double overlap_credit, host_weight, disk_weight, ttft_weight, lateness_s;
};

// The terms of a candidate's cost: the fields of `CostTerms`, in their order.
struct Terms {
    double credit = 0, multiplier = 1, cost = 0;
    double wait_ms = 0, prefill_ms = 0, lateness_ms = 0, stall_ms = 0, decode_ms = 0, slowdown_ms = 0;
    double lost = 0;
};
using TermNumbers = std::array<double, sizeof(Terms) / sizeof(double)>;

inline TermNumbers numbers_of(const Terms& terms) {
    TermNumbers numbers;
    std::memcpy(&numbers, &terms, sizeof(Terms));
    return numbers;
}

// The blocks credited to a rank for what it holds. `lost`: how many of them will be evicted before the request is computed.
inline double credited(const RankNumbers& rank, double lost, const Weights& weights) {
    if (weights.overlap_credit == 0.0) {
        return 0.0;
    }
    const auto [gpu, cpu, below, _] = rank.held;
    const i64 device = rank.expected(), host = std::max<i64>(cpu, rank.predicted), disk = std::max<i64>(below, rank.predicted);
    double credit = static_cast<double>(device) * weights.overlap_credit;
    credit += static_cast<double>(host - device) * weights.host_weight;
    credit += static_cast<double>(disk - host) * weights.disk_weight;
    const double worth = weights.overlap_credit - (cpu > gpu ? weights.host_weight : 0.0);
    credit = std::max(0.0, credit - lost * worth);
    return credit * rank.trust;
}

// What the request costs at the ranks of `places`. `output_tokens`: expected of the answer. `multiplier`: what multiplies each rank's
// cost; empty: nothing.
inline std::vector<Terms> terms_of(const std::vector<RankNumbers>& ranks, const std::vector<u32>& places, const Request& request,
                                   double output_tokens, const Weights& weights, const std::vector<double>& multiplier) {
    constexpr double kToken = 1e3 * kPrefillTokenS, kPair = 1e3 * kPrefillPairS;
    constexpr double kStep = 1e3 * kStepS, kSequence = 1e3 * kStepSequenceS, kKvToken = 1e3 * kStepKvTokenS;
    const double tokens = static_cast<double>(request.isl_tokens), block_size = static_cast<double>(request.block_size);
    const i64 own = request.own_blocks();
    const double own_blocks = static_cast<double>(own), lateness_ms = 1e3 * weights.lateness_s;
    const double own_ms = kSequence + own_blocks * block_size * kKvToken;
    std::vector<Terms> made(places.size());
    for (std::size_t at = 0; at < places.size(); ++at) {
        const RankNumbers& rank = ranks[places[at]];
        Terms& of = made[at];
        of.lost = static_cast<double>(rank.lost(own));
        if (request.is_prefilled) {
            of.credit = credited(rank, of.lost, weights);
            const double left = tokens - of.credit * block_size;
            const double uncached = left > 0.0 ? left : 0.0;
            const double pairs = uncached * (tokens - uncached * 0.5);
            of.wait_ms = static_cast<double>(rank.queued) * kToken * rank.prefill;
            of.prefill_ms = (uncached * kToken + pairs * kPair) * rank.prefill;
            const double until_first = of.wait_ms + of.prefill_ms;
            of.lateness_ms = until_first * until_first / lateness_ms;
        }
        if (request.is_decoded) {
            const double active = static_cast<double>(rank.requests);
            const double blocks = static_cast<double>(rank.blocks - rank.shared);
            const double kv_tokens = (blocks + own_blocks) * block_size;
            const double step = kStep + (active + 1.0) * kSequence + kv_tokens * kKvToken;
            of.stall_ms = of.prefill_ms * active;
            of.decode_ms = step * output_tokens * rank.decode;
            of.slowdown_ms = active * own_ms * output_tokens * rank.decode;
        }
        of.cost = (of.wait_ms + of.prefill_ms + of.lateness_ms) * weights.ttft_weight + of.stall_ms + of.decode_ms + of.slowdown_ms;
        of.multiplier = multiplier.empty() ? 1.0 : multiplier[places[at]];
        of.cost *= of.multiplier;
    }
    return made;
}

}  // namespace kv
