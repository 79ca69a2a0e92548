// A decision as its record in the journal: the format of kv_protocol/decided.py.
#include "core.hpp"
#include "decision_bytes.hpp"

namespace kv {

std::string Verdict::record(std::string_view packed_request, u64 kv_seq) const {
    constexpr std::size_t kFields = 23, kMoreBytes = 1024;
    const RankKey& rank = view->standing->held[place()].key();
    const RankNumbers& ranks = view->numbers;
    const auto at_place = [this](std::size_t candidate) { return static_cast<u64>(candidates[candidate]); };
    Pack record;
    record.out.reserve(packed_request.size() + kMoreBytes);
    record.array(kFields);
    record.put("decided");
    record.put(view->now_s);
    record.out.append(packed_request);
    record.put(policy->name);
    record.put(seed);
    record.put(kv_seq);
    record.put(view->turn);
    record.put(static_cast<u64>(ranks.count));
    record.put(at_place(winner_at));
    record.put(rank.worker_id);
    record.put(rank.dp_rank);
    record.put(runner_up.has_value() ? std::optional<u64>(at_place(*runner_up)) : std::nullopt);
    record.put(margin);
    record.put(reason);
    record.put(uncached_tokens());
    record.put(epoch());
    record.put(meets_targets ? std::string("admit") : policy->unmet);
    record.put(ranks.ttft_s.empty() ? std::nullopt : std::optional<double>(ranks.ttft_s[place()]));
    record.put(ranks.itl_s.empty() ? std::nullopt : std::optional<double>(ranks.itl_s[place()]));
    std::string best, terms, rest;
    if (!costs.empty()) {
        const double* const cost = costs.cost();
        const std::vector<std::size_t> places = best_candidates(cost, costs.count, winner_at);
        for (const std::size_t each : places) {
            const u32 column = candidates[each];
            best.push_back(static_cast<char>(column & 0xFF));
            best.push_back(static_cast<char>(column >> 8 & 0xFF));
        }
        terms = packed_terms(costs, places);
        rest = packed_rest(cost, costs.count, places);
    }
    record.bytes(best);
    record.bytes(terms);
    record.bytes(rest);
    std::string overlap;
    if (!view->is_blank) {
        overlap = packed_overlap(ranks.tiers.data(), ranks.count);
    }
    record.bytes(overlap);
    return std::move(record.out);
}

}  // namespace kv
