// What candidates cost, in milliseconds: tests/reference/time_cost.py has the formulas. Knows nothing of Python.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <vector>

#include "rows.hpp"

namespace kv {

constexpr std::size_t kTiers = 4;

// The reference engine's times in seconds. Source: worker_agent/engines/simulated/timing.py (H200, 8B parameters).
constexpr double kFirstS = 17.0e-3;
constexpr double kPrefillTokenS = 22.8e-6, kPrefillPairS = 0.830e-9;
constexpr double kStepS = 5.52e-3, kStepSequenceS = 12.7e-6, kStepKvTokenS = 34.7e-9;

// What costs are computed of at one of the ranks that serve a model.
struct RankNumbers {
    std::array<std::int32_t, kTiers> held{};  // leading blocks of the request on tiers 0..t
    i64 predicted = 0, queued = 0, requests = 0, blocks = 0, shared = 0;
    i64 capacity = 0;                // blocks of KV; 0: not known
    double trust = 1.0;              // share of the overlap that is credited
    double prefill = 0, decode = 0;  // learnt factors

    i64 expected() const { return std::max<i64>(held[0], predicted); }
    // Blocks that the rank lacks for its promised requests and one more; 0 where its capacity is not known.
    i64 over(i64 own_blocks) const { return capacity == 0 ? 0 : std::max<i64>(0, blocks - shared + own_blocks - capacity); }
    // Expected blocks that will be evicted before the request is computed: nothing in use holds them, and room is short.
    i64 lost(i64 own_blocks) const { return std::min(over(own_blocks), std::max<i64>(0, expected() - shared)); }
};

// What a decision reads of a request, beside the ranks that it excludes. The texts are those of the caller's request.
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

// The terms of every candidate.
class Costs {
public:
    // In the order of the fields of `CostTerms`.
    enum Field {
        kCredit, kMultiplier, kCost, kWaitMs, kPrefillMs, kLatenessMs, kStallMs, kDecodeMs, kSlowdownMs, kLost, kFields
    };

    Costs() = default;
    // Costs of another's making, without terms.
    explicit Costs(const std::vector<double>& given) : Costs(given.size(), false) {
        std::copy(given.begin(), given.end(), out(kCost));
        std::fill_n(out(kMultiplier), count, otherwise(kMultiplier));
    }
    // Costs of the ranks at `places`. `output_tokens`: that the answer is expected to have. `multiplier`: of each rank's cost; empty: none.
    static Costs in_ms(const std::vector<RankNumbers>& ranks, const std::vector<u32>& places, const Request& request, double output_tokens,
                       const Weights& weights, const std::vector<double>& multiplier) {
        constexpr double kToken = 1e3 * kPrefillTokenS, kPair = 1e3 * kPrefillPairS;
        constexpr double kStep = 1e3 * kStepS, kSequence = 1e3 * kStepSequenceS, kKvToken = 1e3 * kStepKvTokenS;
        const double tokens = static_cast<double>(request.isl_tokens), block_size = static_cast<double>(request.block_size);
        const double own_blocks = static_cast<double>(request.own_blocks()), lateness_ms = 1e3 * weights.lateness_s;
        const double own_ms = kSequence + own_blocks * block_size * kKvToken;
        Costs made(places.size(), true);
        double *const wait = made.out(kWaitMs), *const prefill = made.out(kPrefillMs), *const lateness = made.out(kLatenessMs);
        double *const stall = made.out(kStallMs), *const decode = made.out(kDecodeMs), *const slowdown = made.out(kSlowdownMs);
        double *const cost = made.out(kCost), *const credit = made.out(kCredit), *const lost = made.out(kLost);
        double* const factor = made.out(kMultiplier);
        for (std::size_t at = 0; at < made.count; ++at) {
            const u32 place = places[at];
            const RankNumbers& rank = ranks[place];
            lost[at] = static_cast<double>(rank.lost(request.own_blocks()));
            if (request.is_prefilled) {
                credit[at] = credited(rank, lost[at], weights);
                const double left = tokens - credit[at] * block_size;
                const double uncached = left > 0.0 ? left : 0.0;
                const double pairs = uncached * (tokens - uncached * 0.5);
                wait[at] = static_cast<double>(rank.queued) * kToken * rank.prefill;
                prefill[at] = (uncached * kToken + pairs * kPair) * rank.prefill;
                const double until_first = wait[at] + prefill[at];
                lateness[at] = until_first * until_first / lateness_ms;
            }
            if (request.is_decoded) {
                const double active = static_cast<double>(rank.requests);
                const double blocks = static_cast<double>(rank.blocks - rank.shared);
                const double kv_tokens = (blocks + own_blocks) * block_size;
                const double step = kStep + (active + 1.0) * kSequence + kv_tokens * kKvToken;
                stall[at] = prefill[at] * active;
                decode[at] = step * output_tokens * rank.decode;
                slowdown[at] = active * own_ms * output_tokens * rank.decode;
            }
            cost[at] = (wait[at] + prefill[at] + lateness[at]) * weights.ttft_weight + stall[at] + decode[at] + slowdown[at];
            factor[at] = multiplier.empty() ? otherwise(kMultiplier) : multiplier[place];
            cost[at] *= factor[at];
        }
        return made;
    }

    // The costs of one candidate alone.
    Costs of(std::size_t at) const {
        Costs made(empty() ? 0 : 1, is_timed);
        for (std::size_t field = 0; field < made.numbers_.size(); ++field) {
            made.numbers_[field] = column(field)[at];
        }
        return made;
    }

    bool is_timed = false;  // computed, not given by a user's mode
    std::size_t count = 0;

    bool empty() const { return count == 0; }
    const double* column(std::size_t field) const { return numbers_.data() + field * count; }
    const double* cost() const { return column(kCost); }
    // The default of a term.
    static double otherwise(std::size_t field) { return field == kMultiplier ? 1.0 : 0.0; }

private:
    Costs(std::size_t candidates, bool timed) : is_timed(timed), count(candidates), numbers_(kFields * candidates) {}
    double* out(std::size_t field) { return numbers_.data() + field * count; }

    // The blocks credited to a rank for what it holds. `lost`: how many of them will be evicted before the request is computed.
    static double credited(const RankNumbers& rank, double lost, const Weights& weights) {
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

    std::vector<double> numbers_;  // term by term
};

}  // namespace kv
