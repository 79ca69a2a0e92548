// Makes the verdicts of router/decision/verdict.py, and shows them to Python. All calls keep the GIL.
#include <chrono>
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

// The fields of a `kv_protocol.decided.RouteRequest`.
struct RequestSlots {
    explicit RequestSlots(const nb::handle& of) : type(of) {}
    nb::handle type;
    Slot model{type, "model"}, block_size{type, "block_size"}, hash_scheme{type, "hash_scheme"}, phase{type, "phase"},
        endpoint{type, "endpoint"}, decision_id{type, "decision_id"}, session_id{type, "session_id"}, tenant{type, "tenant"},
        lora{type, "lora"}, isl_tokens{type, "isl_tokens"}, max_tokens{type, "max_tokens"}, expected_osl{type, "expected_osl"},
        pinned_worker{type, "pinned_worker"}, pinned_dp_rank{type, "pinned_dp_rank"}, allowed_workers{type, "allowed_workers"},
        tried{type, "tried"}, required_taints{type, "required_taints"}, preferred_taints{type, "preferred_taints"},
        transfer_domain{type, "transfer_domain"}, prefill_worker{type, "prefill_worker"}, ttft_target_s{type, "ttft_target_s"},
        itl_target_s{type, "itl_target_s"}, sequence_hashes{type, "sequence_hashes"};
};

// What Python passes to `name_types`, once.
struct Names {
    nb::object request_type, verdict_type, constraints;  // `router.decision.eligibility.constraints`
    std::string estimated_scheme;                        // the `hash_scheme` of prompts with an estimated length
    RequestSlots request{request_type};
};

const Names* names = nullptr;  // lives as long as the process

const RequestSlots& slots_of(const nb::handle& request) {
    if (names == nullptr || !Py_IS_TYPE(request.ptr(), reinterpret_cast<PyTypeObject*>(names->request_type.ptr()))) {
        throw nb::type_error("request: allowed is a RouteRequest");
    }
    return names->request;
}

std::shared_ptr<const Request> request_of(const nb::handle& given) {
    const RequestSlots& of = slots_of(given);
    const std::string_view phase = text_of(of.phase.of(given));
    auto made = std::make_shared<Request>();
    made->decision_id = text_of(of.decision_id.of(given));
    made->model = text_of(of.model.of(given));
    made->session_id = text_of(of.session_id.of(given));
    made->tenant = text_of(of.tenant.of(given));
    made->lora = text_of(of.lora.of(given));
    made->isl_tokens = nb::cast<i64>(of.isl_tokens.of(given));
    made->known_tokens = text_of(of.hash_scheme.of(given)) == names->estimated_scheme ? 0 : made->isl_tokens;
    made->block_size = nb::cast<i64>(of.block_size.of(given));
    made->max_tokens = nb::cast<i64>(of.max_tokens.of(given));
    made->expected_osl = nb::cast<i64>(of.expected_osl.of(given));
    made->is_prefilled = phase != "decode";
    made->is_decoded = phase != "prefill";
    made->is_pinned = !of.pinned_worker.of(given).is_none();
    made->ttft_target_s = seconds_of(of.ttft_target_s.of(given));
    made->itl_target_s = seconds_of(of.itl_target_s.of(given));
    made->blocks = Chain(nb::cast<nb::bytes>(of.sequence_hashes.of(given)));
    return made;
}

// The hashes of the prompt's blocks that a cache could provide.
nb::object reusable_chain(const nb::handle& given, const Request& request) {
    const nb::handle chain = names->request.sequence_hashes.of(given);
    const auto size = static_cast<Py_ssize_t>(sizeof(u64)) * static_cast<Py_ssize_t>(request.reusable_blocks());
    return size >= PyBytes_GET_SIZE(chain.ptr()) ? nb::borrow(chain)
                                                 : nb::steal(PyBytes_FromStringAndSize(PyBytes_AS_STRING(chain.ptr()), size));
}

