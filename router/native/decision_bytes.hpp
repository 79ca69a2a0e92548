// A decision's costs and overlap as its journal record has them: the formats of kv_protocol/decided.py, as
// `Verdict::record` packs them. Knows nothing of Python.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "costs.hpp"
#include "rows.hpp"

namespace kv {

// The candidates that are recorded with all terms: the winner, then the cheapest of the others, the first among equals.
class Best {
public:
    static constexpr std::size_t kMost = 8;

    std::size_t size() const { return size_; }
    bool empty() const { return size_ == 0; }
    void grow() { ++size_; }
    std::size_t& operator[](std::size_t at) { return places_[at]; }
    std::size_t* begin() { return places_.data(); }
    std::size_t* end() { return places_.data() + size_; }
    const std::size_t* begin() const { return places_.data(); }
    const std::size_t* end() const { return places_.data() + size_; }

private:
    std::array<std::size_t, kMost> places_{};
    std::size_t size_ = 0;
};

// Empty: a cost is not a number, so there is no order. Of one candidate at least.
Best best_candidates(const double* costs, std::size_t count, std::size_t winner);

// Adds the mask of the terms that are not their default everywhere, and their numbers for `best`.
void pack_terms(Pack& to, const Costs& costs, const Best& best);

// Adds the costs of all candidates but `best`, as f32.
void pack_rest(Pack& to, const double* costs, std::size_t count, const Best& best);

// Adds a number as it lies in memory: machines that we build for are little-endian, as the formats are.
template <typename Number>
void put_number(Pack& to, Number number) {
    std::memcpy(to.more(sizeof number), &number, sizeof number);
}

// Adds the overlap on tiers 0..t of every column, tier by tier; no byte if there is none.
void pack_overlap(Pack& to, const std::int32_t* tiers, std::size_t count);

// Returns the same as it was before it was packed, tier by tier; empty: the bytes are no overlap of so many columns.
std::vector<std::int32_t> unpacked_overlap(std::string_view packed, std::size_t count);

}  // namespace kv
