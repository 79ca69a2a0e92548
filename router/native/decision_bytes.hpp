// A decision's costs and overlap as its journal record has them: the formats of kv_protocol/decided.py, as
// router/journal/records.py packs them. Knows nothing of Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "columns.hpp"

namespace kv {

// A column of terms, and its place among the fields of `CostTerms`. All defaults are 0.
struct Term {
    std::size_t field;
    Floats column;
};

// Returns the candidates that are recorded with all terms: the winner, then the cheapest of the others, the first among equals.
// Empty: a cost is not a number, so there is no order.
std::vector<std::size_t> best_candidates(const Floats& costs, std::size_t count, std::size_t winner);

// Returns the mask of the terms that are not their default everywhere, and their numbers for `best`.
std::string packed_terms(const std::vector<Term>& terms, const std::vector<std::size_t>& best);

// Returns the costs of all candidates but `best`, as f32.
std::string packed_rest(const Floats& costs, std::size_t count, const std::vector<std::size_t>& best);

// Returns the overlap on tiers 0..t of every column; empty if there is none.
std::string packed_overlap(const Depths* tiers, std::size_t count);

}  // namespace kv
