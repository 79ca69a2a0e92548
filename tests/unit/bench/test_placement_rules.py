"""The rules of other routers, and Dynamo's queue, as their documentation, help texts and own tests state them."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from bench.placement.policies import (
    PLACEMENTS,
    CacheAware,
    EngineMetrics,
    SessionHash,
    WeightedScorers,
)
from bench.routing.trace import TraceRequest
from bench.routing.virtual_fleet import RequestFigures, VirtualFleet, VirtualFleetShape
from bench.routing.virtual_router import MAX_NUM_BATCHED_TOKENS, VirtualQueue, describe
from kv_protocol.codec import pack_u64
from router.decision.policies import Candidates
from router.decision.policy import Policy
from router.decision.verdict import Verdict
from router.queue.config import QueuePolicy
from tests.support.decide import decide
from tests.support.watched_routing import Told, WatchedRouting
from tests.unit.bench.traces import request
from tests.unit.router.samples import BLOCK_SIZE, route, row, view


def played(
    trace: Sequence[TraceRequest], queue: VirtualQueue, workers: int = 1, restart_s: float | None = None
) -> tuple[list[Verdict], list[RequestFigures]]:
    """Return what was placed, and how the requests fared in the order of their arrival."""
    told = list[Told]()
    shape = VirtualFleetShape((describe(200 * 512),) * workers, restart_s=restart_s)
    dynamo, watched = PLACEMENTS["dynamo"], partial(WatchedRouting, watch=[told.append])
    fleet = VirtualFleet(
        shape, dynamo.policy, trace, seed=1, modes_of=dynamo.modes_of, new_routing=watched, queue=queue
    )
    outcomes = fleet.run()
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


WORKERS = ("w0/0", "w1/0", "w2/0")


def chosen(
    rule: CacheAware | SessionHash | WeightedScorers,
    chain: Sequence[int] = (1, 2, 3, 4),
    in_flight: Sequence[int] = (0, 0, 0),
    seed: int = 1,
    now_s: float = 5.0,
    **changed: Any,
) -> int:
    """Return the number of the worker chosen for a prompt of these blocks."""
    rows = [row(name, active_requests=each) for name, each in zip(WORKERS, in_flight, strict=True)]
    request = route(len(chain) * BLOCK_SIZE, sequence_hashes=pack_u64(chain), **changed)
    return rule.choose(Candidates(view(*rows, now_s=now_s), range(len(rows))), request, Policy(), seed).winner


# ---------------------------------------------------------------- sglang, cache_aware


def test_the_worker_with_the_longest_prefix_is_chosen_though_others_have_fewer_requests() -> None:
    rule = CacheAware()
    assert [chosen(rule, (1, 2, 3)), chosen(rule, (7, 8, 9))] == [0, 1]
    assert chosen(rule, (7, 8, 9, 10), in_flight=(0, 60, 0)) == 1


def test_below_the_threshold_the_smallest_tree_is_chosen() -> None:
    rule = CacheAware()
    assert [chosen(rule, (1, 2, 3)), chosen(rule, (4, 5)), chosen(rule, (6,))] == [0, 1, 2]
    assert chosen(rule, (1, 90, 91, 92)) == 2  # one block of four is 0.25, the threshold 0.3
    assert chosen(rule, (1, 93, 94)) in (0, 2)  # one of three is more; workers 0 and 2 hold it


def test_a_match_as_long_as_the_threshold_is_not_enough() -> None:
    rule = CacheAware()
    assert [chosen(rule, (1, 2, 3)), chosen(rule, (1, 2, 3, *range(10, 17)))] == [0, 1]  # 3 of 10: 0.3


@pytest.mark.parametrize(
    ("in_flight", "winner"),
    [
        ((65, 0, 1), 1),  # 65 more, and more than 1.5 times as many
        ((64, 0, 1), 0),  # 64 more are not more than 64
        ((195, 130, 131), 0),  # 65 more, but not more than 1.5 times as many
        ((196, 130, 131), 1),
    ],
)
def test_when_imbalanced_by_both_thresholds_the_shortest_queue_is_chosen(
    in_flight: tuple[int, ...], winner: int
) -> None:
    rule = CacheAware()
    assert chosen(rule, (1, 2, 3)) == 0
    assert chosen(rule, (1, 2, 3), in_flight=in_flight) == winner


# ---------------------------------------------------------------- vllm-router, consistent_hash


def test_a_session_stays_at_its_worker_whatever_the_load() -> None:
    rule = SessionHash()
    for number in range(50):
        first = chosen(rule, session_id=f"s{number}")
        assert chosen(rule, (9,), in_flight=(90, 90, 90), seed=7, session_id=f"s{number}") == first


def test_when_a_worker_leaves_only_its_sessions_move() -> None:
    rule, sessions = SessionHash(), [f"s{number}" for number in range(300)]
    before = [chosen(rule, session_id=session) for session in sessions]
    two = view(row("w0/0"), row("w1/0"))
    after = [rule.choose(Candidates(two, range(2)), route(session_id=each), Policy(), 1).winner for each in sessions]
    assert [now for was, now in zip(before, after, strict=True) if was != 2] == [was for was in before if was != 2]


# ---------------------------------------------------------------- llm-d, weighted scorers


def scored(metrics: Sequence[EngineMetrics], held: Sequence[int]) -> list[float]:
    """Return the scores of workers that hold so many of the four blocks of a prompt."""
    rule = WeightedScorers(lambda: metrics)
    rows = [row(name, overlap_blocks=(each,) * 4) for name, each in zip(WORKERS, held, strict=True)]
    candidates, request = Candidates(view(*rows), range(3)), route(4 * BLOCK_SIZE)
    rule.choose(candidates, request, Policy(), 1)
    return rule.scores(candidates, request)


def test_the_score_is_the_weighted_sum_of_prefix_queue_and_cache() -> None:
    metrics = (EngineMetrics(4, 0.5), EngineMetrics(0, 0.25), EngineMetrics(1, 0.0))
    assert scored(metrics, (4, 1, 0)) == [3 * 1.0 + 0.0 + 2 * 0.5, 3 * 0.25 + 2 * 1.0 + 2 * 0.75, 2 * 0.75 + 2 * 1.0]


# ---------------------------------------------------------------- Dynamo


@pytest.mark.parametrize(("queued_blocks", "winners"), [(9, {"w1"}), (10, {"w1", "w2"}), (11, {"w2"})])
def test_dynamo_leaves_a_prefix_of_20_blocks_when_more_than_10_blocks_wait_there(
    queued_blocks: int, winners: set[str]
) -> None:
    # measured at the peer, with block size 16: 20 blocks held of 32, k blocks of another prompt still in prefill
    rows = (
        row(
            "w1/0",
            overlap_blocks=(20, 20, 20, 20),
            prefill_tokens_queued=queued_blocks * BLOCK_SIZE,
            active_blocks=queued_blocks,
            active_requests=1,
        ),
        row("w2/0"),
    )
    dynamo = PLACEMENTS["dynamo"]
    found = {
        decide(view(*rows), route(32 * BLOCK_SIZE), dynamo.policy, seed, dynamo.modes_of(())).winner.worker_id
        for seed in range(20)
    }
    assert found == winners
