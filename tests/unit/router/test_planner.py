"""What an autoscaler is told: the load that was offered, what a worker can do, and the fewest workers that keep up."""

import heapq
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dashboards.command import rules
from kv_protocol.fleet import WorkerDraining
from kv_protocol.journal import FleetApplied, LedgerApplied, OutcomeKnown
from kv_protocol.ledger import Routed
from router.decision.policy import Policy
from router.decision.routing import Routing
from router.decision.state import RouterState
from router.native import built
from router.planner.plan import (
    SLOT_S,
    UTILISATION_MAX,
    Group,
    GroupPlan,
    Objectives,
    OfferedLoad,
    Rates,
    ServiceTimes,
    Size,
    begun_and_served_within,
    mean_s,
    offered,
    poisson_at_most,
)
from router.planner.service import Planner, PlannerSection, answered_tokens
from tests.unit.router.samples import MODEL, chain, joined, registered, route
from tests.unit.router.test_routing import Bench

OBJECTIVES = Objectives(ttft_s=1.0, itl_s=0.02, kept_ratio=0.95)
LEARNT = Rates(prefill_factor=1.0, decode_factor=1.0, output_tokens=200.0)
AGGREGATED, PREFILL, DECODE = (Group(MODEL, role) for role in ("aggregated", "prefill", "decode"))


def load(requests_per_s: float, work_s: float = 0.05, *, uncached: int = 2000, context: float = 2000.0) -> OfferedLoad:
    """Return the load of equal requests, over 100 s."""
    count = round(100 * requests_per_s)
    return OfferedLoad(100.0, count, count * uncached, context, ((work_s, count),))


def planned(requests_per_s: float = 40.0, group: Group = AGGREGATED, **changed: Any) -> GroupPlan:
    fields: dict[str, Any] = {
        "size": Size(workers=3),
        "load": load(requests_per_s),
        "rates": LEARNT,
        "objectives": OBJECTIVES,
    }
    return GroupPlan(group, **fields | changed)


# ------------------------------------------------------------------------------------------------- formulas


@pytest.mark.parametrize(("mean", "most", "share"), [(2.0, 2, 0.676676), (0.0, 0, 1.0), (5.0, -1, 0.0), (9e9, 5, 0.0)])
def test_the_share_of_small_batches_is_poissons(mean: float, most: int, share: float) -> None:
    assert poisson_at_most(mean, most) == pytest.approx(share, abs=1e-6)


def simulated_share(times: ServiceTimes, servers: int, rate_per_s: float, within_s: float, seed: int) -> float:
    """Return the share of 40,000 simulated requests that are served in time."""
    draw, now_s, in_time = random.Random(seed), 0.0, 0
    free_at = [0.0] * servers
    seconds, weights = zip(*times, strict=True)
    for service_s in draw.choices(seconds, weights, k=40_000):
        now_s += draw.expovariate(rate_per_s)
        ends_s = max(now_s, heapq.heappop(free_at)) + service_s
        heapq.heappush(free_at, ends_s)
        in_time += ends_s - now_s <= within_s
    return in_time / 40_000


@pytest.mark.parametrize("servers", [1, 4, 12])
@pytest.mark.parametrize("utilisation", [0.5, 0.8, 0.9])
@pytest.mark.parametrize("times", [((0.1, 1),), ((0.02, 9), (0.5, 1))], ids=["equal", "mixed"])
def test_the_predicted_share_is_near_that_of_a_simulated_line(
    servers: int, utilisation: float, times: ServiceTimes
) -> None:
    rate_per_s = utilisation * servers / mean_s(times)
    seen = simulated_share(times, servers, rate_per_s, 0.6, seed=7)
    assert begun_and_served_within(times, servers, rate_per_s, 0.6) == pytest.approx(seen, abs=0.06), "seed 7"


# ------------------------------------------------------------------------------------------------- the plan


def test_what_was_never_measured_is_named_and_nothing_is_advised() -> None:
    found = planned(rates=Rates())
    assert found.unknown == ("prefill_factor", "decode_factor", "output_tokens")
    assert (found.advised_workers, found.reason) == (None, "unknown")
    assert found.worker_capacity == (None, None, None)
    assert [each[1:] for each in found.predicted] == [(None, None, None)] * 3


@pytest.mark.parametrize(("group", "unknown"), [(PREFILL, ("decode_factor",)), (DECODE, ("prefill_factor",))])
def test_what_a_role_does_not_do_need_not_be_known(group: Group, unknown: tuple[str, ...]) -> None:
    uncached = 2000 if group is PREFILL else 0
    rates = LEARNT._replace(**dict.fromkeys(unknown))
    found = planned(group=group, rates=rates, load=load(40.0, 0.05 if uncached else 0.0, uncached=uncached))
    assert found.unknown == ()
    assert found.advised_workers is not None


