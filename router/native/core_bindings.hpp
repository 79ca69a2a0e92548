// What the bindings of the core and of its verdicts share.
#pragma once

#include <array>

#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "core.hpp"

namespace kv {

using Seconds = std::optional<double>;
using RankTuple = std::pair<std::string, i64>;

inline nanobind::bytes bytes_of(std::string_view packed) { return nanobind::bytes(packed.data(), packed.size()); }

inline RankTuple rank_tuple(const RankKey& key) { return {key.worker_id, key.dp_rank}; }

inline Seconds seconds_of(const nanobind::handle& value) { return value.is_none() ? Seconds{} : Seconds(nanobind::cast<double>(value)); }

// The core, and how long its last decision took: to ask the index, and all else.
struct PyCore : Core {
    using Core::Core;
    double match_s = 0, choose_s = 0;
    StageSums stages;  // of decisions that were carried out
};

// What the journal reads of a `router.decision.verdict.Verdict`.
struct VerdictParts {
    nanobind::handle request;
    std::array<nanobind::handle, 3> looked_at;  // its ranks, the epochs of their streams, their trusts
};
VerdictParts parts_of(const nanobind::handle& verdict);

// Columns of a view by their names in `router.decision.view.View`.
constexpr std::pair<const char*, i64 RankNumbers::*> kCounts[] = {{"predicted", &RankNumbers::predicted},
                                                                  {"queued_tokens", &RankNumbers::queued},
                                                                  {"active_requests", &RankNumbers::requests},
                                                                  {"active_blocks", &RankNumbers::blocks},
                                                                  {"shared_blocks", &RankNumbers::shared}};
constexpr std::pair<const char*, double RankNumbers::*> kFloats[] = {
    {"trust_factor", &RankNumbers::trust}, {"prefill", &RankNumbers::prefill}, {"decode", &RankNumbers::decode}};

template <typename Number>
std::vector<Number> column_of(const std::vector<RankNumbers>& ranks, Number RankNumbers::* field) {
    std::vector<Number> column;
    for (const RankNumbers& rank : ranks) {
        column.push_back(rank.*field);
    }
    return column;
}

template <typename Numbers>
nanobind::bytes packed(const Numbers& numbers) {
    return nanobind::bytes(numbers.data(), numbers.size() * sizeof(typename Numbers::value_type));
}

void bind_verdict(nanobind::module_& module);
void bind_decisions(nanobind::module_& module, nanobind::class_<PyCore>& core);
void bind_leases(nanobind::module_& module);

}  // namespace kv
