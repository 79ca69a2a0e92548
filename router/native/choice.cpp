// How a policy chooses among a view's ranks: tests/reference/state.py and policies.py have the rules.
#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <utility>

#include "core.hpp"

namespace kv {

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr u64 kGamma = 0x9E37'79B9'7F4A'7C15;  // the step of splitmix64

// The cheapest candidate beside `winner`, the first among equals; none: there is no other.
std::optional<std::size_t> second_to(std::size_t winner, const std::vector<double>& costs) {
    std::optional<std::size_t> second;
    for (std::size_t at = 0; at < costs.size(); ++at) {
        if (at != winner && (!second.has_value() || costs[at] < costs[*second])) {
            second = at;
        }
    }
    return second;
}

std::size_t lowest(const std::vector<double>& costs, u64 seed) {
    const double least = *std::min_element(costs.begin(), costs.end());
    const auto ties = static_cast<std::size_t>(std::count(costs.begin(), costs.end(), least));
    std::size_t skip = ties > 1 ? choice_index(seed, ties) : 0;
    std::size_t at = 0;
    while (costs[at] != least || skip-- > 0) {
        ++at;
    }
    return at;
}

std::size_t sampled(const std::vector<double>& costs, double temperature, u64 seed) {
    const auto [least, most] = std::minmax_element(costs.begin(), costs.end());
    const double lowest_cost = *least, span = *most - *least;
    if (span == 0) {
        return choice_index(seed, costs.size());
    }
    double total = 0.0;
    std::vector<double> weights;
    for (const double cost : costs) {
        weights.push_back(std::exp(-(cost - lowest_cost) / span / temperature));
        total += weights.back();
    }
    double point = unit_interval(seed) * total;
    for (std::size_t at = 0; at < weights.size(); ++at) {
        point -= weights[at];
        if (point < 0) {
            return at;
        }
    }
    return costs.size() - 1;
}

}  // namespace

double unit_interval(u64 seed, u64 draw) { return static_cast<double>(mixed(seed + (draw + 1) * kGamma) >> 11) * 0x1p-53; }

std::size_t choice_index(u64 seed, std::size_t count, u64 draw) {
    return static_cast<std::size_t>(unit_interval(seed, draw) * static_cast<double>(count));
}

void Verdict::decide(const std::vector<char>& excluded, std::vector<double> multiplier) {
    const std::size_t n = view->ranks.size();
    if (policy->reads_rates && policy->mode != Mode::kUser && !view->has_rates) {
        throw std::invalid_argument("the view was made for another mode: the index was not asked");
    }
    candidates.reserve(n);
    for (u32 place = 0; place < n; ++place) {
        if (excluded.empty() || !excluded[place]) {
            candidates.push_back(place);
        }
    }
    settle();
    if (policy->affinity == Affinity::kSoft) {
        if (const auto of_session = bound()) {
            multiplier.resize(n, 1.0);
            multiplier[candidates[*of_session]] *= 1.0 - policy->affinity_discount;
        }
    }
    choose(multiplier);
    if (policy->mode != Mode::kUser) {
        bind();
    }
}

// If no candidate is expected to hold a block of the prompt, removes newcomers that had their share, unless all candidates are such.
void Verdict::settle() {
    if (!policy->reads_overlap || !policy->bounds_newcomers || view->spent.empty() || request->reusable_blocks() == 0) {
        return;
    }
    std::vector<u32> others;
    for (const u32 place : candidates) {
        if (view->ranks[place].expected() != 0) {
            return;
        }
        if (!view->spent[place]) {
            others.push_back(place);
        }
    }
    if (!others.empty() && others.size() != candidates.size()) {
        candidates = std::move(others);
        passes_over = true;
    }
}

