// In C++: the base class of router/decision/verdict.py. All calls keep the GIL.
#include <cstring>

#include "bindings.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace kv {

namespace {

nb::object attribute(const nb::handle& of, const char* name) { return of.attr(name); }

template <typename Value>
Value read(const nb::handle& of, const char* name) {
    return nb::cast<Value>(attribute(of, name));
}

template <typename Choice>
Choice one_of(const std::string& found, std::initializer_list<std::pair<const char*, Choice>> allowed) {
    for (const auto& [name, choice] : allowed) {
        if (found == name) {
            return choice;
        }
    }
    throw nb::value_error(("found " + found).c_str());
}

// `mode` names one of `Mode`; the flags say what it reads.
std::shared_ptr<Policy> policy_of(const nb::handle& given, const std::string& mode, bool reads_overlap, bool reads_load, bool reads_rates) {
    const nb::object parameters = attribute(given, "parameters");
    auto made = std::make_shared<Policy>();
    made->name = read<std::string>(given, "mode");
    made->mode = one_of<Mode>(mode, {{"kv", Mode::kCost},
                                     {"predicted-ttft", Mode::kSoonest},
                                     {"round-robin", Mode::kTurn},
                                     {"random", Mode::kDraw},
                                     {"power-of-two", Mode::kOfTwo},
                                     {"least-loaded", Mode::kLeastLoaded},
                                     {"direct", Mode::kNamed},
                                     {"user", Mode::kUser}});
    made->reads_overlap = reads_overlap;
    made->reads_load = reads_load;
    made->reads_rates = reads_rates;
    std::array<double, sizeof(Weights) / sizeof(double)> weights{};
    std::size_t at = 0;
    for (const nb::handle name : parameters.attr("__struct_fields__")) {
        weights.at(at++) = nb::cast<double>(parameters.attr(name));
    }
    std::memcpy(&made->weights, weights.data(), sizeof(Weights));
    made->temperature = read<double>(given, "temperature");
    made->predicts = read<bool>(given, "predict_on_route");
    made->bounds_newcomers = read<bool>(given, "newcomers");
    made->affinity = one_of<Affinity>(read<std::string>(given, "affinity"),
                                      {{"off", Affinity::kOff}, {"soft", Affinity::kSoft}, {"hard", Affinity::kHard}});
    made->affinity_discount = read<double>(given, "affinity_discount");
    made->ttft_target_s = seconds_of(attribute(given, "ttft_target_s"));
    made->itl_target_s = seconds_of(attribute(given, "itl_target_s"));
    made->unmet = read<std::string>(given, "unmet");
    return made;
}

}  // namespace

