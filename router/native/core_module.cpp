// Binds the fold of router/decision/state.py to Python. All calls keep the GIL.
#include <nanobind/stl/map.h>

#include "attribution.hpp"
#include "bindings.hpp"
#include "request_sums.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace kv {

namespace {

using LoadTuple = std::tuple<i64, i64, i64, i64, i64, i64, i64>;

// Returns each rank in the map with what `figure` returns for its row.
template <typename Map, typename Figure>
auto of_ranks(const Map& map, Figure figure) {
    std::vector<std::pair<RankKey, decltype(figure(kNoRow))>> made;
    for (const u32 row : map.rows()) {
        made.emplace_back(map.key(row), figure(row));
    }
    return made;
}

std::vector<std::tuple<std::string, bool, RankKey>> events_of(const Core& core, double now_s) {
    std::vector<std::tuple<std::string, bool, RankKey>> made;
    for (const Ledger::Event& event : core.ledger.tick(now_s)) {
        made.emplace_back(event.lease_id, event.is_by_engine, core.ranks.key(event.row));
    }
    return made;
}

// Active requests, blocks, queued tokens, foreign requests, and the engine's newest report: running, waiting, used blocks.
LoadTuple load_tuple(const Core& core, u32 row) {
    const RankLoad& load = core.ledger.loads()[row];
    const Reported& reported = load.reported;
    return {load.requests, core.ledger.blocks(row), load.queued_tokens, reported.foreign, reported.newest[0], reported.newest[1],
            reported.newest[2]};
}

void bind_core_queries(nb::class_<Core>& of) {
    of.def("load_of",
           [](const Core& core, const RankKey& rank) {
               const u32 row = core.ranks.find(rank);
               return core.ledger.loads().find(row) == nullptr ? std::nullopt : std::optional<LoadTuple>(load_tuple(core, row));
           },
           "rank"_a)
        .def("loads",
             [](const Core& core) {
                 return of_ranks(core.ledger.loads(), [&core](u32 row) { return load_tuple(core, row); });
             })
        .def("queued_tokens",
             [](Core& core, const Standing& standing) {
                 std::vector<RankNumbers> ranks(standing.rows.size());
                 core.ledger.read_load(standing.rows, ranks);
                 std::vector<i64> queued;
                 for (const RankNumbers& rank : ranks) {
                     queued.push_back(rank.queued);
                 }
                 return queued;
             },
             "standing"_a)
        .def("differences",
             [](const Core& core) {
                 std::vector<std::pair<RankKey, i64>> made;
                 for (const u32 row : core.ledger.loads().rows()) {
                     const RankLoad& load = core.ledger.loads()[row];
                     if (load.reported.reported_at_s.has_value()) {
                         const i64 running = load.reported.newest[0] + load.reported.newest[1];
                         made.emplace_back(core.ranks.key(row), running - load.requests);
                     }
                 }
                 return made;
             })
        .def_prop_ro("open_leases", [](const Core& core) { return core.ledger.open_leases(); })
        .def_prop_ro("expired_total", [](const Core& core) { return core.ledger.expired_total; })
        .def_prop_ro("corrected_total", [](const Core& core) { return core.ledger.corrected_total; })
        .def_prop_ro("is_ledger_empty", [](const Core& core) { return core.ledger.is_empty(); })
        .def_prop_ro("rank_count", [](const Core& core) { return core.ranks.size(); })
        .def("routed_blocks",
             [](const Core& core) {
                 const auto& trees = core.approximate.trees();
                 return of_ranks(trees, [&trees](u32 row) { return trees[row]->block_count(); });
             })
        .def("routed_totals",
             [](const Core& core) {
                 const Approximate& of_core = core.approximate;
                 return std::make_tuple(of_core.expired_blocks, of_core.evicted_blocks, of_core.left_blocks);
             })
        .def("rate_factors",
             [](const Core& core) {
                 return of_ranks(core.rates.ranks(), [&core](u32 row) {
                     const Rates::Rank& rank = core.rates.ranks()[row];
                     return std::make_tuple(rank.model->prefill.shared * rank.prefill, rank.model->decode.shared * rank.decode, rank.prefills,
                                            rank.decodes);
                 });
             })
        .def("learnt", [](const Core& core) { return core.rates.learnt(); })
        .def("prefill_factors",
             [](Core& core, const Verdict& verdict) {
                 core.check(*verdict.view);
                 std::vector<RankNumbers> ranks(verdict.view->ranks.size());
                 core.rates.read(verdict.request->model, verdict.view->standing->rows, verdict.view->now_s, ranks);
                 std::vector<double> factors;
                 for (const RankNumbers& rank : ranks) {
                     factors.push_back(rank.prefill);
                 }
                 return factors;
             },
             "verdict"_a)
        .def_prop_ro("rates_refused_total", [](const Core& core) { return core.rates.refused_total; })
        .def("expected_s",
             [](const Core& core, const Verdict& verdict, std::size_t place) {
                 if (place >= verdict.view->ranks.size()) {
                     refuse("place", static_cast<i64>(place), "one of the view's ranks");
                 }
                 return core.expected_s(verdict, place);
             },
             "verdict"_a, "place"_a);
}

void bind_core_sums(nb::class_<Core>& of) {
    of.def_rw("attribution", &Core::attribution, nb::arg().none())
        .def("decided",
             [](const Core& core) {
                 const DecisionSums& sums = core.decided;
                 const std::vector<std::pair<std::pair<std::string, std::string>, u64>> decisions(sums.decisions.begin(), sums.decisions.end());
                 return std::make_tuple(decisions, sums.regret_blocks, sums.margin_s, sums.predicted_blocks,
                                        sums.approximate);
             })
        .def("stages",
             [](const Core& core) {
                 const StageSums& sums = core.stages;
                 return std::make_tuple(sums.match, sums.choose, sums.total);
             })
        .def("offered",
             [](const Core& core, i64 first) {
                 std::vector<std::tuple<Group, i64, i64, i64, std::vector<std::pair<double, i64>>>> made;
                 for (const auto& [group, sums] : core.offered.since(first)) {
                     std::vector<std::pair<double, i64>> times;
                     for (const auto& [step, count] : sums.steps) {
                         times.emplace_back(OfferedLoads::work_s(step), count);
                     }
                     made.emplace_back(group, sums.requests, sums.uncached_tokens, sums.context_tokens, std::move(times));
                 }
                 return made;
             },
             "first"_a)
        .def_ro("attempts_total", &Core::attempts_total)
        .def("attempts",
             [](const Core& core) {
                 return of_ranks(core.attempts, [&core](u32 row) { return core.attempts[row]; });
             })
        .def("ends", [](const Core& core) { return std::vector<std::pair<u64, double>>(core.ends.begin(), core.ends.end()); });
}

// Folds in an event of `kv_protocol.ledger`, from the replica `origin`; empty: from this router.
void follow(Core& core, const nb::handle& event, double now_s, const std::string& origin) {
    const std::string_view kind = Py_TYPE(event.ptr())->tp_name;
    const auto text = [&event](const char* name) { return nb::cast<std::string>(event.attr(name)); };
    const auto number = [&event](const char* name) { return nb::cast<i64>(event.attr(name)); };
    const auto rank = [&text, &number] { return RankKey{text("worker_id"), number("dp_rank")}; };
    if (kind == "FirstToken") {
        core.first_token(text("lease_id"), now_s);
    } else if (kind == "Renewed") {
        core.renewed(text("lease_id"), now_s);
    } else if (kind == "Finished" || kind == "Cancelled") {
        core.end(text("lease_id"), now_s);
    } else if (kind == "Expired") {
        core.expired(text("lease_id"), text("cause") == "engine", now_s);
    } else if (kind == "Routed") {
        const std::string lease_id = text("lease_id"), session_id = text("session_id");
        Promise promise{lease_id, kNoRow, Chain(nb::cast<nb::bytes>(event.attr("blocks"))), number("uncached_tokens"),
                        number("extra_blocks"), nb::cast<u64>(event.attr("epoch")), session_id};
        core.promised(rank(), std::move(promise), now_s, origin);
    } else if (kind == "Unreported") {
        core.unreported(rank());
    }
}

// Folds in the fields of a `kv_protocol.journal.OutcomeKnown`.
void ended(Core& core, double now_s, const std::string& decision_id, const std::string& outcome, std::optional<i64> cached_tokens,
           Seconds ttft_s, Seconds /*duration_s*/, std::optional<i64> output_tokens, Seconds itl_s, bool /*came_whole*/) {
    core.ended(decision_id, {now_s, outcome == "ok", ttft_s, itl_s, output_tokens.value_or(0), cached_tokens});
}

void bind_core_events(nb::class_<Core>& of) {
    of.def("take", [](Core& core, const Verdict& verdict) { core.take(verdict); }, "verdict"_a)
        .def("learn",
             [](Core& core, const Verdict& verdict, double now_s, Seconds ttft_s, Seconds itl_s, i64 output_tokens) {
                 core.learn(verdict, {now_s, true, ttft_s, itl_s, output_tokens, std::nullopt});
             },
             "verdict"_a, "now_s"_a, "ttft_s"_a.none(), "itl_s"_a.none(), "output_tokens"_a)
        .def("turned", &Core::turned, "model"_a)
        .def("follow", &follow, "event"_a, "now_s"_a, "origin"_a)
        .def("ended", &ended, nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none(),
             nb::arg().none(), nb::arg())
        .def("reported", &Core::reported, "rank"_a, "running"_a, "waiting"_a, "used_blocks"_a, "now_s"_a)
        .def("registered", &Core::registered, "worker_id"_a, "group"_a, "block_size"_a, "total_blocks"_a)
        .def("joined", &Core::joined, "worker_id"_a, "dp_ranks"_a, "model"_a, "total_blocks"_a, "now_s"_a)
        .def("left", &Core::left, "worker_id"_a)
        .def("forget", &Core::forget, "worker_id"_a, "now_s"_a)
        .def("let_go", &Core::let_go, "now_s"_a)
        .def("tick", &events_of, "now_s"_a)
        .def("restore_learnt",
             [](Core& core, const std::string& model, double prefill, double decode, double output_tokens, i64 answers) {
                 core.rates.restore_learnt(model, prefill, decode, output_tokens, answers);
             },
             "model"_a, "prefill"_a, "decode"_a, "output_tokens"_a, "answers"_a)
        .def("checkpoint", [](Core& core) { return core.checkpoint(); }, nb::keep_alive<0, 1>())
        .def("restore",
             [](Core& core, const std::string& table, nb::list rows) { core.restore(table, std::move(rows)); }, "table"_a, "rows"_a)
        .def_prop_ro("tables", [](Core& core) { return core.table_names(); });
}

auto tuple_of(Sums sums) {
    return std::apply([](const auto&... each) { return std::make_tuple(each...); }, sums.fields());
}

void bind_sums(nb::module_& module) {
    nb::class_<Histogram>(module, "Histogram")
        .def(nb::init<std::vector<double>>(), nb::arg())
        .def("observe", &Histogram::add, nb::arg())
        .def_ro("bounds", &Histogram::bounds)
        .def_ro("counts", &Histogram::counts)
        .def_ro("total", &Histogram::total);
    nb::class_<RequestSums::OfMode>(module, "ModeSums")
        .def_ro("duration", &RequestSums::OfMode::duration)
        .def_ro("ttft", &RequestSums::OfMode::ttft)
        .def_ro("itl", &RequestSums::OfMode::itl);
    nb::class_<RequestSums::OfModel>(module, "ModelSums")
        .def_ro("requests", &RequestSums::OfModel::requests)
        .def_ro("ttft", &RequestSums::OfModel::ttft);
    nb::class_<RequestSums::OfWorker>(module, "WorkerSums")
        .def_ro("predicted_tokens", &RequestSums::OfWorker::predicted_tokens)
        .def_ro("actual_tokens", &RequestSums::OfWorker::actual_tokens)
        .def_ro("error_tokens", &RequestSums::OfWorker::error_tokens)
        .def_ro("ttft", &RequestSums::OfWorker::ttft)
        .def_ro("failures", &RequestSums::OfWorker::failures);
    nb::class_<RequestSums>(module, "RequestSums")  // rows are returned as copies: the original may be dropped
        .def(nb::init<nb::object, const std::vector<std::string>&>(), "fleet"_a, "modes"_a)
        .def("end", &RequestSums::end, nb::arg(), nb::arg(), nb::arg(), nb::arg())
        .def("queue_waited", [](RequestSums& sums, double seconds) { sums.queue_wait.add(seconds); }, nb::arg())
        .def("first_token", &RequestSums::first_token, nb::arg(), nb::arg(), nb::arg(), nb::arg())
        .def("worker_failed", &RequestSums::worker_failed, nb::arg(), nb::arg())
        .def("follow", &RequestSums::follow)
        .def_rw("inflight", &RequestSums::inflight)
        .def_prop_ro("modes", [](const RequestSums& sums) { return sums.modes; })
        .def_prop_ro("models", [](const RequestSums& sums) { return sums.models; })
        .def_prop_ro("workers", [](const RequestSums& sums) { return sums.workers; })
        .def_ro("input_tokens", &RequestSums::input_tokens)
        .def_ro("output_tokens", &RequestSums::output_tokens)
        .def_ro("queue_wait", &RequestSums::queue_wait);
}

void bind_attribution(nb::module_& module) {
    nb::class_<Placement>(module, "Placement")
        .def_ro("isl_tokens", &Placement::isl_tokens)
        .def_ro("block_size", &Placement::block_size)
        .def_ro("predicted_tokens", &Placement::predicted_tokens);
    nb::class_<Attribution>(module, "Attribution")
        .def(nb::init<std::size_t, std::size_t, std::size_t>(), "rows_max"_a, "family_blocks"_a, "pending_max"_a)
        .def("decided", &Attribution::decided, "verdict"_a)
        .def("ended", &Attribution::ended, "decision_id"_a, "is_ok"_a, "cached_tokens"_a.none())
        .def("forget", &Attribution::forget, "decision_id"_a)
        .def("charge", &Attribution::charge, "placement"_a, "blocks"_a)
        .def("total", [](const Attribution& of) { return tuple_of(of.total); })
        .def("top",
             [](const Attribution& of, std::size_t dimension) {
                 const TopRows& top = of.of_names.at(dimension);
                 std::vector<std::tuple<std::string, i64, decltype(tuple_of({}))>> rows;
                 for (const auto& [name, row] : top.rows) {
                     rows.emplace_back(name, row.missed, tuple_of(row.sums));
                 }
                 return std::make_tuple(rows, tuple_of(top.other), top.absent_max(of.rows_max));
             },
             "dimension"_a)
        .def("not_counted", [](const Attribution& of) {
            return std::make_tuple(of.not_answered, of.unseen, of.dropped, of.pending.size());
        });
}

}  // namespace

