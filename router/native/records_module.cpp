// In C++: what router/journal/records.py packs of a decision. All calls keep the GIL.
#include <algorithm>

#include "bindings.hpp"
#include "decision_bytes.hpp"
#include "time_terms.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace kv {

namespace {

nb::bytes bytes_of(const std::string& packed) { return nb::bytes(packed.data(), packed.size()); }

// Of `terms` as `ReferenceEngine.terms` returned them; `rank_indices` has a column for each candidate. None: there is no order.
nb::object packed_costs(const nb::handle& terms, std::size_t winner, const nb::sequence& rank_indices) {
    const Table<double> table(terms, "terms", kTerms);
    const std::size_t count = static_cast<std::size_t>(table.count());
    if (winner >= count || nb::len(rank_indices) != count) {
        refuse("winner", static_cast<i64>(winner), "one of " + std::to_string(count) + " candidates with a column each");
    }
    const Floats cost = table.row(6);
    const std::vector<std::size_t> best = best_candidates(cost, count, winner);
    if (best.empty()) {
        return nb::none();
    }
    std::string columns;
    for (const std::size_t at : best) {
        const unsigned column = nb::cast<unsigned>(rank_indices[at]);
        columns.push_back(static_cast<char>(column & 0xFF));
        columns.push_back(static_cast<char>(column >> 8 & 0xFF));
    }
    std::vector<Term> of{{0, table.row(7)}, {6, cost}};  // the credit, the cost, and from field 7 on the addends
    for (std::size_t at = 0; at < 6; ++at) {
        of.push_back({7 + at, table.row(static_cast<Py_ssize_t>(at))});
    }
    return nb::make_tuple(bytes_of(columns), bytes_of(packed_terms(of, best)), bytes_of(packed_rest(cost, count, best)));
}

nb::bytes overlap(const nb::handle& depths) {
    const Table<std::int32_t> table(depths, "overlap", kTiers);
    const Depths tiers[kTiers] = {table.row(0), table.row(1), table.row(2), table.row(3)};
    return bytes_of(packed_overlap(tiers, static_cast<std::size_t>(table.count())));
}

}  // namespace

void bind_records(nb::module_& module) {
    module.def("packed_costs", &packed_costs, "terms"_a, "winner"_a, "rank_indices"_a);
    module.def("packed_overlap", &overlap, "overlap"_a);
}

}  // namespace kv
