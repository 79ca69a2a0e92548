"""What is counted of requests, decisions and workers: from 0, in the right place, and no longer than there is one."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from indexer.embedded import OverlapColumns
from kv_protocol.codec import pack_u64
from kv_protocol.decision import ADDENDS
from kv_protocol.fleet import WorkerLeft
from kv_protocol.fleet_gate import FleetGate
from kv_protocol.hashing import TEXT_SCHEME
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import FleetApplied, LedgerApplied, OutcomeName, WorkerHeard
from kv_protocol.ledger import Routed
from kv_runtime.telemetry import Projection
from router.decision.policies import MODES
from router.decision.policy import Policy
from router.decision.routing import Routing
from router.decision.verdict import Verdict
from router.feeds.feeds import RouterFeeds
from router.fleet.trust import PARITY_FIELDS, TRUST_STATES
from router.metrics import (
    FALLBACKS,
    OUTCOMES,
    PHASES,
    REASONS,
    REJECTIONS,
    SAMPLES_MAX,
    STAGES,
    RequestMetrics,
    rank_families,
    state_families,
)
from router.native import built
from router.prompt.chains import block_count
from router.queue.config import QueueSection
from router.queue.waiting import RequestQueue
from tests.unit.router.samples import MODEL, FakeIndex, answer, load, registered, route
from tests.unit.router.test_routing import Bench


@dataclass
class Counted:
    """A router's metrics, and what a scrape shows of them."""

    bench: Bench
    registry: CollectorRegistry
    metrics: RequestMetrics

    def __call__(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"kvrouter_{name}", labels)

    def series(self, name: str) -> dict[tuple[str, ...], float]:
        """Return all samples of a name by their label values."""
        families = self.registry.collect()
        samples = [sample for family in families for sample in family.samples if sample.name == f"kvrouter_{name}"]
        return {tuple(sample.labels.values()): sample.value for sample in samples}

    def leave(self, worker_id: str) -> None:
        left = WorkerLeft(worker_id=worker_id, instance=f"{worker_id}-1")
        self.bench.state.apply(FleetApplied(now_s=100.0, event=left))


def counted(*workers: Any, **bench: Any) -> Counted:
    made, registry = Bench(*workers, policy=Policy(), **bench), CollectorRegistry()
    Projection(registry, lambda: rank_families(made.routing))
    return Counted(made, registry, RequestMetrics(registry, made.routing))


def decided(counted: Counted, isl_tokens: int = 400, **changed: Any) -> Verdict:
    return counted.bench.routing.decide(route(isl_tokens, **changed))


def test_every_label_set_is_there_at_0_before_anything_was_counted() -> None:
    told = counted(registered(), registered("w1"))
    outcomes = [(MODEL, mode, outcome) for mode in MODES for outcome in OUTCOMES]
    assert dict.fromkeys(outcomes, 0).items() <= told.series("requests_total").items()
    for name, values in (
        ("rejected_total", REJECTIONS),
        ("fallback_total", FALLBACKS),
        ("retries_total", PHASES),
        ("decision_duration_seconds_count", STAGES),
        ("time_to_first_token_seconds_count", MODES),
        ("cost_term_seconds_count", ADDENDS),
        ("predicted_cached_tokens_total", ("w0", "w1")),
        ("worker_time_to_first_token_seconds_count", ("w0", "w1")),
        ("model_time_to_first_token_seconds_count", (MODEL, "unknown")),
    ):
        assert told.series(name) == {(value,): 0 for value in values}, name
    assert told.series("decisions_total") == {(mode, reason): 0 for mode in MODES for reason in REASONS}
    assert told.series("worker_failures_total") == {(worker, phase): 0 for worker in ("w0", "w1") for phase in PHASES}