void Verdict::choose(const std::vector<double>& multiplier) {
    const std::size_t count = candidates.size();
    const auto requests_at = [this](std::size_t at) { return view->ranks[candidates[at]].requests; };
    switch (policy->mode) {
        case Mode::kCost:
        case Mode::kSoonest:
            is_timed = true;
            terms = terms_of(view->ranks, candidates, *request, output_tokens(), policy->weights, multiplier);
            return policy->mode == Mode::kCost ? cheapest() : soonest();
        case Mode::kTurn:
        case Mode::kNamed:
            winner_at = static_cast<std::size_t>(view->turn % count);
            reason = policy->mode == Mode::kTurn ? "turn" : "pinned";
            return;
        case Mode::kDraw:
            winner_at = choice_index(seed, count);
            reason = "draw";
            return;
        case Mode::kOfTwo: {
            reason = count == 1 ? "only" : "load";
            if (count > 1) {
                const std::size_t first = choice_index(seed, count);
                std::size_t second = choice_index(seed, count - 1, 1);
                second += second >= first;
                const bool is_second = requests_at(second) < requests_at(first);
                winner_at = is_second ? second : first;
                runner_up = is_second ? first : second;
            }
            return;
        }
        case Mode::kLeastLoaded: {
            std::vector<double> requests;
            for (std::size_t at = 0; at < count; ++at) {
                requests.push_back(static_cast<double>(requests_at(at)));
            }
            winner_at = lowest(requests, seed);
            runner_up = second_to(winner_at, requests);
            reason = !runner_up.has_value() ? "only" : requests[*runner_up] != requests[winner_at] ? "load" : "draw";
            return;
        }
        case Mode::kUser:
            return;
    }
}

std::vector<double> Verdict::costs() const {
    std::vector<double> found;
    found.reserve(terms.size());
    for (const Terms& each : terms) {
        found.push_back(each.cost);
    }
    return found;
}

void Verdict::set_margin() {
    margin = runner_up.has_value() ? std::optional<double>(terms[*runner_up].cost - terms[winner_at].cost) : std::nullopt;
}

void Verdict::cheapest() {
    const std::vector<double> all = costs();
    winner_at = policy->temperature <= 0 ? lowest(all, seed) : sampled(all, policy->temperature, seed);
    runner_up = second_to(winner_at, all);
    set_margin();
    if (!runner_up.has_value()) {
        reason = "only";
    } else if (*margin <= 0) {
        reason = "draw";
    } else if (is_by_affinity()) {
        reason = "affinity";
    } else {
        reason = terms[winner_at].credit > terms[*runner_up].credit ? "overlap" : "load";
    }
}

// Of the candidates that meet the targets (of all if none does) chooses the one with the least TTFT; for decoding, ITL.
void Verdict::soonest() {
    const auto itl_max = request->itl_target_s.has_value() ? request->itl_target_s : policy->itl_target_s;
    const auto ttft_max = request->ttft_target_s.has_value() ? request->ttft_target_s : policy->ttft_target_s;
    const auto meets = [](std::optional<double> seconds, std::optional<double> most) { return !seconds || !most || *seconds <= *most; };
    std::vector<char> allowed;
    std::vector<double> every;
    for (std::size_t at = 0; at < terms.size(); ++at) {
        const auto first_s = ttft_s(at), between_s = itl_s(at);
        allowed.push_back(meets(between_s, itl_max) && meets(first_s, ttft_max));
        every.push_back((first_s.has_value() ? *first_s : *between_s) * terms[at].multiplier);
    }
    std::vector<double> seconds = every;
    const bool is_any = std::any_of(allowed.begin(), allowed.end(), [](char each) { return each; });
    for (std::size_t at = 0; at < terms.size() && is_any; ++at) {
        seconds[at] = allowed[at] ? every[at] : kInf;
    }
    winner_at = lowest(seconds, seed);
    runner_up = second_to(winner_at, seconds);
    if (runner_up.has_value() && std::isinf(seconds[*runner_up])) {  // no other candidate meets the targets
        runner_up = second_to(winner_at, every);
    }
    set_margin();
    reason = runner_up.has_value() ? "predicted_ttft" : "only";
    meets_targets = allowed[winner_at];
}

