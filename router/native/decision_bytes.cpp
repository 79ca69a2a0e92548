// A decision's costs and overlap as its journal record has them: the formats of kv_protocol/decided.py. Knows nothing of Python.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "core.hpp"

namespace kv {

namespace {

constexpr unsigned kMaskBits = 7, kMore = 0x80, kWide = 0x80, kNarrowMax = 0xFFFF;
constexpr std::size_t kBestMax = 8;
static_assert(sizeof(float) == 4 && sizeof(double) == 8, "the formats are IEEE 754");
static_assert(std::tuple_size_v<TermNumbers> <= 2 * kMaskBits, "a mask has two bytes at most");

// The candidates that are recorded with all terms: the winner, then the cheapest of the others, the first among equals. Empty: a cost is
// not a number, so there is no order.
std::vector<std::size_t> best_candidates(const std::vector<Terms>& terms, std::size_t winner) {
    const auto is_cheaper = [&terms](std::size_t one, std::size_t other) { return terms[one].cost < terms[other].cost; };
    std::vector<std::size_t> best{winner};
    for (std::size_t at = 0; at < terms.size(); ++at) {
        if (std::isnan(terms[at].cost)) {
            return {};
        }
        if (at == winner || (best.size() == kBestMax && !is_cheaper(at, best.back()))) {
            continue;
        }
        best.insert(std::upper_bound(best.begin() + 1, best.end(), at, is_cheaper), at);
        best.resize(std::min(best.size(), kBestMax));
    }
    return best;
}

// Adds a number as it lies in memory: machines that we build for are little-endian, as the formats are.
template <typename Number>
void put_number(Pack& to, Number number) {
    std::memcpy(to.more(sizeof number), &number, sizeof number);
}

// Adds the mask of the terms that differ from their default somewhere in `best`, and these terms' numbers.
void pack_terms(Pack& to, const std::vector<Terms>& terms, const std::vector<std::size_t>& best) {
    const TermNumbers otherwise = numbers_of(Terms());
    std::vector<TermNumbers> rows;
    for (const std::size_t at : best) {
        rows.push_back(numbers_of(terms[at]));
    }
    std::vector<double> numbers;  // term by term
    unsigned mask = 0;
    for (std::size_t field = 0; field < otherwise.size(); ++field) {
        const auto differs = [&](const TermNumbers& row) {  // compares bits: -0.0 is not 0.0
            return std::memcmp(&row[field], &otherwise[field], sizeof(double)) != 0;
        };
        if (std::any_of(rows.begin(), rows.end(), differs)) {
            mask |= 1U << field;
            for (const TermNumbers& row : rows) {
                numbers.push_back(row[field]);
            }
        }
    }
    to.bytes((mask < kMore ? 1 : 2) + numbers.size() * sizeof(double));
    for (; mask >= kMore; mask >>= kMaskBits) {
        put_number(to, static_cast<std::uint8_t>(mask | kMore));
    }
    put_number(to, static_cast<std::uint8_t>(mask));
    for (const double each : numbers) {
        put_number(to, each);
    }
}

// Adds the costs of all candidates but `best`, as f32.
void pack_rest(Pack& to, const std::vector<Terms>& terms, const std::vector<std::size_t>& best) {
    std::vector<char> is_best(terms.size());
    for (const std::size_t each : best) {
        is_best[each] = true;
    }
    to.bytes((terms.size() - best.size()) * sizeof(float));
    for (std::size_t at = 0; at < terms.size(); ++at) {
        if (!is_best[at]) {
            put_number(to, static_cast<float>(terms[at].cost));
        }
    }
}

// Adds, tier by tier, how many blocks the tier adds to each rank's overlap; no byte if no rank has overlap.
void pack_overlap(Pack& to, const std::vector<RankNumbers>& ranks) {
    const std::size_t count = ranks.size();
    const auto more_at = [&ranks](std::size_t tier, std::size_t at) {
        const std::int32_t below = tier == 0 ? 0 : ranks[at].held[tier - 1];
        return static_cast<std::uint32_t>(ranks[at].held[tier]) - static_cast<std::uint32_t>(below);
    };
    std::uint32_t most = 0;
    std::array<std::size_t, kTiers> held{};
    for (std::size_t at = 0; at < count; ++at) {
        most = std::max(most, static_cast<std::uint32_t>(ranks[at].held[kTiers - 1]));
        for (std::size_t tier = 0; tier < kTiers; ++tier) {
            held[tier] += more_at(tier, at) != 0;
        }
    }
    if (most == 0) {
        return to.bytes(std::string_view{});
    }
    const bool is_wide = most > kNarrowMax;
    const std::size_t holders = (count + 7) / 8, width = is_wide ? sizeof(std::uint32_t) : sizeof(std::uint16_t);
    unsigned flags = is_wide ? kWide : 0;
    std::size_t size = 1;
    for (std::size_t tier = 0; tier < kTiers; ++tier) {
        flags |= held[tier] != 0 ? 1U << tier : 0;
        size += held[tier] != 0 ? holders + width * held[tier] : 0;
    }
    to.bytes(size);
    put_number(to, static_cast<std::uint8_t>(flags));
    for (std::size_t tier = 0; tier < kTiers; ++tier) {
        if (held[tier] == 0) {
            continue;
        }
        char* const bits = to.more(holders + width * held[tier]);
        char* number = bits + holders;
        std::fill(bits, number, '\0');
        for (std::size_t at = 0; at < count; ++at) {
            if (const std::uint32_t more = more_at(tier, at); more != 0) {
                bits[at / 8] = static_cast<char>(static_cast<unsigned char>(bits[at / 8]) | 1U << at % 8);
                std::memcpy(number, &more, width);  // the lower bytes come first
                number += width;
            }
        }
    }
}

}  // namespace

// The record of a decision: the format of kv_protocol/decided.py.
void Verdict::record(Pack& record, std::string_view packed_request, u64 kv_seq) const {
    constexpr std::size_t kFields = 23;
    const RankKey& rank = view->standing->held[place()].key();
    const std::vector<RankNumbers>& ranks = view->ranks;
    const auto at_place = [this](std::size_t candidate) { return static_cast<u64>(candidates[candidate]); };
    record.array(kFields);
    record.put("decided");
    record.put(view->now_s);
    record.append(packed_request);
    record.put(policy->name);
    record.put(seed);
    record.put(kv_seq);
    record.put(view->turn);
    record.put(static_cast<u64>(ranks.size()));
    record.put(at_place(winner_at));
    record.put(rank.worker_id);
    record.put(rank.dp_rank);
    record.put(runner_up.has_value() ? std::optional<u64>(at_place(*runner_up)) : std::nullopt);
    record.put(margin);
    record.put(reason);
    record.put(uncached_tokens());
    record.put(epoch());
    record.put(meets_targets ? "admit" : std::string_view(policy->unmet));
    record.put(ttft_s(winner_at));
    record.put(itl_s(winner_at));
    if (terms.empty()) {
        for (int none = 0; none < 3; ++none) {
            record.bytes(std::string_view{});
        }
    } else {
        const std::vector<std::size_t> best = best_candidates(terms, winner_at);
        record.bytes(sizeof(std::uint16_t) * best.size());
        for (const std::size_t each : best) {
            put_number(record, static_cast<std::uint16_t>(candidates[each]));
        }
        pack_terms(record, terms, best);
        pack_rest(record, terms, best);
    }
    view->is_blank ? record.bytes(std::string_view{}) : pack_overlap(record, ranks);
}

}  // namespace kv