def test_a_request_counts_once_by_its_model_mode_and_outcome() -> None:
    told = counted()
    told.metrics.inflight += 1
    told.metrics.inflight += 1
    assert told("inflight_requests") == 2
    told.metrics.end(MODEL, "kv", "ok", 0.3)
    assert told("inflight_requests") == 1
    assert told("requests_total", model=MODEL, mode="kv", outcome="ok") == 1
    assert sum(told.series("requests_total").values()) == 1
    assert told("request_duration_seconds_bucket", mode="kv", le="0.25") == 0
    assert told("request_duration_seconds_bucket", mode="kv", le="0.6") == 1


def test_the_duration_of_a_decision_counts_once_it_is_carried_out() -> None:
    told = counted(registered())
    verdict = decided(told)
    assert told("decision_duration_seconds_count", stage="total") == 0
    told.bench.routing.take(verdict)
    assert [told("decision_duration_seconds_count", stage=each) for each in ("match", "choose", "total")] == [1, 1, 1]
    assert told("decision_duration_seconds_sum", stage="total")


@pytest.mark.parametrize("model", ["", "x" * 1000, "of a worker that left"])
def test_an_unserved_model_is_unknown_whatever_clients_call_it(model: str) -> None:
    told = counted()
    told.metrics.inflight += 1
    told.metrics.end(model, "kv", "refused", 0.0)
    assert told("requests_total", model="unknown", mode="kv", outcome="refused") == 1
    assert {at[0] for at in told.series("requests_total")} == {MODEL, "unknown"}


def test_what_was_counted_of_a_model_goes_with_its_last_worker() -> None:
    told = counted(registered(served_names=("a",)), registered("w1", served_names=("b",)))
    told.metrics.end("a", "kv", "ok", 0.0)
    told.metrics.end("b", "kv", "ok", 0.0)
    told.leave("w0")
    assert {at[0] for at in told.series("requests_total")} == {"b", "unknown"}
    assert told("requests_total", model="b", mode="kv", outcome="ok") == 1


def test_a_first_token_counts_for_its_mode_its_model_and_its_worker() -> None:
    told = counted(registered(), registered("w1"))
    told.metrics.first_token("kv", MODEL, "w1", 0.3)
    for labels in ({"mode": "kv"}, {"model": MODEL}, {"worker": "w1"}):
        (name,) = labels
        family = "time_to_first_token_seconds" if name == "mode" else f"{name}_time_to_first_token_seconds"
        assert told(f"{family}_bucket", **labels, le="0.25") == 0, name
        assert told(f"{family}_bucket", **labels, le="0.6") == 1, name
        assert sum(told.series(f"{family}_count").values()) == 1, name


def test_first_tokens_of_what_left_make_no_series() -> None:
    told = counted(registered(served_names=("a",)), registered("w1", served_names=("b",)))
    told.metrics.first_token("kv", "a", "w0", 0.3)
    told.leave("w0")
    for number in range(100):
        told.metrics.first_token("kv", f"a name {number}", f"w{number + 2}", 0.3)
    assert told.series("model_time_to_first_token_seconds_count") == {("b",): 0, ("unknown",): 100}
    assert told.series("worker_time_to_first_token_seconds_count") == {("w1",): 0}


async def test_of_an_answer_only_what_it_says_is_observed() -> None:
    told = counted(registered())
    for isl_tokens, stated in ((100, built.Answer(21, decode_s=0.4)), (50, built.Answer(None, None, 60))):
        lease = told.bench.take(route(isl_tokens))
        await told.bench.clock.advance(1.0)
        lease.end("ok", stated, False, told.metrics)
    lease = told.bench.take(route(hash_scheme=TEXT_SCHEME))
    lease.end("ok", built.Answer(None, None, 7), False, told.metrics)
    assert (told("input_tokens_count"), told("input_tokens_sum")) == (3, 157)
    assert (told("output_tokens_count"), told("output_tokens_sum")) == (1, 21)
    assert told("inter_token_latency_seconds_count", mode="kv") == 1
    assert told("inter_token_latency_seconds_sum", mode="kv") == pytest.approx(0.02)


