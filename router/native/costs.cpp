#include "costs.hpp"

namespace kv {

namespace {

constexpr i64 kSpillIsl = 4;
template <typename Number>
std::pmr::vector<Number> picked(const std::pmr::vector<Number>& all, const std::vector<u32>& places) {
    std::pmr::vector<Number> some;
    some.reserve(all.empty() ? 0 : places.size());
    for (std::size_t at = 0; at < places.size() && !all.empty(); ++at) {
        some.push_back(all[places[at]]);
    }
    return some;
}

// Ranks whose credit the gate removes: much is queued there, and little elsewhere.
std::vector<char> spilled(const RankNumbers& ranks, const Question& question, const Weights& weights) {
    const i64 gate = std::max(kSpillIsl * question.tokens, question.spill_tokens);
    const auto [least, most] = std::minmax_element(ranks.queued.begin(), ranks.queued.end());
    if (question.spill_tokens == 0 || weights.overlap_credit == 0.0 || *most <= gate || 2 * *least >= gate) {
        return {};
    }
    std::vector<char> found;
    for (const i64 queued : ranks.queued) {
        found.push_back(queued > gate);
    }
    return found;
}

// Sets `out` to the blocks credited to each rank for what it holds. `lost`: of each rank, how many of them will be evicted before the
// request is computed; null: evictions are not foreseen.
void credit_blocks(const RankNumbers& ranks, const Question& question, const Weights& weights, const double* lost, double* out) {
    const std::size_t count = ranks.count;
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
        if (lost != nullptr) {
            const double worth = weights.overlap_credit - (cpu[at] > gpu[at] ? weights.host_weight : 0.0);
            credit = std::max(0.0, credit - lost[at] * worth);
        }
        out[at] = ranks.trust.empty() ? credit : credit * ranks.trust[at];
    }
}

}  // namespace

RankNumbers::RankNumbers(const RankNumbers& all, const std::vector<u32>& places)
    : count(places.size()), predicted(picked(all.predicted, places)), queued(picked(all.queued, places)),
      requests(picked(all.requests, places)), blocks(picked(all.blocks, places)), shared(picked(all.shared, places)),
      capacity(picked(all.capacity, places)),
      history(picked(all.history, places)), trust(picked(all.trust, places)), prefill(picked(all.prefill, places)),
      decode(picked(all.decode, places)), ttft_s(picked(all.ttft_s, places)), itl_s(picked(all.itl_s, places)) {
    tiers.reserve(kTiers * count);
    for (std::size_t tier = 0; tier < kTiers; ++tier) {
        for (const u32 place : places) {
            tiers.push_back(all.tiers[tier * all.count + place]);
        }
    }
}

void Costs::multiply(const std::vector<double>& multiplier) {
    if (multiplier.empty()) {
        return;
    }
    std::copy(multiplier.begin(), multiplier.end(), add(kMultiplier));
    double* const cost = numbers_.data() + static_cast<std::size_t>(places_[kCost]) * count;
    for (std::size_t at = 0; at < count; ++at) {
        cost[at] *= multiplier[at];
    }
}

Costs Costs::in_blocks(const RankNumbers& ranks, const Question& question, const Weights& weights,
                       const std::vector<double>& multiplier) {
    const bool has_requests = weights.request_weight != 0.0, has_history = weights.history_weight != 0.0;
    Costs made(ranks.count, false, 4U + has_requests + has_history + !multiplier.empty());
    double *const credit = made.add(kCredit), *const prefill = made.add(kPrefill), *const decode = made.add(kDecode);
    double* const cost = made.add(kCost);
    double* const request = has_requests ? made.add(kRequest) : nullptr;
    double* const history = has_history ? made.add(kHistory) : nullptr;
    credit_blocks(ranks, question, weights, nullptr, credit);
    made.spilled = kv::spilled(ranks, question, weights);
    for (std::size_t at = 0; at < ranks.count; ++at) {
        if (!made.spilled.empty() && made.spilled[at]) {
            credit[at] = 0.0;
        }
        const double blocks = static_cast<double>(ranks.queued[at] + question.tokens) / static_cast<double>(question.block_size) - credit[at];
        prefill[at] = blocks > 0.0 ? blocks * weights.prefill_scale : 0.0;
        decode[at] = static_cast<double>(ranks.blocks[at] - ranks.shared[at] + question.own_blocks) * weights.decode_scale;
        cost[at] = prefill[at] + decode[at];
        if (request != nullptr) {
            request[at] = static_cast<double>(ranks.requests[at]) * weights.request_weight;
            cost[at] += request[at];
        }
        if (history != nullptr) {
            history[at] = ranks.history[at] * weights.history_weight;
            cost[at] += history[at];
        }
    }
    made.multiply(multiplier);
    return made;
}

Costs Costs::in_ms(const RankNumbers& ranks, const Question& question, const Weights& weights,
                   const std::vector<double>& multiplier) {
    constexpr double kToken = 1e3 * kPrefillTokenS, kPair = 1e3 * kPrefillPairS;
    constexpr double kStep = 1e3 * kStepS, kSequence = 1e3 * kStepSequenceS, kKvToken = 1e3 * kStepKvTokenS;
    Costs made(ranks.count, true, 9U + !multiplier.empty());
    double *const wait = made.add(kWaitMs), *const prefill = made.add(kPrefillMs), *const lateness = made.add(kLatenessMs);
    double *const stall = made.add(kStallMs), *const decode = made.add(kDecodeMs), *const slowdown = made.add(kSlowdownMs);
    double *const cost = made.add(kCost), *const credit = made.add(kCredit), *const lost = made.add(kLost);
    for (std::size_t at = 0; at < ranks.count; ++at) {
        lost[at] = static_cast<double>(ranks.lost(at, question.own_blocks));
    }
    credit_blocks(ranks, question, weights, lost, credit);
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
    made.multiply(multiplier);
    return made;
}

Costs Costs::given(const std::vector<double>& costs) {
    Costs made(costs.size(), false, 1);
    std::copy(costs.begin(), costs.end(), made.add(kCost));
    return made;
}

}  // namespace kv
