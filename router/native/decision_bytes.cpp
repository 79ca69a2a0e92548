#include "decision_bytes.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core.hpp"

namespace kv {

namespace {

constexpr unsigned kMaskBits = 7, kMore = 0x80, kWide = 0x80, kNarrowMax = 0xFFFF;
static_assert(sizeof(float) == 4 && sizeof(double) == 8, "the formats are IEEE 754");
static_assert(Costs::kFields <= 2 * kMaskBits, "a mask has two bytes at most");

}  // namespace

Best best_candidates(const double* costs, std::size_t count, std::size_t winner) {
    Best best;
    for (std::size_t at = 0; at < count; ++at) {
        if (std::isnan(costs[at])) {
            return {};
        }
        std::size_t place = best.size();
        if (place == Best::kMost && costs[at] >= costs[best[place - 1]]) {
            continue;
        }
        place == Best::kMost ? void(--place) : best.grow();
        for (; place > 0 && costs[at] < costs[best[place - 1]]; --place) {
            best[place] = best[place - 1];
        }
        best[place] = at;
    }
    std::size_t* const found = std::find(best.begin(), best.end() - 1, winner);  // or the last one gives way to it
    std::copy_backward(best.begin(), found, found + 1);
    best[0] = winner;
    return best;
}

void pack_terms(Pack& to, const Costs& costs, const Best& best) {
    unsigned mask = 0, fields = 0;
    for (std::size_t field = 0; field < Costs::kFields && !best.empty(); ++field) {
        const double otherwise = Costs::otherwise(field);
        const auto differs = [&](std::size_t at) {  // bits: -0.0 is not 0.0
            return std::memcmp(costs.column(field) + at, &otherwise, sizeof(double)) != 0;
        };
        if (std::any_of(best.begin(), best.end(), differs)) {
            mask |= 1U << field;
            ++fields;
        }
    }
    const std::size_t mask_size = mask < kMore ? 1 : 2, numbers_size = fields * best.size() * sizeof(double);
    to.bytes(mask_size + numbers_size);
    char* out = to.more(mask_size + numbers_size);
    for (unsigned left = mask;; left >>= kMaskBits) {
        *out++ = static_cast<char>(left < kMore ? left : (left & (kMore - 1)) | kMore);
        if (left < kMore) {
            break;
        }
    }
    for (std::size_t field = 0; field < Costs::kFields; ++field) {
        if ((mask >> field & 1) != 0) {
            const double* const column = costs.column(field);
            for (const std::size_t at : best) {
                std::memcpy(out, column + at, sizeof(double));
                out += sizeof(double);
            }
        }
    }
}

void pack_rest(Pack& to, const double* costs, std::size_t count, const Best& best) {
    to.bytes((count - best.size()) * sizeof(float));
    if (best.size() == count) {
        return;
    }
    Best ascending = best;
    std::sort(ascending.begin(), ascending.end());
    const std::size_t* next = ascending.begin();
    for (std::size_t at = 0; at < count; ++at) {
        if (next != ascending.end() && at == *next) {
            ++next;
        } else {
            put_number(to, static_cast<float>(costs[at]));
        }
    }
}

void pack_overlap(Pack& to, const std::int32_t* tiers, std::size_t count) {
    const auto more_at = [tiers, count](std::size_t tier, std::size_t at) {
        const std::int32_t below = tier == 0 ? 0 : tiers[(tier - 1) * count + at];
        return static_cast<std::uint32_t>(tiers[tier * count + at]) - static_cast<std::uint32_t>(below);
    };
    std::uint32_t most = 0;
    std::array<std::size_t, kTiers> held{};
    for (std::size_t at = 0; at < count; ++at) {
        most = std::max(most, static_cast<std::uint32_t>(tiers[(kTiers - 1) * count + at]));
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

std::vector<std::int32_t> unpacked_overlap(std::string_view packed, std::size_t count) {
    std::vector<std::int32_t> tiers(kTiers * count);
    if (packed.empty()) {
        return tiers;
    }
    const unsigned flags = static_cast<unsigned char>(packed[0]);
    const std::size_t holders = (count + 7) / 8, size = (flags & kWide) != 0 ? 4 : 2;
    std::size_t at = 1;
    for (std::size_t tier = 0; tier < kTiers; ++tier) {
        std::int32_t* const depths = tiers.data() + tier * count;
        if (tier > 0) {
            std::copy(depths - count, depths, depths);
        }
        if ((flags >> tier & 1) == 0) {
            continue;
        }
        const std::size_t bits = at;
        at += holders;
        for (std::size_t column = 0; column < count && at <= packed.size(); ++column) {
            if ((static_cast<unsigned char>(packed[bits + column / 8]) >> column % 8 & 1) != 0) {
                std::uint32_t more = 0;
                if (at + size > packed.size()) {
                    return {};
                }
                std::memcpy(&more, packed.data() + at, size);
                depths[column] = static_cast<std::int32_t>(static_cast<std::uint32_t>(depths[column]) + more);
                at += size;
            }
        }
    }
    return at == packed.size() ? tiers : std::vector<std::int32_t>{};
}

// The record of a decision: the format of kv_protocol/decided.py.
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
    record.put(ttft_s(winner_at));
    record.put(itl_s(winner_at));
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
