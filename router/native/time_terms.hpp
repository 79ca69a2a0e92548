// The cost in milliseconds of router/decision/time_cost.py and the factors of router/fleet/rates.py, where their formulas
// are: the same steps in the same order, so the same bits. Knows nothing of Python.
#pragma once

#include <cstddef>

#include "columns.hpp"

namespace kv {

// What the reference engine needs, in ms.
struct ReferenceEngine {
    double token, pair, step, sequence, kv_token;
};

// What the formula reads of the request and of the policy.
struct Sizes {
    double tokens, block_size, own_blocks, output_tokens, lateness_ms, ttft_weight;
    bool is_prefilled, is_decoded;
};

// What a policy credits of what ranks hold.
struct CreditRules {
    double overlap_credit, decay, host_weight, disk_weight;
};

// `trust_factor` without data: 1 at every rank.
struct RankColumns {
    Depths device, host, disk;
    Counts predicted, queued_tokens, active_requests, active_blocks, shared_blocks;
    Floats trust_factor, prefill, decode;
};

constexpr std::size_t kTerms = 8;

// Sets `out` to the blocks credited to each rank: `credit_column` of router/decision/cost.py.
void credit_blocks(const CreditRules& rules, const Sizes& sizes, const RankColumns& ranks, std::size_t count, double* out);

// Sets `out` to wait, prefill, lateness, stall, decode, slowdown, cost and credit, `count` numbers each. The credit is there.
void time_terms(const ReferenceEngine& engine, const Sizes& sizes, const RankColumns& ranks, std::size_t count,
                double* out);

// How factors are used: constants of router/fleet/rates.py.
struct FactorRules {
    double forget_s, alike, ramp;
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

// Sets `out` to the factors as they are used now: "whole" or "lessened" of router/fleet/rates.py.
void used_factors(const FactorRules& rules, const RankFactors& ranks, const ModelFactor& model, double now_s, bool is_whole,
                  std::size_t count, double* out);

}  // namespace kv