def test_an_idle_group_keeps_one_worker() -> None:
    found = planned(load=OfferedLoad(60.0), rates=Rates())
    assert (found.advised_workers, found.reason) == (1, "idle")


def test_a_worker_can_compute_what_its_factor_says() -> None:
    twice_as_slow = planned(rates=LEARNT._replace(prefill_factor=2.0), size=Size(3, ranks_per_worker=4))
    assert planned().worker_capacity.prefill_tokens_per_s == pytest.approx(2000 / 0.05)
    assert twice_as_slow.worker_capacity.prefill_tokens_per_s == pytest.approx(4 * 2000 / 0.1)


def test_a_worker_decodes_the_sequences_that_keep_the_objective() -> None:
    each_s = built.STEP_SEQUENCE_S + 2100 * built.STEP_KV_TOKEN_S
    most = int((0.02 - built.STEP_S) / each_s)
    assert planned().worker_capacity.sequences == most
    assert planned().worker_capacity.output_tokens_per_s == pytest.approx(most / (built.STEP_S + most * each_s))


@pytest.mark.parametrize(("size", "most"), [(Size(1, 1, sequences_max=9), 9), (Size(1, 1, kv_tokens_max=21_500), 10)])
def test_an_engines_own_limits_bound_its_sequences(size: Size, most: int) -> None:
    assert planned(size=size).worker_capacity.sequences == most


def test_with_fewer_workers_fewer_requests_are_in_time() -> None:
    predicted = planned(objectives=OBJECTIVES._replace(ttft_s=0.12)).predicted
    assert [each.workers for each in predicted] == [2, 3, 4]
    fewer, now, more = [each.ttft_within_ratio or 0.0 for each in predicted]
    assert fewer == 0.0 < now < more


@given(st.floats(0.1, 500), st.floats(0.5, 8), st.integers(1, 8), st.sampled_from([AGGREGATED, PREFILL, DECODE]))
def test_advised_are_the_fewest_that_keep_every_reachable_objective(
    requests_per_s: float, factor: float, ranks: int, group: Group
) -> None:
    rates = Rates(factor, factor, 200.0)

    def fails(workers: int) -> set[str]:
        _, found, _ = planned(requests_per_s, group, rates=rates, size=Size(max(2, workers), ranks)).predicted
        if workers == 1:
            found = planned(requests_per_s, group, rates=rates, size=Size(2, ranks)).predicted[0]
        shares = {"ttft": found.ttft_within_ratio, "itl": found.itl_within_ratio}
        failed = {name for name, share in shares.items() if share is not None and share < OBJECTIVES.kept_ratio}
        is_busy = (found.utilisation_ratio or 0.0) > UTILISATION_MAX
        return (failed | ({"utilisation"} if is_busy else set())) - set(answer.unreachable)

    answer = planned(requests_per_s, group, rates=rates, size=Size(3, ranks))
    assert answer.advised_workers is not None
    assert not fails(answer.advised_workers)
    if answer.advised_workers > 1:
        assert answer.reason in fails(answer.advised_workers - 1)
    else:
        assert answer.reason == "least"


def test_an_objective_that_no_number_of_workers_keeps_is_named_and_left_out() -> None:
    found = planned(10.0, load=load(10.0, work_s=2.0))
    assert found.unreachable == ("ttft",)
    assert (found.advised_workers, found.reason) == (24, "utilisation")


# ------------------------------------------------------------------------------------------------- the load


def routed(uncached: int = 32, **changed: Any) -> Routed:
    fields: dict[str, Any] = {"lease_id": "l", "worker_id": "w0", "dp_rank": 0, "blocks": chain(1, 2, 3)}
    return Routed(uncached_tokens=uncached, extra_blocks=1, **fields | changed)


def booked(event: Routed, second: int) -> LedgerApplied:
    return LedgerApplied(now_s=float(second), event=event, router="another")


def after(folded: RouterState, *bookings: LedgerApplied) -> built.Core:
    for booking in bookings:
        folded.apply(booking)
    return folded.core


def test_the_load_is_what_came_in_the_window() -> None:
    core = after(joined(registered()), *(booked(routed(), second) for second in range(200)))
    found = offered(core, 60.0, 200.0, 0.0)[AGGREGATED]
    assert (found.covered_s, found.requests, found.uncached_tokens) == (55.0, 55, 55 * 32)
    assert (found.requests_per_s, found.prefill_tokens_per_s) == (1.0, 32.0)
    assert found.context_tokens == 64.0
    assert offered(core, 60.0, 400.0, 0.0) == {}