@pytest.mark.parametrize("outcome", ["refused", "failed", "cancelled"])
def test_only_what_the_client_has_is_an_answer(outcome: OutcomeName) -> None:
    told = counted(registered())
    told.bench.take(route(100)).end(outcome, built.Answer(20), True, told.metrics)
    told.bench.take(route(100)).end("ok", built.Answer(20))  # of a prefill worker
    assert (told("input_tokens_count"), told("output_tokens_count")) == (0, 0)


def settled(told: Counted, worker_id: str, cached_tokens: int, **changed: Any) -> None:
    """Let a worker answer that reused so many tokens of a prompt."""
    lease = told.bench.take(route(400, pinned_worker=worker_id, **changed))
    lease.end("ok", built.Answer(None, cached_tokens), True, told.metrics)


def test_the_newest_traced_request_of_a_bucket_is_its_exemplar() -> None:
    told = counted()
    for trace_id, duration_s, ttft_s in (("a", 0.3, None), ("b", 0.5, 0.05), ("c", 900.0, None)):
        told.metrics.traced("kv", trace_id, "", duration_s, ttft_s)
    samples = [each for family in told.registry.collect() for each in family.samples if each.exemplar]
    found = {(each.name, each.labels["le"], each.exemplar.labels["trace_id"]) for each in samples if each.exemplar}
    durations, ttfts = (f"kvrouter_{name}_seconds_bucket" for name in ("request_duration", "time_to_first_token"))
    assert found == {(durations, "0.6", "b"), (durations, "+Inf", "c"), (ttfts, "0.1", "b")}


def test_what_was_predicted_and_what_was_reused_stand_beside_their_worker() -> None:
    told = counted(registered(), registered("w1"), registered("d", role="decode"), holds=4)
    for worker, cached_tokens in (("w0", 32), ("w0", 64), ("w1", 80)):
        settled(told, worker, cached_tokens)
    settled(told, "d", 9, phase="decode")
    assert told.series("predicted_cached_tokens_total") == {("w0",): 128, ("w1",): 64, ("d",): 0}
    assert told.series("actual_cached_tokens_total") == {("w0",): 96, ("w1",): 80, ("d",): 0}
    below, exact, above = (
        [told("prediction_error_tokens_bucket", worker=worker, le=le) for worker in ("w0", "w1")]
        for le in ("-1.0", "0.0", "32.0")
    )
    assert (below, exact, above) == ([0, 1], [1, 1], [2, 1])


def test_what_was_counted_of_a_worker_goes_with_it_and_one_that_left_is_not_counted() -> None:
    told = counted(registered(), registered("w1"))
    settled(told, "w0", 480)
    late = told.bench.take(route(400, pinned_worker="w0"))
    told.leave("w0")
    late.end("ok", built.Answer(None, 1), True, told.metrics)
    told.metrics.worker_failed("w0", "body")
    assert told.series("actual_cached_tokens_total") == {("w1",): 0}
    told.metrics.worker_failed("unknown", "body")
    assert set(told.series("worker_failures_total")) == {("w1", phase) for phase in PHASES}


def test_workers_that_come_and_go_leave_nothing_behind_without_a_scrape() -> None:
    told = counted(registered("keeps"))
    for number in range(20):
        worker_id = f"w{number}"
        told.bench.state.apply(FleetApplied(now_s=100.0, event=registered(worker_id)))
        told.bench.state.apply(WorkerHeard(now_s=100.0, worker_id=worker_id, instance=f"{worker_id}-1"))
        settled(told, worker_id, 1)
        told.leave(worker_id)
    assert len(told.metrics.workers) == 2, "the worker that stays, and the last one that left"


def test_models_that_come_and_go_leave_nothing_behind_without_a_scrape() -> None:
    told = counted(registered("keeps"))
    for number in range(20):
        name = f"adapter-{number}"
        told.bench.state.apply(FleetApplied(now_s=100.0, event=registered("w0", loras=(name,))))
        told.metrics.end(name, "kv", "ok", 1.0)
        told.leave("w0")
    told.metrics.end("nonsense", "kv", "refused", 1.0)
    assert set(told.metrics.models) == {MODEL, "adapter-19", "unknown"}, "one that left stays until another comes"


