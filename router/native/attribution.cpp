#include "attribution.hpp"

namespace kv {

namespace {

std::string family_of(const Chain& blocks, std::size_t family_blocks) {
    if (blocks.empty()) {
        return {};
    }
    std::string name(16, '0');
    u64 block = blocks[std::min(blocks.size(), family_blocks) - 1];
    for (std::size_t at = name.size(); at > 0; block >>= 4) {
        name[--at] = "0123456789abcdef"[block & 0xF];
    }
    return name;
}

}  // namespace

Sums Placement::saved(std::optional<i64> reported_tokens) const {
    Sums sums;
    sums.requests = 1;
    sums.prompt_tokens = isl_tokens;
    sums.reused_tokens = reported_tokens.has_value() ? std::min(*reported_tokens, isl_tokens) : predicted_tokens;
    sums.reported_tokens = reported_tokens.has_value() ? sums.reused_tokens : 0;
    sums.foregone_tokens = std::max<i64>(0, best_blocks * block_size - predicted_tokens);
    const double reused = static_cast<double>(sums.reused_tokens), size = static_cast<double>(block_size);
    sums.saved_s = sums.baseline_s = factor * (reused * kPrefillTokenS + reused * reused / 2 * kPrefillPairS);
    sums.learnt_s = is_learnt ? sums.saved_s : 0.0;
    sums.baseline_tokens = reused;
    if (candidates != 0) {
        const double others = static_cast<double>(others_blocks) * size, count = static_cast<double>(candidates);
        const double pairs = static_cast<double>(others_blocks_squared) * size * size / 2;
        sums.compared_requests = 1;
        sums.baseline_tokens = (reused + others) / count;
        sums.baseline_s = (sums.saved_s + factor * (others * kPrefillTokenS + pairs * kPrefillPairS)) / count;
    }
    return sums;
}

void TopRows::count(const std::string& name, const Sums& saved, std::size_t rows_max) {
    Row* row = rows.find(name);
    if (row == nullptr) {
        i64 missed = 0;
        if (rows.size() >= rows_max) {
            const auto& [least, of_least] = *smallest();
            other.add(of_least.sums);
            missed = of_least.requests_max();
            rows.erase(least);
        }
        row = &rows.put(name, Row{missed, {}});
    }
    row->sums.add(saved);
}

void TopRows::charge(const std::string& name, double blocks) {
    Row* const known = rows.find(name);
    (known == nullptr ? other : known->sums).evicted_blocks += blocks;
}

void Attribution::decided(const Verdict& verdict) {
    const Request& request = *verdict.request;
    const std::vector<RankNumbers>& ranks = verdict.view->ranks;
    if (!request.is_prefilled) {
        return;
    }
    Placement made;
    made.names = {std::string(request.model), std::string(request.tenant), std::string(request.lora),
                  family_of(request.blocks, family_blocks)};
    made.isl_tokens = request.known_tokens;
    made.block_size = request.block_size;
    made.predicted_tokens = std::min(verdict.expected_blocks, request.reusable_blocks()) * request.block_size;
    if (!verdict.view->is_blank && request.known_tokens != 0) {
        made.candidates = static_cast<i64>(verdict.candidates.size());
        for (const u32 place : verdict.candidates) {
            const i64 blocks = place == verdict.place() ? 0 : ranks[place].expected();
            made.others_blocks += blocks;
            made.others_blocks_squared += blocks * blocks;
            made.best_blocks = std::max(made.best_blocks, blocks);
        }
    }
    made.factor = verdict.view->has_rates ? ranks[verdict.place()].prefill : 1.0;
    made.is_learnt = verdict.view->is_learnt;
    if (pending.size() >= pending_max) {
        pending.erase_first();
        ++dropped;
    }
    pending.put(request.decision_id, std::move(made));
}

std::optional<Placement> Attribution::ended(std::string_view decision_id, bool is_ok, std::optional<i64> cached_tokens) {
    std::optional<Placement> placement = pending.pop(decision_id);
    if (placement.has_value() && (!is_ok || placement->isl_tokens == 0)) {
        ++(is_ok ? unseen : not_answered);
        placement.reset();
    }
    if (!placement.has_value()) {
        return placement;
    }
    const Sums saved = placement->saved(cached_tokens);
    total.add(saved);
    for (std::size_t at = 0; at < of_names.size(); ++at) {
        of_names[at].count(placement->names[at], saved, rows_max);
    }
    return placement;
}

void Attribution::charge(const Placement& placement, double blocks) {
    total.evicted_blocks += blocks;
    for (std::size_t at = 0; at < of_names.size(); ++at) {
        of_names[at].charge(placement.names[at], blocks);
    }
}

}  // namespace kv