void bind_verdict(nb::module_& module) {
    nb::class_<Policy>(module, "Policy");
    module.def("policy", &policy_of, "policy"_a, "mode"_a, "reads_overlap"_a, "reads_load"_a, "reads_rates"_a);
    nb::class_<Standing>(module, "Standing");
    nb::class_<Trusts>(module, "Trusts").def("__init__", [](Trusts* made, std::vector<double> factors, std::vector<u32> without_events) {
        new (made) Trusts{std::move(factors), std::move(without_events)};
    });
    nb::class_<Verdict>(module, "Verdict")
        .def("take_choice",
             [](Verdict& verdict, std::size_t winner, std::string reason, std::optional<std::size_t> runner_up, Seconds margin,
                bool meets_targets, const std::vector<double>& costs) {
                 const std::size_t count = verdict.candidates.size();
                 if (winner >= count || (runner_up.has_value() && *runner_up >= count) || (!costs.empty() && costs.size() != count)) {
                     refuse("winner", static_cast<i64>(winner), "one of " + std::to_string(count) + " candidates, with a cost of each or none");
                 }
                 verdict.take_choice(winner, std::move(reason), runner_up, margin, meets_targets, costs);
             },
             "winner"_a, "reason"_a, "runner_up"_a.none(), "margin"_a.none(), "meets_targets"_a, "costs"_a)
        .def("forget_others", &Verdict::forget_others)
        .def_prop_ro("now_s", [](const Verdict& verdict) { return verdict.view->now_s; })
        .def_prop_ro("turn", [](const Verdict& verdict) { return verdict.view->turn; })
        .def_prop_ro("is_blank", [](const Verdict& verdict) { return verdict.view->is_blank; })
        .def_prop_ro("output_tokens", [](const Verdict& verdict) { return verdict.view->output_tokens; })
        .def_prop_ro("is_learnt", [](const Verdict& verdict) { return verdict.view->is_learnt; })
        .def_prop_ro("bound",
                     [](const Verdict& verdict) {
                         const std::optional<Held>& bound = verdict.view->bound;
                         return bound.has_value() ? std::optional(bound->key()) : std::nullopt;
                     })
        .def_prop_ro("request", [](const Verdict& verdict) { return verdict.named.request; })
        .def_prop_ro("model_view", [](const Verdict& verdict) { return verdict.named.model_view; })
        .def_prop_ro("trusts", [](const Verdict& verdict) { return verdict.named.trusts; })
        .def_prop_ro("why", [](const Verdict& verdict) { return verdict.named.why; })
        .def_prop_ro("epochs", [](const Verdict& verdict) { return verdict.named.epochs; })
        .def_prop_ro("seqs", [](const Verdict& verdict) { return verdict.named.seqs; })
        .def_prop_ro("winner", [](const Verdict& verdict) -> nb::object { return verdict.named.model_view.attr("ranks")[verdict.place()]; })
        .def_prop_ro("registration",
                     [](const Verdict& verdict) -> nb::object { return verdict.named.model_view.attr("registrations")[verdict.place()]; })
        .def_prop_ro("decision_id", [](const Verdict& verdict) { return verdict.request->decision_id; })
        .def_ro("seed", &Verdict::seed)
        .def_prop_ro("policy", [](const Verdict& verdict) { return verdict.policy->name; })
        .def_prop_ro("action", [](const Verdict& verdict) { return verdict.meets_targets ? std::string("admit") : verdict.policy->unmet; })
        .def_ro("reason", &Verdict::reason)
        .def_ro("meets_targets", &Verdict::meets_targets)
        .def_ro("rank_indices", &Verdict::candidates)
        .def_prop_ro("candidate_count", &Verdict::candidate_count)
        .def_ro("passes_over", &Verdict::passes_over)
        .def_ro("winner_at", &Verdict::winner_at)
        .def_ro("runner_up", &Verdict::runner_up)
        .def_ro("margin", &Verdict::margin)
        .def_ro("overlap_blocks", &Verdict::overlap_blocks)
        .def_ro("expected_blocks", &Verdict::expected_blocks)
        .def_ro("lost_blocks", &Verdict::lost_blocks)
        .def_ro("regret_blocks", &Verdict::regret_blocks)
        .def_ro("most_blocks", &Verdict::most_blocks)
        .def_prop_ro("place", &Verdict::place)
        .def_prop_ro("epoch", &Verdict::epoch)
        .def_prop_ro("uncached_tokens", &Verdict::uncached_tokens)
        .def_prop_ro("ttft_s", [](const Verdict& verdict) { return verdict.ttft_s(verdict.winner_at); })
        .def("predicted_s",
             [](const Verdict& verdict, std::size_t at) { return std::make_pair(verdict.ttft_s(at), verdict.itl_s(at)); }, "at"_a)
        .def_prop_ro("packed_numbers",
                     [](const Verdict& verdict) {
                         const std::vector<RankNumbers>& ranks = verdict.view->ranks;
                         return nb::bytes(ranks.data(), ranks.size() * sizeof(RankNumbers));
                     })
        .def_prop_ro("has_rates", [](const Verdict& verdict) { return verdict.view->has_rates; })
        .def_prop_ro("spent", [](const Verdict& verdict) { return bytes_of({verdict.view->spent.data(), verdict.view->spent.size()}); })
        .def("held", [](const Verdict& verdict, u32 place) {
            const RankNumbers& rank = verdict.view->at(place);
            return std::make_pair(std::vector<std::int32_t>(rank.held.begin(), rank.held.end()), rank.predicted);
        }, "place"_a)
        .def_prop_ro("has_costs", [](const Verdict& verdict) { return !verdict.terms.empty(); })
        .def_ro("is_timed", &Verdict::is_timed)
        .def("cost_list", &Verdict::costs)
        .def("cost_terms",
             [](const Verdict& verdict, std::size_t at) {
                 if (at >= verdict.terms.size()) {
                     refuse("candidate", static_cast<i64>(at), "one of " + std::to_string(verdict.terms.size()) + " with costs");
                 }
                 return numbers_of(verdict.terms[at]);
             },
             "at"_a)
        .def("record",
             [](const Verdict& verdict, const nb::bytes& request, u64 kv_seq) {
                 Pack record;
                 verdict.record(record, {request.c_str(), request.size()}, kv_seq);
                 return bytes_of(record.view());
             },
             "request"_a, "kv_seq"_a);
}

}  // namespace kv