def test_a_decision_counts_by_policy_and_reason_with_its_margin_and_regret() -> None:
    told = counted(registered(), registered("w1"), holds=3)
    verdict = decided(told)
    told.bench.routing.take(verdict)
    assert told("decisions_total", policy="kv", reason=verdict.reason) == 1
    assert told("decision_margin_seconds_count") == 1
    assert verdict.margin is not None
    assert told("decision_margin_seconds_sum") == pytest.approx(verdict.margin / 1e3)
    assert (told("regret_blocks_count"), told("regret_blocks_sum")) == (1, 0)


def test_the_winners_cost_is_told_by_term() -> None:
    told = counted(registered(), registered("w1"), holds=3)
    verdict = decided(told, 400)
    told.bench.routing.take(verdict)
    terms = verdict.decision().chosen.terms
    expected = {(term,): pytest.approx(getattr(terms, f"{term}_ms") / 1e3) for term in ADDENDS}
    assert told.series("cost_term_seconds_sum") == expected
    assert set(told.series("cost_term_seconds_count").values()) == {1}


def test_costs_of_more_decisions_than_are_kept_are_a_sample() -> None:
    told = counted(registered(), registered("w1"))
    for number in range(SAMPLES_MAX + 10):
        told.bench.take(route(400, decision_id=f"d{number}"))
    assert told("cost_term_seconds_count", term="prefill") == SAMPLES_MAX
    assert told("decision_margin_seconds_count") == SAMPLES_MAX + 10


class Uneven(FakeIndex):
    """w0 holds three blocks more than w1."""

    def columns(self, blocks: bytes, ranks: tuple[WorkerRank, ...]) -> OverlapColumns:
        held = {"w0": min(20, block_count(blocks)), "w1": 17}
        return answer([((held[each.worker_id],) * 4, 1, 1, "") for each in ranks])


def uneven(seed: int = 1, **changed: Any) -> Counted:
    bench, registry = Bench(registered(), registered("w1")), CollectorRegistry()
    policy = Policy(**changed)
    bench.routing = Routing(bench.state, Uneven(0), bench.clock, policy, seed=seed, lease_s=8.0, decisions_max=100)
    return Counted(bench, registry, RequestMetrics(registry, bench.routing))


def test_overlap_that_load_outweighed_is_told_by_the_term_it_was_given_up_for() -> None:
    told = uneven()
    promised = Routed(lease_id="l", worker_id="w0", dp_rank=0, blocks=b"", uncached_tokens=4000)
    told.bench.state.apply(LedgerApplied(now_s=100.0, event=promised))
    verdict = decided(told)
    assert (verdict.winner.worker_id, verdict.regret_blocks) == ("w1", 3)
    told.bench.routing.take(verdict)
    every = {(term,): 0 for term in ADDENDS}
    assert told.series("regret_term_blocks_total") == every | {("wait",): 3, ("not_cost",): 0}


def test_overlap_that_no_cost_outweighed_was_not_given_up_for_cost() -> None:
    told = uneven()
    verdict = decided(told, pinned_worker="w1")
    told.bench.routing.take(verdict)
    assert verdict.regret_blocks == 0, "there was no other candidate"
    drawn = (uneven(seed, temperature=9.0) for seed in range(100))
    told = next(each for each in drawn if each.bench.take(route(400)).verdict.regret_blocks)
    assert told("regret_term_blocks_total", term="not_cost") == 3


def test_a_decision_without_events_of_the_winner_is_approximate() -> None:
    told = counted(registered(template_digest="another"))
    told.bench.routing.take(decided(told))
    assert told("fallback_total", reason="approximate") == 1
    told.metrics.count("fallback", "not_encoded")
    assert told("fallback_total", reason="not_encoded") == 1


