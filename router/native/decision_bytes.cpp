#include "decision_bytes.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

namespace kv {

namespace {

constexpr std::size_t kBestMax = 8;
constexpr unsigned kMaskBits = 7, kMore = 0x80, kWide = 0x80, kNarrowMax = 0xFFFF;
static_assert(sizeof(float) == 4 && sizeof(double) == 8, "the formats are IEEE 754");
static_assert(Costs::kFields <= 2 * kMaskBits, "a mask has two bytes at most");

template <typename Number>
void put(std::string& out, Number number) {  // machines that we build for are little-endian, as the formats are
    char bytes[sizeof(Number)];
    std::memcpy(bytes, &number, sizeof(Number));
    out.append(bytes, sizeof(Number));
}

}  // namespace

std::vector<std::size_t> best_candidates(const double* costs, std::size_t count, std::size_t winner) {
    std::vector<std::size_t> order(count);
    std::iota(order.begin(), order.end(), std::size_t{0});
    for (const std::size_t at : order) {
        if (std::isnan(costs[at])) {
            return {};
        }
    }
    const std::size_t most = std::min(count, kBestMax);
    const auto is_before = [costs](std::size_t one, std::size_t other) {
        return costs[one] < costs[other] || (costs[one] == costs[other] && one < other);
    };
    std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(most), order.end(), is_before);
    order.resize(most);
    const auto found = std::find(order.begin(), order.end(), winner);
    order.erase(found == order.end() ? found - 1 : found);
    order.insert(order.begin(), winner);
    return order;
}

void pack_terms(Pack& to, const Costs& costs, const std::vector<std::size_t>& best) {
    unsigned mask = 0, fields = 0;
    for (std::size_t field = 0; field < Costs::kFields && !best.empty(); ++field) {
        const double otherwise = Costs::otherwise(field);
        const auto differs = [&](std::size_t at) {  // bits: -0.0 is not 0.0
            return std::memcmp(costs.column(field) + at, &otherwise, sizeof(double)) != 0;
        };
        if (costs.has(field) && std::any_of(best.begin(), best.end(), differs)) {
            mask |= 1U << field;
            ++fields;
        }
    }
    to.bytes((mask < kMore ? 1 : 2) + fields * best.size() * sizeof(double));
    for (unsigned left = mask;; left >>= kMaskBits) {
        put_number(to, static_cast<std::uint8_t>(left < kMore ? left : (left & (kMore - 1)) | kMore));
        if (left < kMore) {
            break;
        }
    }
    for (std::size_t field = 0; field < Costs::kFields; ++field) {
        if ((mask >> field & 1) != 0) {
            for (const std::size_t at : best) {
                put_number(to, costs.column(field)[at]);
            }
        }
    }
}

void pack_rest(Pack& to, const double* costs, std::size_t count, const std::vector<std::size_t>& best) {
    to.bytes((count - best.size()) * sizeof(float));
    if (best.size() == count) {
        return;
    }
    std::vector<char> is_best(count);
    for (const std::size_t at : best) {
        is_best[at] = 1;
    }
    for (std::size_t at = 0; at < count; ++at) {
        if (is_best[at] == 0) {
            put_number(to, static_cast<float>(costs[at]));
        }
    }
}

std::string packed_overlap(const std::int32_t* tiers, std::size_t count) {
    std::uint32_t most = 0;
    for (std::size_t at = 0; at < count; ++at) {
        most = std::max(most, static_cast<std::uint32_t>(tiers[(kTiers - 1) * count + at]));
    }
    if (most == 0) {
        return {};
    }
    unsigned flags = most > kNarrowMax ? kWide : 0;
    std::string packed(1, '\0');
    for (std::size_t tier = 0; tier < kTiers; ++tier) {
        std::string holders((count + 7) / 8, '\0'), numbers;
        for (std::size_t at = 0; at < count; ++at) {
            const std::int32_t below = tier == 0 ? 0 : tiers[(tier - 1) * count + at];
            const std::uint32_t more = static_cast<std::uint32_t>(tiers[tier * count + at]) - static_cast<std::uint32_t>(below);
            if (more != 0) {
                holders[at / 8] = static_cast<char>(static_cast<unsigned char>(holders[at / 8]) | 1U << at % 8);
                if (flags & kWide) {
                    put(numbers, more);
                } else {
                    put(numbers, static_cast<std::uint16_t>(more));
                }
            }
        }
        if (!numbers.empty()) {
            flags |= 1U << tier;
            packed += holders + numbers;
        }
    }
    packed[0] = static_cast<char>(flags);
    return packed;
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

}  // namespace kv
