#include "costs.hpp"

namespace kv {

namespace {

template <typename Number>
std::pmr::vector<Number> picked(const std::pmr::vector<Number>& all, const std::vector<u32>& places) {
    std::pmr::vector<Number> some;
    some.reserve(all.empty() ? 0 : places.size());
    for (std::size_t at = 0; at < places.size() && !all.empty(); ++at) {
        some.push_back(all[places[at]]);
    }
    return some;
}

// Sets `out` to the blocks credited to each rank for what it holds. `lost`: of each rank, how many of them will be evicted before the
// request is computed.
void credit_blocks(const RankNumbers& ranks, const Weights& weights, const double* lost, double* out) {
    const std::size_t count = ranks.count;
    if (weights.overlap_credit == 0.0 || count == 0) {
        return;
    }
    const std::int32_t *const gpu = ranks.tiers.data(), *const cpu = gpu + count, *const below = cpu + count;
    const bool has_lower_tiers = !std::equal(gpu, gpu + count, below);
    for (std::size_t at = 0; at < count; ++at) {
        const i64 predicted = ranks.predicted[at], device = std::max<i64>(gpu[at], predicted);
        double credit = static_cast<double>(device) * weights.overlap_credit;
        if (has_lower_tiers) {
            const i64 host = std::max<i64>(cpu[at], predicted), disk = std::max<i64>(below[at], predicted);
            credit += static_cast<double>(host - device) * weights.host_weight;
            credit += static_cast<double>(disk - host) * weights.disk_weight;
        }
        const double worth = weights.overlap_credit - (cpu[at] > gpu[at] ? weights.host_weight : 0.0);
        credit = std::max(0.0, credit - lost[at] * worth);
        out[at] = ranks.trust.empty() ? credit : credit * ranks.trust[at];
    }
}

}  // namespace

RankNumbers::RankNumbers(const RankNumbers& all, const std::vector<u32>& places)
    : count(places.size()), predicted(picked(all.predicted, places)), queued(picked(all.queued, places)),
      requests(picked(all.requests, places)), blocks(picked(all.blocks, places)), shared(picked(all.shared, places)),
      capacity(picked(all.capacity, places)), trust(picked(all.trust, places)), prefill(picked(all.prefill, places)),
      decode(picked(all.decode, places)) {
    tiers.reserve(kTiers * count);
    for (std::size_t tier = 0; tier < kTiers; ++tier) {
        for (const u32 place : places) {
            tiers.push_back(all.tiers[tier * all.count + place]);
        }
    }
}

Costs Costs::in_ms(const RankNumbers& ranks, const Question& question, const Weights& weights,
                   const std::vector<double>& multiplier) {
    constexpr double kToken = 1e3 * kPrefillTokenS, kPair = 1e3 * kPrefillPairS;
    constexpr double kStep = 1e3 * kStepS, kSequence = 1e3 * kStepSequenceS, kKvToken = 1e3 * kStepKvTokenS;
    Costs made(ranks.count, true);
    const auto of = [&made](std::size_t field) { return made.numbers_.data() + field * made.count; };
    double *const wait = of(kWaitMs), *const prefill = of(kPrefillMs), *const lateness = of(kLatenessMs), *const stall = of(kStallMs);
    double *const decode = of(kDecodeMs), *const slowdown = of(kSlowdownMs), *const cost = of(kCost), *const credit = of(kCredit);
    double *const lost = of(kLost), *const factor = of(kMultiplier);
    for (std::size_t at = 0; at < ranks.count; ++at) {
        lost[at] = static_cast<double>(ranks.lost(at, question.own_blocks));
    }
    if (question.is_prefilled) {
        credit_blocks(ranks, weights, lost, credit);
    }
    const double tokens = static_cast<double>(question.tokens), block_size = static_cast<double>(question.block_size);
    const double own_blocks = static_cast<double>(question.own_blocks), lateness_ms = 1e3 * weights.lateness_s;
    const double own_ms = kSequence + own_blocks * block_size * kKvToken;
    for (std::size_t at = 0; at < ranks.count; ++at) {
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
    std::fill_n(factor, ranks.count, otherwise(kMultiplier));
    for (std::size_t at = 0; at < multiplier.size(); ++at) {
        factor[at] = multiplier[at];
        cost[at] *= multiplier[at];
    }
    return made;
}

Costs Costs::given(const std::vector<double>& costs) {
    Costs made(costs.size(), false);
    for (std::size_t at = 0; at < costs.size(); ++at) {
        made.numbers_[kCost * costs.size() + at] = costs[at];
        made.numbers_[kMultiplier * costs.size() + at] = otherwise(kMultiplier);
    }
    return made;
}

}  // namespace kv
