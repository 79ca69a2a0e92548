// The cost in milliseconds of router/decision/time_cost.py and the factors of router/fleet/rates.py, where their formulas
// are: the same steps in the same order, so the same bits. Knows nothing of Python.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kv {

// One number of every rank, `stride` bytes apart.
template <typename Number>
struct Column {
    const char* data;
    std::ptrdiff_t stride;
    Number operator[](std::size_t place) const {
        return *reinterpret_cast<const Number*>(data + static_cast<std::ptrdiff_t>(place) * stride);
    }
};

using Counts = Column<std::int64_t>;
using Floats = Column<double>;

// What the reference engine needs, in ms.
struct ReferenceEngine {
    double token, pair, step, sequence, kv_token;
};

// What the formula reads of the request and of the policy.
struct Sizes {
    double tokens, block_size, own_blocks, output_tokens, lateness_ms, ttft_weight;
    bool is_prefilled, is_decoded;
};

struct RankColumns {
    Counts queued_tokens, active_requests, active_blocks, shared_blocks;
    Floats credit, prefill, decode;
};

constexpr std::size_t kTerms = 7;

// Sets `out` to wait, prefill, lateness, stall, decode, slowdown and cost, `count` numbers each.
void time_terms(const ReferenceEngine& engine, const Sizes& sizes, const RankColumns& ranks, std::size_t count,
                double* out);

// How factors are used: constants of router/fleet/rates.py.
struct FactorRules {
    double forget_s, alike;
    int halvings_max;
};

// One factor of each rank beside its model's, how far it is believed, and when the rank was measured last.
struct RankFactors {
    Floats own, belief, measured_s;
};

// What all ranks of a model share, and the mean of their own factors.
struct ModelFactor {
    double shared, mean;
};

// Sets `out` to the factors as they are used now.
void used_factors(const FactorRules& rules, const RankFactors& ranks, const ModelFactor& model, double now_s,
                  std::size_t count, double* out);

}  // namespace kv