// The overlap of `count` ranks on each tier, from any object with a buffer that has it tier by tier.
std::vector<std::int32_t> tiers_of(const nb::handle& overlap, std::size_t count) {
    Py_buffer shown;
    if (PyObject_GetBuffer(overlap.ptr(), &shown, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) {
        throw nb::python_error();
    }
    const std::unique_ptr<Py_buffer, void (*)(Py_buffer*)> held(&shown, PyBuffer_Release);
    if (std::string_view(shown.format) != "i" || shown.ndim != 2 || shown.shape[0] != kTiers || shown.shape[1] != static_cast<Py_ssize_t>(count)) {
        refuse("overlap", shown.ndim == 0 ? 0 : shown.shape[shown.ndim - 1], "4 x " + std::to_string(count) + " int32");
    }
    const auto* const numbers = static_cast<const std::int32_t*>(shown.buf);
    return {numbers, numbers + kTiers * count};
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

// Which ranks may not take a request, and what multiplies their costs.
struct Constraints {
    explicit Constraints(nb::object of) : why(std::move(of)), excluded(flags_of(why)) {
        if (std::find(excluded.begin(), excluded.end(), true) == excluded.end()) {
            why = nb::none();
            excluded.clear();
        }
    }
    nb::object why;  // why each rank may not take the request, empty if it may; None: all may
    std::vector<char> excluded;
    std::vector<double> multiplier;
};

Constraints constraints_of(const nb::handle& view, const nb::handle& request, const nb::handle& rule) {
    const nb::object found = names->constraints(view, request, rule[0]);
    Constraints made(found[0]);
    if (const nb::object given = found[1]; !given.is_none()) {
        made.multiplier = nb::cast<std::vector<double>>(given);
    }
    return made;
}

// What decisions on requests of one kind (model, hashing, phase, endpoint) share, until the fleet, its breakers or the policy change, or
// `valid_until_s` comes.
struct Basis {
    // `why`: why each rank takes no request of this kind, empty if it does.
    Basis(nb::object view, nb::tuple of, u64 at, nb::object why)
        : model_view(std::move(view)), rule(std::move(of)), changes(at), constraints(std::move(why)) {}

    bool holds(double now_s, u64 at) const { return now_s < valid_until_s && changes == at; }
    void doubt(nb::object of) {
        if (!doubts.is(of)) {
            const nb::object trusted = model_view.attr("trusted")(of);
            trusts = trusted[0];
            native_trusts = nb::cast<std::shared_ptr<const Trusts>>(trusted[1]);
            doubts = std::move(of);
        }
    }
    void begin(nb::object of) {
        if (!given_epochs.is(of)) {
            auto made = nb::cast<std::vector<u64>>(of);
            if (made.size() != standing->rows.size()) {
                refuse("epochs", static_cast<i64>(made.size()), std::to_string(standing->rows.size()) + ", one of each rank");
            }
            epochs = std::make_shared<const std::vector<u64>>(std::move(made));
            given_epochs = std::move(of);
        }
    }

    nb::object model_view;
    nb::tuple rule;
    u64 changes;
    Constraints constraints;  // for requests that have none of their own
    std::shared_ptr<const Policy> policy = nb::cast<std::shared_ptr<const Policy>>(rule[2]);
    std::shared_ptr<const Standing> standing = nb::cast<std::shared_ptr<const Standing>>(model_view.attr("standing"));
    bool is_open = policy->mode != Mode::kNamed &&  // one rank at least takes a request without constraints of its own
                   std::count(constraints.excluded.begin(), constraints.excluded.end(), true) != static_cast<std::ptrdiff_t>(standing->rows.size());
    nb::object ranks = model_view.attr("ranks"), registrations = model_view.attr("registrations"), undoubted = model_view.attr("undoubted");
    nb::object transfer_domain = model_view.attr("transfer_domain");
    i64 seq_len_min = nb::cast<i64>(model_view.attr("seq_len_min"));
    double valid_until_s = nb::cast<double>(model_view.attr("valid_until_s"));
    // From the index's last answer.
    nb::object doubts, trusts, given_epochs;
    std::shared_ptr<const Trusts> native_trusts;
    std::shared_ptr<const std::vector<u64>> epochs;
};

// Whether the request may exclude ranks that take other requests of its kind, or raise the cost of some.
bool is_constrained(const nb::handle& given, const Request& request, const Basis& basis) {
    const RequestSlots& of = names->request;
    const auto is_given = [&given](const Slot& tuple) { return PyTuple_GET_SIZE(tuple.of(given).ptr()) != 0; };
    const nb::handle domain = of.transfer_domain.of(given);
    const bool is_transfer = !domain.is_none() || !of.prefill_worker.of(given).is_none();
    return request.is_pinned || !request.lora.empty() || !of.pinned_dp_rank.of(given).is_none() || !of.allowed_workers.of(given).is_none() ||
           is_given(of.tried) || is_given(of.required_taints) || is_given(of.preferred_taints) ||
           (is_transfer && (basis.transfer_domain.is_none() || !(domain.is_none() || domain.equal(basis.transfer_domain)))) ||
           (basis.seq_len_min != 0 && request.known_tokens != 0 &&
            request.isl_tokens + std::max<i64>(1, request.max_tokens) > basis.seq_len_min);
}

// Makes the decision, and returns it as Python's `Verdict`.
nb::object decided(Verdict verdict, Constraints of, const nb::handle& rule) {
    verdict.decide(of.excluded, std::move(of.multiplier));
    verdict.named.why = std::move(of.why);
    nb::object made = nb::inst_alloc(names->verdict_type);
    const Verdict& own = *new (nb::inst_ptr<Verdict>(made)) Verdict(std::move(verdict));
    nb::inst_mark_ready(made);
    if (own.policy->mode == Mode::kUser) {
        made.attr("_let_choose")(rule);
    }
    return made;
}

double seconds_now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

nb::object decide(Core& core, const nb::dict& bases, const nb::callable& make, const nb::handle& fleet, const nb::handle& breakers,
                  const nb::handle& given, const nb::callable& ask, double now_s, u64 seed) {
    static const nb::handle changes_name = PyUnicode_InternFromString("changes");
    const double began_s = seconds_now();
    const u64 changes = nb::cast<u64>(nb::getattr(fleet, changes_name)) + nb::cast<u64>(nb::getattr(breakers, changes_name));
    core.match_s = 0;
    const RequestSlots& slots = slots_of(given);
    const nb::object kind = nb::steal(PyTuple_Pack(5, slots.model.of(given).ptr(), slots.block_size.of(given).ptr(), slots.hash_scheme.of(given).ptr(),
                                                   slots.phase.of(given).ptr(), slots.endpoint.of(given).ptr()));
    nb::object kept = nb::borrow(PyDict_GetItem(bases.ptr(), kind.ptr()));
    if (!kept.is_valid() || !nb::inst_ptr<Basis>(kept)->holds(now_s, changes)) {
        kept = make(given, now_s);
        bases[kind] = kept;
    }
    Basis& basis = *nb::cast<Basis*>(kept);
    const std::shared_ptr<const Request> request = request_of(given);
    std::vector<std::int32_t> tiers;
    nb::object epochs = nb::none(), seqs = nb::none(), doubts = basis.undoubted;
    const bool is_asked = basis.policy->reads_overlap && !basis.standing->rows.empty();
    if (is_asked) {
        const double asked_s = seconds_now();
        const nb::tuple answer = nb::cast<nb::tuple>(ask(reusable_chain(given, *request), basis.ranks));
        core.match_s = seconds_now() - asked_s;
        tiers = tiers_of(answer[0], basis.standing->rows.size());
        epochs = answer[1];
        seqs = answer[2];
        doubts = answer[3];
        basis.begin(epochs);
    }
    basis.doubt(doubts);
    const bool is_open = basis.is_open && !is_constrained(given, *request, basis);
    Constraints constraints = is_open ? basis.constraints : constraints_of(basis.model_view, given, basis.rule);
    auto view = core.look(basis.standing, *basis.native_trusts, *basis.policy, *request, std::move(tiers), is_asked ? basis.epochs : nullptr, now_s);
    Named named{nb::borrow(given), basis.model_view, basis.trusts, {}, std::move(epochs), std::move(seqs)};
    nb::object made = decided(Verdict(std::move(view), basis.policy, request, seed, std::move(named)), std::move(constraints), basis.rule);
    core.choose_s = seconds_now() - began_s - core.match_s;
    return made;
}

// Decides again for the same request, by another policy.
nb::object decide_instead(Core& core, const Verdict& live, const nb::handle& rule) {
    const auto policy = nb::cast<std::shared_ptr<const Policy>>(rule[2]);
    const Named& named = live.named;
    const bool is_as_before = policy->mode != Mode::kNamed && PyTuple_GET_SIZE(names->request.preferred_taints.of(named.request).ptr()) == 0;
    Constraints constraints = is_as_before ? Constraints(named.why) : constraints_of(named.model_view, named.request, rule);
    return decided(Verdict(core.look_again(*live.view, *policy, *live.request), policy, live.request, live.seed, named), std::move(constraints), rule);
}

// Decides by a moment that a test made, in place of the core's state. `numbers`: the `RankNumbers` of its ranks.
nb::object decide_by(Core& core, const nb::object& moment, const nb::bytes& numbers, std::shared_ptr<const Standing> standing,
                     const nb::handle& rule, const nb::object& request, u64 seed) {
    auto view = std::make_shared<View>(std::move(standing), nb::cast<double>(moment.attr("now_s")), nb::cast<u64>(moment.attr("turn")));
    if (numbers.size() != view->ranks.size() * sizeof(RankNumbers)) {
        refuse("numbers", static_cast<i64>(numbers.size()), std::to_string(view->ranks.size() * sizeof(RankNumbers)) + " bytes");
    }
    std::memcpy(view->ranks.data(), numbers.data(), numbers.size());
    if (const auto bound = nb::cast<std::optional<RankKey>>(moment.attr("bound"))) {
        view->bound = Held(core.ranks, *bound);
    }
    const nb::object rates = moment.attr("rates");
    view->has_rates = !rates.is_none();
    view->output_tokens = view->has_rates ? nb::cast<double>(rates.attr("output_tokens")) : 0.0;
    view->is_learnt = view->has_rates && nb::cast<bool>(rates.attr("is_learnt"));
    view->spent = flags_of(moment.attr("newcomer"));
    view->epochs = std::make_shared<const std::vector<u64>>(nb::cast<std::vector<u64>>(moment.attr("epochs")));
    view->is_blank = nb::cast<bool>(moment.attr("is_blank"));
    Named named{request, moment, moment.attr("trust"), {}, moment.attr("epochs"), moment.attr("seqs")};
    const auto policy = nb::cast<std::shared_ptr<const Policy>>(rule[2]);
    return decided(Verdict(view, policy, request_of(request), seed, std::move(named)), constraints_of(moment, request, rule), rule);
}

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

}  // namespace

void bind_decisions(nb::module_& module, nb::class_<Core>& core) {
    bind_verdict(module);
    module.def("name_types",
               [](nb::object request, nb::object verdict, nb::object constraints, std::string estimated_scheme) {
                   names = new Names{std::move(request), std::move(verdict), std::move(constraints), std::move(estimated_scheme)};
               },
               "request"_a, "verdict"_a, "constraints"_a, "estimated_scheme"_a);
    nb::class_<Basis>(module, "Basis")
        .def(nb::init<nb::object, nb::tuple, u64, nb::object>(), "model_view"_a, "rule"_a, "changes"_a, "why"_a);
    core.def("decide", &decide, "bases"_a, "make"_a, "fleet"_a, "breakers"_a, "request"_a, "ask"_a, "now_s"_a, "seed"_a)
        .def("decide_instead", &decide_instead, "live"_a, "rule"_a)
        .def("decide_by", &decide_by, "moment"_a, "numbers"_a, "standing"_a, "rule"_a, "request"_a, "seed"_a);
}

}  // namespace kv
