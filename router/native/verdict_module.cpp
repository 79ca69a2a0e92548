// In C++: the base class of router/decision/verdict.py. All calls keep the GIL.
#include <cstring>

#include "core_bindings.hpp"
#include "decision_bytes.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace kv {

namespace {

// A field's name, made once: it is asked for with every request.
class Name {
public:
    explicit Name(const char* name) : text_(PyUnicode_InternFromString(name)) {}
    nb::object of(const nb::handle& owner) const {
        PyObject* const found = PyObject_GetAttr(owner.ptr(), text_);
        if (found == nullptr) {
            throw nb::python_error();
        }
        return nb::steal(found);
    }

private:
    PyObject* const text_;  // as long as the process
};

std::string_view text_of(const nb::object& text) {
    Py_ssize_t size = 0;
    const char* const data = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
    if (data == nullptr) {
        throw nb::python_error();
    }
    return {data, static_cast<std::size_t>(size)};
}

nb::object attribute(const nb::handle& of, const char* name) { return of.attr(name); }

template <typename Value>
Value read(const nb::handle& of, const char* name) {
    return nb::cast<Value>(attribute(of, name));
}

Seconds seconds_of(const nb::object& value) { return value.is_none() ? Seconds{} : Seconds(nb::cast<double>(value)); }

std::string estimated_scheme;  // `kv_protocol.hashing.TEXT_SCHEME`: of prompts with an estimated length

// Reads a `kv_protocol.decided.RouteRequest`.
std::shared_ptr<const Request> request_of(const nb::handle& given) {
    static const Name phase("phase"), decision_id("decision_id"), model("model"), session_id("session_id"), tenant("tenant"),
        lora("lora"), isl_tokens("isl_tokens"), hash_scheme("hash_scheme"), block_size("block_size"), max_tokens("max_tokens"),
        expected_osl("expected_osl"), pinned_worker("pinned_worker"), ttft_target_s("ttft_target_s"), itl_target_s("itl_target_s"),
        sequence_hashes("sequence_hashes");
    const nb::object of_phase = phase.of(given), of_scheme = hash_scheme.of(given);
    auto made = std::make_shared<Request>();
    made->decision_id = text_of(decision_id.of(given));
    made->model = text_of(model.of(given));
    made->session_id = text_of(session_id.of(given));
    made->tenant = text_of(tenant.of(given));
    made->lora = text_of(lora.of(given));
    made->isl_tokens = nb::cast<i64>(isl_tokens.of(given));
    made->known_tokens = text_of(of_scheme) == estimated_scheme ? 0 : made->isl_tokens;
    made->block_size = nb::cast<i64>(block_size.of(given));
    made->max_tokens = nb::cast<i64>(max_tokens.of(given));
    made->expected_osl = nb::cast<i64>(expected_osl.of(given));
    made->is_prefilled = text_of(of_phase) != "decode";
    made->is_decoded = text_of(of_phase) != "prefill";
    made->is_pinned = !pinned_worker.of(given).is_none();
    made->ttft_target_s = seconds_of(ttft_target_s.of(given));
    made->itl_target_s = seconds_of(itl_target_s.of(given));
    made->blocks = chain_of(nb::cast<nb::bytes>(sequence_hashes.of(given)));
    return made;
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

// Of a `router.decision.policy.Policy` whose mode is one of `Mode`, or a user's that reads so.
std::shared_ptr<Policy> policy_of(const nb::handle& given, const std::string& mode, bool reads_overlap, bool reads_load,
                                  bool reads_forecast) {
    const nb::object parameters = attribute(given, "parameters");
    auto made = std::make_shared<Policy>();
    made->name = read<std::string>(given, "mode");
    made->mode = one_of<Mode>(mode, {{"kv", Mode::kCost},
                                     {"kv-blocks", Mode::kBlocks},
                                     {"predicted-ttft", Mode::kForecast},
                                     {"round-robin", Mode::kTurn},
                                     {"random", Mode::kDraw},
                                     {"power-of-two", Mode::kOfTwo},
                                     {"least-loaded", Mode::kLeastLoaded},
                                     {"direct", Mode::kNamed},
                                     {"user", Mode::kUser}});
    made->reads_overlap = reads_overlap;
    made->reads_load = reads_load;
    made->reads_forecast = reads_forecast;
    made->is_timed = made->mode == Mode::kCost;
    std::array<double, sizeof(Weights) / sizeof(double)> weights{};
    std::size_t at = 0;
    for (const nb::handle name : parameters.attr("__struct_fields__")) {
        weights.at(at++) = nb::cast<double>(parameters.attr(name));
    }
    std::memcpy(&made->weights, weights.data(), sizeof(Weights));
    made->temperature = read<double>(given, "temperature");
    made->predicts = read<bool>(given, "predict_on_route");
    made->spill_tokens = read<i64>(given, "spill_tokens");
    made->bounds_newcomers = read<bool>(given, "newcomers");
    made->affinity = one_of<Affinity>(read<std::string>(given, "affinity"),
                                      {{"off", Affinity::kOff}, {"soft", Affinity::kSoft}, {"hard", Affinity::kHard}});
    made->affinity_discount = read<double>(given, "affinity_discount");
    made->ttft_target_s = seconds_of(attribute(given, "ttft_target_s"));
    made->itl_target_s = seconds_of(attribute(given, "itl_target_s"));
    made->unmet = read<std::string>(given, "unmet");
    return made;
}

// Reads the overlap on each tier: of an array, or of the bytes that a journal has.
std::vector<std::int32_t> tiers_of(const nb::handle& overlap, std::size_t count) {
    if (PyBytes_Check(overlap.ptr())) {
        const nb::bytes packed = nb::borrow<nb::bytes>(overlap);
        std::vector<std::int32_t> tiers = unpacked_overlap({packed.c_str(), packed.size()}, count);
        if (tiers.size() != kTiers * count) {
            refuse("overlap", static_cast<i64>(packed.size()), "bytes that have the overlap of " + std::to_string(count) + " columns");
        }
        return tiers;
    }
    return numbers_in<std::int32_t>(overlap, "overlap", kTiers, count);
}

std::vector<char> flags_of(const nb::handle& given) {
    std::vector<char> flags;
    if (!given.is_none()) {
        for (const nb::handle each : given) {
            const int is_true = PyObject_IsTrue(each.ptr());
            if (is_true < 0) {
                throw nb::python_error();
            }
            flags.push_back(is_true == 1);
        }
    }
    return flags;
}

std::vector<double> numbers_of(const nb::handle& given) {
    return given.is_none() ? std::vector<double>{} : nb::cast<std::vector<double>>(given);
}

void init_verdict(Verdict* made, PyCore& core, std::shared_ptr<const Standing> standing, const Trusts& trusts,
                  std::shared_ptr<const Policy> policy, const nb::handle& request, const nb::handle& overlap,
                  const nb::object& epochs, double now_s, u64 seed, const nb::handle& excluded, const nb::handle& multiplier) {
    const std::shared_ptr<const Request> asked = request_of(request);
    auto view_epochs = core.epochs_of(epochs);
    if (view_epochs != nullptr && view_epochs->size() != standing->rows.size()) {
        refuse("epochs", static_cast<i64>(view_epochs->size()), std::to_string(standing->rows.size()) + ", one of each rank");
    }
    std::vector<std::int32_t> tiers = view_epochs == nullptr ? std::vector<std::int32_t>{} : tiers_of(overlap, standing->rows.size());
    const auto view = core.look(std::move(standing), trusts, *policy, *asked, std::move(tiers), std::move(view_epochs), now_s);
    Verdict verdict(view, std::move(policy), asked, seed);
    verdict.decide(flags_of(excluded), numbers_of(multiplier));
    new (made) Verdict(std::move(verdict));
}

// Decides again for the same request, by another policy.
void init_again(Verdict* made, PyCore& core, const Verdict& live, std::shared_ptr<const Policy> policy, u64 seed,
                const nb::handle& excluded, const nb::handle& multiplier) {
    Verdict verdict(core.look_again(*live.view, *policy, *live.request), policy, live.request, seed);
    verdict.decide(flags_of(excluded), numbers_of(multiplier));
    new (made) Verdict(std::move(verdict));
}

// Decides by the columns of a `router.decision.view.View` in place of the core's state.
void init_of_view(Verdict* made, PyCore& core, const nb::handle& given, std::shared_ptr<const Policy> policy, const nb::handle& request, u64 seed,
                  const nb::handle& excluded, const nb::handle& multiplier) {
    std::vector<RankKey> keys;
    for (const nb::handle each : given.attr("ranks")) {
        keys.push_back({nb::cast<std::string>(each[0]), nb::cast<i64>(each[1])});
    }
    std::vector<i64> capacity;
    for (const nb::handle each : given.attr("registrations")) {
        capacity.push_back(read<i64>(each, "total_kv_blocks"));
    }
    auto view = std::make_shared<View>(core.standing(keys, std::move(capacity)), read<double>(given, "now_s"), read<u64>(given, "turn"));
    RankNumbers& numbers = view->numbers;
    const std::size_t n = keys.size();
    const auto set = [n](auto& column, const nb::handle& of, const char* name) {
        const nb::object given_column = of.attr(name);
        if (!given_column.is_none()) {
            const auto found = numbers_in<typename std::decay_t<decltype(column)>::value_type>(given_column, name, 1, n);
            column.assign(found.begin(), found.end());
        }
    };
    numbers.tiers = tiers_of(given.attr("overlap"), n);
    set(numbers.predicted, given, "predicted");
    set(numbers.queued, given, "queued_tokens");
    set(numbers.requests, given, "active_requests");
    set(numbers.blocks, given, "active_blocks");
    set(numbers.shared, given, "shared_blocks");
    numbers.capacity.assign(view->standing->capacity.begin(), view->standing->capacity.end());
    set(numbers.history, given, "history_blocks");
    set(numbers.trust, given, "trust_factor");
    const nb::object rates = given.attr("rates"), forecast = given.attr("forecast"), bound = given.attr("bound");
    if (!rates.is_none()) {
        set(numbers.prefill, rates, "prefill");
        set(numbers.decode, rates, "decode");
        view->output_tokens = read<double>(rates, "output_tokens");
        view->is_learnt = read<bool>(rates, "is_learnt");
    }
    if (!forecast.is_none()) {
        set(numbers.ttft_s, forecast, "ttft_s");
        set(numbers.itl_s, forecast, "itl_s");
    }
    if (!bound.is_none()) {
        view->bound = Held(core.ranks, RankKey{nb::cast<std::string>(bound[0]), nb::cast<i64>(bound[1])});
    }
    view->spent = flags_of(given.attr("newcomer"));
    view->epochs = std::make_shared<const std::vector<u64>>(nb::cast<std::vector<u64>>(given.attr("epochs")));
    view->is_blank = read<bool>(given, "is_blank");
    if ((policy->is_timed && numbers.prefill.size() != n) || (policy->reads_forecast && numbers.ttft_s.size() != n)) {
        throw nb::value_error("the view was made for another mode");
    }
    Verdict verdict(view, std::move(policy), request_of(request), seed);
    verdict.decide(flags_of(excluded), numbers_of(multiplier));
    new (made) Verdict(std::move(verdict));
}

nb::bytes column(const Verdict& verdict, const std::string& name) {
    const RankNumbers& ranks = verdict.view->numbers;
    const std::size_t n = ranks.count;
    return name == "overlap"           ? packed(ranks.tiers, kTiers * n)
           : name == "predicted"       ? packed(ranks.predicted, n)
           : name == "queued_tokens"   ? packed(ranks.queued, n)
           : name == "active_requests" ? packed(ranks.requests, n)
           : name == "active_blocks"   ? packed(ranks.blocks, n)
           : name == "shared_blocks"   ? packed(ranks.shared, n)
           : name == "history_blocks"  ? packed(ranks.history, n)
           : name == "newcomer"        ? packed(verdict.view->spent, n)
                                       : throw nb::key_error(name.c_str());
}

std::optional<nb::bytes> factors(const Verdict& verdict, const std::string& name) {
    const RankNumbers& ranks = verdict.view->numbers;
    const RankNumbers::Floats& found = name == "trust_factor" ? ranks.trust
                                       : name == "prefill"    ? ranks.prefill
                                       : name == "decode"     ? ranks.decode
                                       : name == "ttft_s"     ? ranks.ttft_s
                                       : name == "itl_s"      ? ranks.itl_s
                                                              : throw nb::key_error(name.c_str());
    return found.empty() ? std::nullopt : std::optional<nb::bytes>(packed(found, ranks.count));
}

Seconds seconds_at(const RankNumbers::Floats& column, std::size_t place) {
    return column.empty() ? Seconds{} : Seconds(column[place]);
}

}  // namespace

void bind_verdict(nb::module_& module) {
    estimated_scheme = nb::cast<std::string>(nb::module_::import_("kv_protocol.hashing").attr("TEXT_SCHEME"));
    nb::class_<Policy>(module, "Policy");
    module.def("policy", &policy_of, "policy"_a, "mode"_a, "reads_overlap"_a, "reads_load"_a, "reads_forecast"_a);
    nb::class_<Standing>(module, "Standing");
    nb::class_<Trusts>(module, "Trusts").def("__init__", [](Trusts* made, std::vector<double> factors, std::vector<u32> without_events) {
        new (made) Trusts{std::move(factors), std::move(without_events)};
    });
    nb::class_<Verdict>(module, "Verdict")
        .def("__init__", &init_verdict, "core"_a, "standing"_a, "trusts"_a, "policy"_a, "request"_a, "overlap"_a.none(), "epochs"_a.none(),
             "now_s"_a, "seed"_a, "excluded"_a.none(), "multiplier"_a.none())
        .def("__init__", &init_again, "core"_a, "live"_a, "policy"_a, "seed"_a, "excluded"_a.none(), "multiplier"_a.none())
        .def("__init__", &init_of_view, "core"_a, "view"_a, "policy"_a, "request"_a, "seed"_a, "excluded"_a.none(), "multiplier"_a.none())
        .def("take_choice",
             [](Verdict& verdict, std::size_t winner, std::string reason, std::optional<std::size_t> runner_up, Seconds margin,
                bool meets_targets, const std::vector<double>& costs) {
                 const std::size_t count = verdict.candidates.size();
                 if (winner >= count || (runner_up.has_value() && *runner_up >= count) || (!costs.empty() && costs.size() != count)) {
                     refuse("winner", static_cast<i64>(winner), "one of " + std::to_string(count) + " candidates, with a cost of each or none");
                 }
                 verdict.take_choice(winner, std::move(reason), runner_up, margin, meets_targets,
                                     costs.empty() ? Costs() : Costs::given(costs));
             },
             "winner"_a, "reason"_a, "runner_up"_a.none(), "margin"_a.none(), "meets_targets"_a, "costs"_a)
        .def_prop_ro("now_s", [](const Verdict& verdict) { return verdict.view->now_s; })
        .def_prop_ro("turn", [](const Verdict& verdict) { return verdict.view->turn; })
        .def_prop_ro("is_blank", [](const Verdict& verdict) { return verdict.view->is_blank; })
        .def_prop_ro("output_tokens", [](const Verdict& verdict) { return verdict.view->output_tokens; })
        .def_prop_ro("is_learnt", [](const Verdict& verdict) { return verdict.view->is_learnt; })
        .def_prop_ro("bound",
                     [](const Verdict& verdict) {
                         const std::optional<Held>& bound = verdict.view->bound;
                         return bound.has_value() ? std::optional<RankTuple>({bound->key().worker_id, bound->key().dp_rank}) : std::nullopt;
                     })
        .def_ro("seed", &Verdict::seed)
        .def_prop_ro("policy", [](const Verdict& verdict) { return verdict.policy->name; })
        .def_prop_ro("action", [](const Verdict& verdict) { return verdict.meets_targets ? std::string("admit") : verdict.policy->unmet; })
        .def_ro("reason", &Verdict::reason)
        .def_ro("meets_targets", &Verdict::meets_targets)
        .def_ro("rank_indices", &Verdict::candidates)
        .def_ro("passes_over", &Verdict::passes_over)
        .def_ro("winner_at", &Verdict::winner_at)
        .def_ro("runner_up", &Verdict::runner_up)
        .def_ro("margin", &Verdict::margin)
        .def_ro("overlap_blocks", &Verdict::overlap_blocks)
        .def_ro("expected_blocks", &Verdict::expected_blocks)
        .def_ro("lost_blocks", &Verdict::lost_blocks)
        .def_ro("regret_blocks", &Verdict::regret_blocks)
        .def_prop_ro("most_blocks",
                     [](const Verdict& verdict) {
                         const RankNumbers& ranks = verdict.view->numbers;
                         return ranks.tiers[(kTiers - 1) * ranks.count + verdict.place()];
                     })
        .def_prop_ro("place", &Verdict::place)
        .def_prop_ro("epoch", &Verdict::epoch)
        .def_prop_ro("uncached_tokens", &Verdict::uncached_tokens)
        .def_prop_ro("ttft_s", [](const Verdict& verdict) { return seconds_at(verdict.view->numbers.ttft_s, verdict.place()); })
        .def_prop_ro("itl_s", [](const Verdict& verdict) { return seconds_at(verdict.view->numbers.itl_s, verdict.place()); })
        .def("column", &column, "name"_a)
        .def("factors", &factors, "name"_a)
        .def_prop_ro("has_costs", [](const Verdict& verdict) { return !verdict.costs.empty(); })
        .def_prop_ro("is_timed", [](const Verdict& verdict) { return verdict.costs.is_timed; })
        .def("cost_list",
             [](const Verdict& verdict) {
                 return verdict.costs.empty() ? std::vector<double>{}
                                              : std::vector<double>(verdict.costs.cost(), verdict.costs.cost() + verdict.costs.count);
             })
        .def("cost_terms",
             [](const Verdict& verdict, std::size_t at) {
                 std::vector<double> terms;
                 if (at >= verdict.costs.count) {
                     refuse("candidate", static_cast<i64>(at), "one of " + std::to_string(verdict.costs.count) + " with costs");
                 }
                 for (std::size_t field = 0; field < Costs::kFields; ++field) {
                     terms.push_back(verdict.costs.term(field, at));
                 }
                 return terms;
             },
             "at"_a)
        .def("is_spilled", [](const Verdict& verdict, std::size_t at) { return at < verdict.costs.spilled.size() && verdict.costs.spilled[at]; },
             "at"_a)
        .def("record",
             [](const Verdict& verdict, const nb::bytes& request, u64 kv_seq) {
                 return bytes_of(verdict.record({request.c_str(), request.size()}, kv_seq));
             },
             "request"_a, "kv_seq"_a);
}

}  // namespace kv