def test_a_young_router_divides_by_its_age() -> None:
    core = after(joined(registered()), *(booked(routed(), second) for second in range(100, 120)))
    assert offered(core, 60.0, 120.0, 100.0)[AGGREGATED].requests_per_s == 1.0
    assert offered(core, 60.0, 100.5, 100.0)[PREFILL].covered_s == SLOT_S


def test_roles_are_counted_apart() -> None:
    workers = [registered(role, role=role) for role in ("prefill", "decode")]
    bookings = [booked(routed(0, worker_id=each.worker_id), 1) for each in workers]
    assert offered(after(joined(*workers), *bookings), 60.0, 2.0, 0.0).keys() == {PREFILL, DECODE}


@pytest.mark.parametrize("uncached", [64, 1000, 30_000])
def test_the_work_of_a_prompt_is_counted_to_ten_percent(uncached: int) -> None:
    core = after(joined(registered()), booked(routed(uncached), 1))
    pairs_s = 0.830e-9 * uncached * uncached / 2
    assert mean_s(offered(core, 60.0, 2.0, 0.0)[AGGREGATED].prompts) == pytest.approx(
        uncached * built.PREFILL_TOKEN_S + pairs_s, rel=0.1
    )


# ------------------------------------------------------------------------------------------------- of a router


class Planning:
    """A routing with a planner, which learns from what ends at its one worker."""

    def __init__(self) -> None:
        bench = Bench()
        self.clock = bench.clock
        self.routing = Routing(bench.state, bench.index, bench.clock, Policy(), seed=1, lease_s=8.0, decisions_max=9)
        self.planner = Planner(self.routing, PlannerSection())

    async def request(self, name: str, output_tokens: int | None = 101) -> None:
        """Route a request and let it end: 101 tokens, 10 ms apart."""
        lease = self.routing.take(self.routing.decide(route(4000, decision_id=name)))
        await self.clock.advance(0.2)
        lease.first_token()
        await self.clock.advance(1.0)
        lease.end("ok", built.Answer(output_tokens, later_tokens=100))

    def plan(self) -> GroupPlan:
        (found,) = self.planner.plans(PlannerSection())
        return found


@pytest.mark.parametrize("output_tokens", [101, None], ids=["stated", "by the times of a stream without usage"])
async def test_a_router_says_what_it_does_not_know_and_then_what_it_has_learnt(output_tokens: int | None) -> None:
    planning = Planning()
    assert planning.plan().unknown == ("prefill_factor", "decode_factor", "output_tokens")
    for number in range(3):
        await planning.request(f"d{number}", output_tokens)
    found = planning.plan()
    assert (found.group, found.size.workers, found.load.requests, found.unknown) == (AGGREGATED, 1, 3, ())
    assert found.rates.output_tokens == pytest.approx(101)
    assert (found.advised_workers, found.reason) == (1, "least")


@pytest.mark.parametrize(
    "outcome", [None, OutcomeKnown(now_s=1.0, decision_id="d", outcome="cancelled", output_tokens=3)]
)
def test_an_answer_that_did_not_end_has_no_length(outcome: OutcomeKnown | None) -> None:
    assert answered_tokens(outcome) is None


def test_metrics_have_no_samples_of_what_is_unknown() -> None:
    planning = Planning()
    planning.routing.take(planning.routing.decide(route()))
    samples = {family.name: [*family.samples] for family in planning.planner.families()}
    assert samples["kvrouter_planner_advised_workers"] == []
    assert [each.value for each in samples["kvrouter_planner_workers"]] == [1.0]
    assert [each.labels for each in samples["kvrouter_planner_offered_prefill_tokens_per_second"]] == [
        {"model": MODEL, "role": "aggregated"}
    ]


def test_the_objectives_are_those_of_the_dashboards() -> None:
    kept = PlannerSection()
    text = rules().decode()
    assert f'kvrouter_time_to_first_token_seconds_bucket{{le="{kept.ttft_s}"}}' in text
    assert f'kvrouter_inter_token_latency_seconds_bucket{{le="{kept.itl_s}"}}' in text
    assert f"kvrouter:late_first_tokens:ratio_rate3d > {1 - kept.kept_ratio:.6g} " in text


def test_workers_that_take_no_new_work_are_not_counted() -> None:
    planning = Planning()
    draining = WorkerDraining(worker_id="w0", instance="w0-1")
    planning.routing.apply(FleetApplied(now_s=101.0, event=draining))
    assert planning.plan().size.workers == 0
