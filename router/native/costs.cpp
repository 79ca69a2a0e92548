#include "costs.hpp"

namespace kv {

namespace {

constexpr i64 kSpillIsl = 4;
template <typename Number>
std::vector<Number> picked(const std::vector<Number>& all, const std::vector<u32>& places) {
    std::vector<Number> some;
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
    const int column = static_cast<int>(numbers_.size() / count);
    numbers_.insert(numbers_.end(), multiplier.begin(), multiplier.end());
    places_[kMultiplier] = column;
    double* const cost = numbers_.data() + static_cast<std::size_t>(places_[kCost]) * count;
    for (std::size_t at = 0; at < count; ++at) {
        cost[at] *= multiplier[at];
    }
}

Costs Costs::in_blocks(const RankNumbers& ranks, const Question& question, const Weights& weights,
                       const std::vector<double>& multiplier) {
    Costs made(ranks.count, false, 6);
    double* const credit = made.place(kCredit, 0);
    double* const prefill = made.place(kPrefill, 1);
    double* const decode = made.place(kDecode, 2);
    double* const cost = made.place(kCost, 3);
    double* const request = weights.request_weight != 0.0 ? made.place(kRequest, 4) : nullptr;
    double* const history = weights.history_weight != 0.0 ? made.place(kHistory, 5) : nullptr;
    credit_blocks(ranks, question, weights, credit);
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
    Costs made(ranks.count, true, kTimeTerms + (question.foresees_evictions ? 1 : 0));
    for (int addend = 0; addend < 6; ++addend) {
        made.places_[static_cast<std::size_t>(kWaitMs + addend)] = addend;
    }
    made.places_[kCost] = 6;
    made.places_[kCredit] = 7;
    credit_blocks(ranks, question, weights, made.numbers_.data() + 7 * ranks.count);
    if (question.foresees_evictions) {
        double* const lost = made.place(kLost, 8);
        for (std::size_t at = 0; at < ranks.count; ++at) {
            lost[at] = static_cast<double>(ranks.lost(at, question.own_blocks));
        }
    }
    time_terms(ranks, question, weights, made.numbers_.data());
    made.multiply(multiplier);
    return made;
}

Costs Costs::given(const std::vector<double>& costs) {
    Costs made(costs.size(), false, 1);
    std::copy(costs.begin(), costs.end(), made.place(kCost, 0));
    return made;
}

}  // namespace kv
