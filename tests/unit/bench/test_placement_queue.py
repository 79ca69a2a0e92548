"""Dynamo's queue (`bench/placement/policies.py`), as its help texts and its own tests state it."""

from collections.abc import Sequence
from functools import partial

import pytest

from bench.placement.policies import PLACEMENTS
from bench.routing.trace import TraceRequest
from bench.routing.virtual_engine import MAX_NUM_BATCHED_TOKENS
from bench.routing.virtual_fleet import RequestFigures, VirtualFleet, VirtualFleetShape
from bench.routing.virtual_router import VirtualQueue
from router.decision.verdict import Verdict
from router.queue.waiting import QueuePolicy
from tests.support.watched_routing import Told, WatchedRouting
from tests.unit.bench.traces import request


def played(
    trace: Sequence[TraceRequest], queue: VirtualQueue, workers: int = 1, restart_s: float | None = None
) -> tuple[list[Verdict], list[RequestFigures]]:
    """Return what was placed, and how the requests fared in the order of their arrival."""
    told = list[Told]()
    shape = VirtualFleetShape(workers, kv_tokens=200 * 512, restart_s=restart_s)
    policy = PLACEMENTS["dynamo"].policy
    watched = partial(WatchedRouting, watch=[told.append])
    outcomes = VirtualFleet(shape, policy, trace, seed=1, new_routing=watched, queue=queue).run()
    return [each for each in told if isinstance(each, Verdict)], sorted(outcomes, key=lambda each: each.number)


def test_at_threshold_0_each_idle_worker_gets_one_request_and_each_first_token_lets_the_next_one_go() -> None:
    # its test: ten requests of 512 tokens, two workers
    placed, outcomes = played([request(0.0, number) for number in range(10)], VirtualQueue(0.0), workers=2)
    at_once = [each for each in placed if each.now_s == 0.0]
    assert {each.winner.worker_id for each in at_once} == {"w0", "w1"}
    assert len(at_once) == 2
    firsts_s = sorted(each.arrival_s + each.ttft_s for each in outcomes)
    assert [each.now_s for each in placed[2:]] == pytest.approx(firsts_s[:8])


@pytest.mark.parametrize("threshold", [0.5, 1.0, 1.5])
def test_a_worker_is_busy_with_more_than_the_threshold_times_its_batch_not_with_as_much(threshold: float) -> None:
    blocks = round(threshold * MAX_NUM_BATCHED_TOKENS) // 512
    full, one_token, late = range(blocks), 1_000, 1_001
    trace = [request(0.0, *full), request(0.0, one_token, short_by=511), request(0.0, late)]
    placed, _ = played(trace, VirtualQueue(threshold))
    assert [each.now_s == 0.0 for each in placed] == [True, True, False]


def test_without_a_threshold_none_waits() -> None:
    placed, _ = played([request(0.0, *range(number * 20, number * 20 + 20)) for number in range(9)], VirtualQueue())
    assert [each.now_s for each in placed] == [0.0] * 9


@pytest.mark.parametrize(("policy", "order"), [("fcfs", ["r2", "r3", "r4"]), ("wspt", ["r4", "r3", "r2"])])
def test_what_waits_goes_by_its_arrival_or_by_the_tokens_that_no_worker_held(
    policy: QueuePolicy, order: list[str]
) -> None:
    # its tests: 1,024 tokens of which 960 are held go before 512 of which none is; the same shares here, of 16 blocks
    held, busy = tuple(range(16)), tuple(range(100, 116))
    waiting = [tuple(range(200, 216)), tuple(range(300, 308)), (*held[:15], 400)]
    trace = [request(0.0, *held), request(9.0, *busy)]
    trace += [request(9.0 + number * 1e-6, *each) for number, each in enumerate(waiting, 1)]
    placed, _ = played(trace, VirtualQueue(0.0, policy))
    assert [each.request.request_id for each in placed[2:]] == order


def test_the_time_in_the_queue_is_part_of_the_ttft() -> None:
    _, (first, second) = played([request(0.0, *range(16)), request(0.0, *range(20, 36))], VirtualQueue(0.0))
    assert second.ttft_s == pytest.approx(2 * first.ttft_s, rel=0.02)


def test_what_waits_when_the_router_starts_anew_is_placed() -> None:
    trace = [request(0.0, *range(16)), request(0.0, *range(20, 36)), request(0.02, 40)]
    placed, outcomes = played(trace, VirtualQueue(0.0), restart_s=0.01)
    assert [each.request.request_id for each in placed] == ["r0", "r2", "r1"]
    assert len(outcomes) == len(trace)
