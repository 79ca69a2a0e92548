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

void Sums::add(const Sums& other) {
    requests += other.requests;
    compared_requests += other.compared_requests;
    prompt_tokens += other.prompt_tokens;
    reused_tokens += other.reused_tokens;
    reported_tokens += other.reported_tokens;
    baseline_tokens += other.baseline_tokens;
    foregone_tokens += other.foregone_tokens;
    saved_s += other.saved_s;
    learnt_s += other.learnt_s;
    baseline_s += other.baseline_s;
    evicted_blocks += other.evicted_blocks;
}

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
    const std::size_t* const known = places_.find(name);
    std::size_t at = rows_.size();
    if (known != nullptr) {
        at = *known;
    } else if (rows_.size() < rows_max) {
        rows_.push_back({name, 0, {}});
        ages_.emplace_back(0, names_++);
        places_.put(name, at);
    } else {
        at = static_cast<std::size_t>(std::min_element(ages_.begin(), ages_.end()) - ages_.begin());
        other.add(rows_[at].sums);
        places_.erase(rows_[at].name);
        rows_[at] = {name, ages_[at].first, {}};
        ages_[at].second = names_++;
        places_.put(name, at);
    }
    rows_[at].sums.add(saved);
    ages_[at].first += saved.requests;
}

void TopRows::charge(const std::string& name, double blocks) {
    const std::size_t* const known = places_.find(name);
    (known == nullptr ? other : rows_[*known].sums).evicted_blocks += blocks;
}

std::vector<const TopRows::Row*> TopRows::rows() const {
    std::vector<const Row*> found;
    for (const Row& row : rows_) {
        found.push_back(&row);
    }
    std::sort(found.begin(), found.end(), [this](const Row* one, const Row* other_row) {
        return ages_[static_cast<std::size_t>(one - rows_.data())].second < ages_[static_cast<std::size_t>(other_row - rows_.data())].second;
    });
    return found;
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