void Verdict::take_choice(std::size_t winner, std::string why, std::optional<std::size_t> second, std::optional<double> apart,
                          bool meets, const std::vector<double>& costs) {
    winner_at = winner;
    reason = std::move(why);
    runner_up = second;
    margin = apart;
    meets_targets = meets;
    for (const double cost : costs) {
        terms.push_back({});
        terms.back().cost = cost;
    }
    bind();
}

void Verdict::forget_others() {
    decided_candidates = candidate_count();
    auto own = std::make_shared<View>(*view);
    own->only = place();
    own->ranks = std::vector<RankNumbers>{view->at(place())};  // an assigned list would keep the memory of all ranks
    candidates = std::vector<u32>{place()};
    terms = terms.empty() ? std::vector<Terms>() : std::vector<Terms>{terms[winner_at]};
    view = std::move(own);
    winner_at = 0;
    runner_up.reset();
}

// Under hard affinity the session's rank wins if it is a candidate. Then sets the fields that follow from the winner.
void Verdict::bind() {
    const auto of_session = policy->affinity == Affinity::kHard ? bound() : std::nullopt;
    if (of_session.has_value()) {
        reason = "affinity";
        const std::size_t before = std::exchange(winner_at, *of_session);
        if (before != winner_at && runner_up.has_value()) {
            runner_up = terms.empty() || policy->mode == Mode::kSoonest ? before : second_to(winner_at, costs());
            if (!terms.empty()) {
                set_margin();
            }
        }
    }
    if (request->is_pinned) {
        reason = "pinned";
    } else if (passes_over && reason != "affinity") {
        reason = "newcomer";
    }
    if (!view->is_blank) {
        const RankNumbers& rank = view->at(place());
        overlap_blocks = rank.held[0];
        most_blocks = rank.held[kTiers - 1];
        expected_blocks = rank.expected();
        lost_blocks = policy->reads_rates ? rank.lost(request->own_blocks()) : 0;
        i64 best = 0;
        for (const u32 each : candidates) {
            best = std::max<i64>(best, view->ranks[each].held[0]);
        }
        regret_blocks = best - overlap_blocks;
    }
}

bool Verdict::is_by_affinity() const {
    if (policy->affinity != Affinity::kSoft || !view->bound.has_value() || winner() != view->bound->row()) {
        return false;
    }
    const double cost = terms[winner_at].cost;
    return cost > (cost + *margin) * (1.0 - policy->affinity_discount);
}

// The candidate that the request's session is bound to.
std::optional<std::size_t> Verdict::bound() const {
    for (std::size_t at = 0; at < candidates.size() && view->bound.has_value(); ++at) {
        if (view->standing->rows[candidates[at]] == view->bound->row()) {
            return at;
        }
    }
    return std::nullopt;
}

double Verdict::output_tokens() const {
    const double tokens = request->expected_osl != 0 ? static_cast<double>(request->expected_osl) : view->output_tokens;
    return request->max_tokens != 0 ? std::min(tokens, static_cast<double>(request->max_tokens)) : tokens;
}

std::optional<double> Verdict::ttft_s(std::size_t at) const {
    if (!is_timed || !request->is_prefilled) {
        return std::nullopt;
    }
    const double until_first_ms = terms[at].wait_ms + terms[at].prefill_ms;
    return kFirstS * view->at(candidates[at]).prefill + until_first_ms * 1e-3;
}

std::optional<double> Verdict::itl_s(std::size_t at) const {
    if (!is_timed || !request->is_decoded) {
        return std::nullopt;
    }
    return terms[at].decode_ms / output_tokens() * 1e-3;
}

i64 Verdict::uncached_tokens() const {
    const i64 uncached = request->isl_tokens - std::min(expected_blocks, request->reusable_blocks()) * request->block_size;
    return request->is_prefilled ? uncached : 0;
}

Promise Verdict::promise() const {
    const i64 extra_blocks = std::max<i64>(0, request->own_blocks() - static_cast<i64>(request->blocks.size()));
    return {request->decision_id, winner(), request->blocks, uncached_tokens(), extra_blocks, epoch(), request->session_id};
}

}  // namespace kv
