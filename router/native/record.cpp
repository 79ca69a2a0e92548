// A decision as its record in the journal: the format of kv_protocol/decided.py.
#include "core.hpp"
#include "decision_bytes.hpp"

namespace kv {

void Verdict::record(Pack& record, std::string_view packed_request, u64 kv_seq) const {
    constexpr std::size_t kFields = 23;
    const RankKey& rank = view->standing->held[place()].key();
    const RankNumbers& ranks = view->numbers;
    const auto at_place = [this](std::size_t candidate) { return static_cast<u64>(candidates[candidate]); };
    record.array(kFields);
    record.put("decided");
    record.put(view->now_s);
    record.append(packed_request);
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
    record.put(meets_targets ? "admit" : std::string_view(policy->unmet));
    record.put(ranks.ttft_s.empty() ? std::nullopt : std::optional<double>(ranks.ttft_s[place()]));
    record.put(ranks.itl_s.empty() ? std::nullopt : std::optional<double>(ranks.itl_s[place()]));
    if (costs.empty()) {
        for (int none = 0; none < 3; ++none) {
            record.bytes(std::string_view{});
        }
    } else {
        const Best best = best_candidates(costs.cost(), costs.count, winner_at);
        record.bytes(sizeof(std::uint16_t) * best.size());
        for (const std::size_t each : best) {
            put_number(record, static_cast<std::uint16_t>(candidates[each]));
        }
        pack_terms(record, costs, best);
        pack_rest(record, costs.cost(), costs.count, best);
    }
    view->is_blank ? record.bytes(std::string_view{}) : pack_overlap(record, ranks.tiers.data(), ranks.count);
}

}  // namespace kv
