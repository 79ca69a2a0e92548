// In C++: the arithmetic of router/decision/time_cost.py, router/decision/history.py and router/fleet/rates.py. All calls keep
// the GIL.
#include <vector>

#include "bindings.hpp"
#include "time_terms.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace kv {

namespace {

double* floats_of(const nb::bytes& made) { return reinterpret_cast<double*>(PyBytes_AS_STRING(made.ptr())); }

nb::bytes terms(const ReferenceEngine& engine, const nb::handle& overlap, const nb::handle& predicted,
                const nb::handle& queued_tokens, const nb::handle& active_requests, const nb::handle& active_blocks,
                const nb::handle& shared_blocks, const nb::handle& trust_factor, const nb::handle& prefill,
                const nb::handle& decode, const CreditRules& rules, double tokens, double block_size, double own_blocks,
                double output_tokens, double lateness_ms, double ttft_weight, bool is_prefilled, bool is_decoded) {
    const Sizes sizes{tokens,      block_size,  own_blocks,   output_tokens,
                      lateness_ms, ttft_weight, is_prefilled, is_decoded};
    const Numbers<i64> queued(queued_tokens, "queued_tokens");
    const Py_ssize_t count = queued.count();
    const Table<std::int32_t> tiers(overlap, "overlap", kTiers);
    if (tiers.count() != count) {
        refuse("overlap", tiers.count(), std::to_string(count) + " columns");
    }
    const Numbers<i64> expected(predicted, "predicted", count);
    const Numbers<i64> requests(active_requests, "active_requests", count);
    const Numbers<i64> blocks(active_blocks, "active_blocks", count);
    const Numbers<i64> shared(shared_blocks, "shared_blocks", count);
    const Numbers<double> prefills(prefill, "prefill", count);
    const Numbers<double> decodes(decode, "decode", count);
    const Numbers<double> trust(trust_factor.is_none() ? prefill : trust_factor, "trust_factor", count);
    const RankColumns ranks{tiers.row(0),      tiers.row(1),      tiers.row(2),    expected.column(),
                            queued.column(),   requests.column(), blocks.column(), shared.column(),
                            trust_factor.is_none() ? Floats{nullptr, 0} : trust.column(),
                            prefills.column(), decodes.column()};
    const std::size_t of = static_cast<std::size_t>(count);
    nb::bytes made = new_bytes(kTerms * sizeof(double) * of);
    credit_blocks(rules, sizes, ranks, of, floats_of(made) + (kTerms - 1) * of);
    time_terms(engine, sizes, ranks, of, floats_of(made));
    return made;
}

// Some rows of a `RankTable` (router/fleet/rank_table.py), whose columns have `capacity` numbers each.
class TableRows {
public:
    TableRows(const nb::handle& items, std::size_t capacity, const nb::bytes& rows, std::size_t width)
        : items_(items, "items"), rows_(rows, "rows"), capacity_(capacity) {
        if (static_cast<std::size_t>(items_.count()) < capacity * width) {
            refuse("items", items_.count(), std::to_string(capacity * width) + " numbers or more");
        }
        for (std::size_t place = 0; place < rows_.count; ++place) {
            if (rows_.data[place] >= capacity) {
                refuse("row", static_cast<i64>(rows_.data[place]), "one of " + std::to_string(capacity));
            }
        }
    }

    std::size_t count() const { return rows_.count; }
    void copy(std::size_t column, double* out) const {
        const Floats items = items_.column();
        for (std::size_t place = 0; place < rows_.count; ++place) {
            out[place] = items[column * capacity_ + rows_.data[place]];
        }
    }

private:
    const Numbers<double> items_;
    const Words<u64> rows_;
    const std::size_t capacity_;
};

Floats packed(const double* numbers) {
    return {reinterpret_cast<const char*>(numbers), static_cast<std::ptrdiff_t>(sizeof(double))};
}

nb::bytes factors(const FactorRules& rules, const nb::handle& items, std::size_t capacity, const nb::bytes& rows,
                  double prefill_shared, double prefill_mean, double decode_shared, double decode_mean, double now_s,
                  bool is_whole) {
    constexpr std::size_t kColumns = 5;  // prefill, decode, the beliefs in them, time of the last measurement
    const TableRows table(items, capacity, rows, kColumns);
    const std::size_t of = table.count();
    std::vector<double> columns(kColumns * of);
    for (std::size_t column = 0; column < kColumns; ++column) {
        table.copy(column, columns.data() + column * of);
    }
    const auto column = [&columns, of](std::size_t at) { return packed(columns.data() + at * of); };
    nb::bytes made = new_bytes(2 * sizeof(double) * of);
    double* out = floats_of(made);
    used_factors(rules, {column(0), column(2), column(4)}, {prefill_shared, prefill_mean}, now_s, is_whole, of, out);
    used_factors(rules, {column(1), column(3), column(4)}, {decode_shared, decode_mean}, now_s, is_whole, of, out + of);
    return made;
}

nb::bytes scaled(const nb::handle& items, std::size_t capacity, const nb::bytes& rows, double factor) {
    const TableRows table(items, capacity, rows, 1);
    nb::bytes made = new_bytes(sizeof(double) * table.count());
    double* out = floats_of(made);
    table.copy(0, out);
    for (std::size_t place = 0; place < table.count(); ++place) {
        out[place] = out[place] * factor;
    }
    return made;
}

}  // namespace

void bind_costs(nb::module_& module) {
    nb::class_<CreditRules>(module, "CreditRules")
        .def("__init__", [](CreditRules* made, double overlap_credit, double decay, double host_weight, double disk_weight) {
            new (made) CreditRules{overlap_credit, decay, host_weight, disk_weight};
        });
    nb::class_<ReferenceEngine>(module, "ReferenceEngine")
        .def("__init__",
             [](ReferenceEngine* made, double token, double pair, double step, double sequence, double kv_token) {
                 new (made) ReferenceEngine{token, pair, step, sequence, kv_token};
             })
        .def("terms", &terms, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(),
             nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg());
    nb::class_<FactorRules>(module, "FactorRules")
        .def("__init__",
             [](FactorRules* made, double forget_s, double alike, double ramp, int halvings_max) {
                 new (made) FactorRules{forget_s, alike, ramp, halvings_max};
             })
        .def("used", &factors);
    module.def("scaled", &scaled, "items"_a, "capacity"_a, "rows"_a, "factor"_a);
}

}  // namespace kv
