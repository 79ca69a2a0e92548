// What candidates cost, in milliseconds: tests/reference/time_cost.py has the formulas. Knows nothing of Python.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory_resource>
#include <vector>

#include "chain_tree.hpp"

namespace kv {

constexpr std::size_t kTiers = 4;

// The reference engine's times in seconds. Source: worker_agent/engines/simulated/timing.py (H200, 8B parameters).
constexpr double kFirstS = 17.0e-3;
constexpr double kPrefillTokenS = 22.8e-6, kPrefillPairS = 0.830e-9;
constexpr double kStepS = 5.52e-3, kStepSequenceS = 12.7e-6, kStepKvTokenS = 34.7e-9;

// Room for the columns of a few ranks. A decision is kept after its request: where each column has memory of its own, making and
// freeing them costs more than to decide.
class Room {
public:
    Room() = default;
    Room(const Room&) : Room() {}
    Room(Room&&) = delete;  // columns that moved would lie in the memory of the other one
    std::pmr::memory_resource* memory() { return &more_; }

private:
    std::array<std::byte, 1024> own_;
    std::pmr::monotonic_buffer_resource more_{own_.data(), own_.size()};
};

// The columns that costs are computed of: of all ranks, or of the candidates.
struct RankNumbers {
    using Counts = std::pmr::vector<i64>;
    using Floats = std::pmr::vector<double>;

    RankNumbers(std::size_t ranks, std::pmr::memory_resource* memory)
        : count(ranks), tiers(kTiers * ranks), predicted(ranks, memory), queued(ranks, memory), requests(ranks, memory), blocks(ranks, memory),
          shared(ranks, memory), capacity(memory), trust(memory), prefill(memory), decode(memory) {}
    // Those of some ranks.
    RankNumbers(const RankNumbers& all, const std::vector<u32>& places);

    i64 expected(std::size_t place) const { return std::max<i64>(tiers[place], predicted[place]); }
    // Blocks that a rank lacks for its promised requests and one more; 0 where its capacity is not known.
    i64 over(std::size_t place, i64 own_blocks) const {
        return capacity.empty() || capacity[place] == 0 ? 0 : std::max<i64>(0, blocks[place] - shared[place] + own_blocks - capacity[place]);
    }
    // Expected blocks that will be evicted before the request is computed: nothing in use holds them, and room is short.
    i64 lost(std::size_t place, i64 own_blocks) const {
        return std::min(over(place, own_blocks), std::max<i64>(0, expected(place) - shared[place]));
    }

    std::size_t count;
    std::vector<std::int32_t> tiers;  // leading blocks held on tiers 0..t, tier by tier
    Counts predicted, queued, requests, blocks, shared;
    Counts capacity;         // blocks of KV, 0: not known; empty: not read
    Floats trust;            // empty: 1 at every rank
    Floats prefill, decode;  // learnt factors; empty: not read
};

// The fields of `router.decision.policy.CostParameters`, in their order.
struct Weights {
    double overlap_credit, host_weight, disk_weight, ttft_weight, lateness_s;
};

// What costs are computed of, beside the ranks.
struct Question {
    i64 tokens, block_size, own_blocks;
    double output_tokens;
    bool is_prefilled, is_decoded;
};

// The terms of every candidate, in the order of the fields of `CostTerms`.
class Costs {
public:
    enum Field {
        kCredit, kMultiplier, kCost, kWaitMs, kPrefillMs, kLatenessMs, kStallMs, kDecodeMs, kSlowdownMs, kLost, kFields
    };

    Costs() = default;

    bool is_timed = false;  // computed, not given by a user's mode
    std::size_t count = 0;

    bool empty() const { return count == 0; }
    const double* column(std::size_t field) const { return numbers_.data() + field * count; }
    const double* cost() const { return column(kCost); }
    // The default of a term.
    static double otherwise(std::size_t field) { return field == kMultiplier ? 1.0 : 0.0; }

    // `multiplier`: of each candidate; empty: none.
    static Costs in_ms(const RankNumbers& ranks, const Question& question, const Weights& weights,
                       const std::vector<double>& multiplier);
    // Costs of another's making, without terms.
    static Costs given(const std::vector<double>& costs);

private:
    Costs(std::size_t candidates, bool timed) : is_timed(timed), count(candidates), numbers_(kFields * candidates) {}

    std::vector<double> numbers_;  // term by term
};

}  // namespace kv