def test_the_policy_and_the_fitness_of_every_rank_are_shown() -> None:
    told = counted(registered(dp_ranks=(0, 1)), registered("w1"))
    assert told.series("policy_info") == {("kv",): 1}
    assert told.series("rank_fit") == {("w0", "0"): 1, ("w0", "1"): 1, ("w1", "0"): 1}
    assert told("breaker_state", worker="w1", dp_rank="0", state="closed") == 1
    assert told("breaker_state", worker="w1", dp_rank="0", state="open") == 0


def test_every_rank_has_1_for_its_present_trust_and_0_for_the_others() -> None:
    told = counted(registered(dp_ranks=(0, 1)), registered("w1", canary=1), stale="behind")
    present = {("w0", "0"): "DEGRADED", ("w0", "1"): "DEGRADED", ("w1", "0"): "FALLBACK"}
    expected = {(*rank, state): state == trust for rank, trust in present.items() for state in TRUST_STATES}
    assert told.series("rank_trust") == expected


def test_every_worker_has_every_parity_field_and_0_for_those_that_differ() -> None:
    told = counted(registered(), registered("w1", block_size=32, template_digest="x"))
    differs = {("w1", "block_size"), ("w1", "template_digest")}
    expected = {at: at not in differs for at in product(("w0", "w1"), PARITY_FIELDS)}
    assert told.series("worker_parity") == expected


def test_what_was_routed_is_counted_and_what_of_it_went() -> None:
    told = counted(registered(total_kv_blocks=2))
    state = told.bench.state
    routed = Routed(lease_id="l", worker_id="w0", dp_rank=0, blocks=pack_u64([1, 2, 3]), uncached_tokens=1)
    state.apply(LedgerApplied(now_s=100.0, event=routed))
    assert told("approximate_blocks", worker="w0", dp_rank="0") == 2
    assert told("approximate_forgotten_blocks_total", cause="evicted") == 1
    state.tick(220.0)
    assert told.series("approximate_blocks") == {}
    assert told("approximate_forgotten_blocks_total", cause="expired") == 2
    state.apply(LedgerApplied(now_s=220.0, event=routed))
    state.apply(FleetApplied(now_s=220.0, event=registered(instance="w0-2")))
    assert told("approximate_forgotten_blocks_total", cause="left") == 2


def test_the_ledgers_difference_is_of_ranks_that_report() -> None:
    told = counted(registered(), registered("w1"))
    feeds = RouterFeeds(told.bench.routing, cast("Any", None), FleetGate())
    Projection(told.registry, lambda: state_families(told.bench.state, feeds, RequestQueue(QueueSection())))
    told.bench.state.apply(load(WorkerRank("w0", 0), 2, 1, 9, 100.0))
    assert told.series("ledger_difference_requests") == {("w0", "0"): 3}
    assert told("ledger_reported_running", worker="w0", dp_rank="0") == 2
    assert (told("queued_requests"), told("queued_tokens")) == (0, 0)


@pytest.mark.parametrize(
    ("encoded", "families"),
    [
        pytest.param(generate_latest, text_string_to_metric_families, id="text"),
        pytest.param(openmetrics.generate_latest, openmetrics_families, id="OpenMetrics"),
    ],
)
def test_a_served_name_with_any_characters_is_read_as_it_is(
    encoded: Callable[[CollectorRegistry], bytes], families: Callable[[str], Iterable[Metric]]
) -> None:
    name = 'm"\\\n{a="b"} 1\r,é\t# EOF'
    told = counted(registered(served_names=(name,)))
    told.metrics.end(name, "kv", "ok", 0.3)
    lines = encoded(told.registry).decode().split("\n")
    page = "\n".join([*(line for line in lines if "kvrouter_requests" in line), "# EOF", ""])
    samples = [each for family in families(page) for each in family.samples]
    counts = [each.value for each in samples if each.name == "kvrouter_requests_total" and each.labels["model"] == name]
    assert sum(counts) == 1
    assert len(counts) == len(MODES) * len(OUTCOMES)