void bind_core(nb::module_& module) {
    bind_attribution(module);
    bind_sums(module);
    module.attr("FIRST_S") = kFirstS;
    module.attr("PREFILL_TOKEN_S") = kPrefillTokenS;
    module.attr("PREFILL_PAIR_S") = kPrefillPairS;
    module.attr("STEP_S") = kStepS;
    module.attr("STEP_SEQUENCE_S") = kStepSequenceS;
    module.attr("STEP_KV_TOKEN_S") = kStepKvTokenS;
    module.attr("SLOT_S") = OfferedLoads::kSlotS;
    module.attr("OUTPUT_TOKENS") = kOutputTokens;
    nb::class_<Checkpoint>(module, "Checkpoint")
        .def("next", [](Checkpoint& checkpoint) {
            const auto part = checkpoint.next();
            return part.has_value() ? std::optional(std::make_pair(part->first, bytes_of(part->second))) : std::nullopt;
        });
    nb::class_<Core> core(module, "Core");
    core.def(nb::init<double, double, u64, double, u64>(), "lease_s"_a, "ttl_s"_a, "blocks_max"_a, "idle_s"_a, "sessions_max"_a)
        .def("standing",
             [](Core& self, const std::vector<RankKey>& ranks, std::vector<i64> capacity) {
                 if (capacity.size() != ranks.size()) {
                     refuse("capacity", static_cast<i64>(capacity.size()), "as many as ranks");
                 }
                 return self.standing(ranks, std::move(capacity));
             },
             "ranks"_a, "capacity"_a);
    bind_core_events(core);
    bind_core_sums(core);
    bind_core_queries(core);
    bind_decisions(module, core);
    bind_leases(module);
}

}  // namespace kv
