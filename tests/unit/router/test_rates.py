"""What is learnt of ranks' speed and of answers' lengths; a rank whose timings lie gets neither all nor none."""

import math
from collections import Counter, deque
from typing import Any

import msgspec
import pytest

from kv_protocol.codec import pack_u64
from kv_protocol.fleet import WorkerLeft
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import FleetApplied, OutcomeKnown
from router.decision.policy import Policy
from router.decision.state import RouterState
from router.decision.view import RateColumns
from tests.reference.rates import FORGET_S, SECONDS_MAX
from tests.unit.router.samples import MODEL, ask, joined, rank, registered, route

NOW_S = 1.0
HERE, THERE = rank("w0/0"), rank("w1/0")


def workers() -> RouterState:
    """Return a state of three workers of a model, and one of another; w0 and w1 are the first."""
    return joined(*(registered(f"w{at}") for at in range(3)), registered("x", model="n", served_names=("n",)))


def ended(decision_id: str, ttft_s: float, itl_s: float, output_tokens: int = 101, **changed: Any) -> OutcomeKnown:
    """Return an outcome whose later tokens came `itl_s` apart."""
    fields: dict[str, Any] = {
        "now_s": NOW_S,
        "outcome": "ok",
        "duration_s": ttft_s + itl_s * (output_tokens - 1),
    } | changed
    return OutcomeKnown(decision_id=decision_id, ttft_s=ttft_s, output_tokens=output_tokens, itl_s=itl_s, **fields)


def taken(folded: RouterState, at: WorkerRank) -> tuple[float, float]:
    """The rank gets a request "d"; return the times that the reference engine would need."""
    request = route(decision_id="d", pinned_worker=at.worker_id, sequence_hashes=b"")
    verdict = folded.decide(request, ask, NOW_S, 1)
    folded.take(verdict)
    return folded.core.expected_s(verdict, verdict.place)


def learn(folded: RouterState, at: WorkerRank, *, slower: float, times: int = 1, output_tokens: int = 101) -> None:
    """The rank needs `slower` times as long as the reference engine."""
    for _ in range(times):
        ttft_s, itl_s = taken(folded, at)
        folded.apply(ended("d", ttft_s * slower, itl_s * slower, output_tokens))


def columns(folded: RouterState, model: str = MODEL, now_s: float = NOW_S) -> RateColumns:
    """Return what a decision reads of all ranks of the model."""
    rates = folded.decide(route(model=model), ask, now_s, 1).view().rates
    assert rates is not None
    return rates


def near(number: float) -> Any:
    return pytest.approx(number, rel=0.02)


def test_a_ranks_factors_come_near_what_is_measured() -> None:
    folded = workers()
    learn(folded, HERE, slower=2.5, times=200)
    factors = folded.rate_factors()[HERE]
    assert (factors.prefill, factors.decode, factors.prefills, factors.decodes) == (near(2.5), near(2.5), 200, 200)


def test_ranks_that_differ_by_much_are_not() -> None:
    folded = workers()
    for _ in range(200):
        learn(folded, HERE, slower=3.0)
        learn(folded, THERE, slower=1.0)
    slow, fast, _ = columns(folded).prefill
    assert slow / fast == pytest.approx(3.0, rel=0.1)


@pytest.mark.parametrize(
    ("believed", "taken"), [(1.25, 1.0), (1.5, 1.45), (1.5625, 1.5625), (1.9, 1.9), (0.8, 1.0), (0.64, 0.64)]
)
def test_a_factor_counts_in_full_from_the_square_of_alike_on(believed: float, taken: float) -> None:
    folded, measured = workers(), 1 << 60
    folded.core.restore("model_rates", [[MODEL, [1.0, 1, 0.0, 0], [1.0, 1, 0.0, 0], 1.0, 1]])
    folded.core.restore("rank_rates", [[[*HERE], [MODEL, believed, 1.0, measured, measured, NOW_S]]])
    found = columns(folded)
    assert (found.prefill[0], found.decode[0]) == (pytest.approx(taken), 1.0)


def test_a_worker_that_left_leaves_its_models_factors() -> None:
    folded = workers()
    learn(folded, HERE, slower=3.0, times=200)
    folded.apply(FleetApplied(now_s=NOW_S, event=WorkerLeft(worker_id="w0", instance="w0-1")))
    assert folded.rate_factors() == {}
    assert columns(folded).prefill.tolist() == [near(3.0)] * 2


def test_one_stray_measurement_moves_a_factor_little() -> None:
    folded = workers()
    learn(folded, HERE, slower=1.0, times=200)
    learn(folded, HERE, slower=1000.0)
    assert columns(folded).prefill[0] < 1.13


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, SECONDS_MAX * 2])
def test_an_impossible_latency_is_counted_and_not_learnt(seconds: float) -> None:
    folded = workers()
    _, itl_s = taken(folded, HERE)
    folded.apply(msgspec.structs.replace(ended("d", seconds, itl_s), duration_s=None, came_whole=True))
    assert columns(folded).prefill[0] == 1.0
    assert folded.core.rates_refused_total == 1


def shares(liar: float, *, requests: int = 3000, step_s: float = 0.0) -> list[float]:
    """Return each of four ranks' share of the requests while one seems to be `liar` times as slow as it is.

    Ten requests of 2,000 tokens a second, which share nothing; each rank works on those of the last 40 that it got.
    The clock steps by `step_s` after a third of them, and back after two thirds.
    """
    folded, lately, got = (
        joined(*(registered(f"w{at}") for at in range(4)), lease_s=1e9),
        deque[OutcomeKnown](),
        Counter[int](),
    )
    folded.policy = Policy()
    for number in range(requests):
        now_s = 1e4 + number / 10 + step_s * (requests < 3 * number < 2 * requests)
        asked = route(2000, decision_id=f"d{number}", sequence_hashes=pack_u64(range(125 * number, 125 * number + 125)))
        verdict = folded.decide(asked, ask, now_s, number)
        folded.take(verdict)
        got[verdict.place] += 1
        slower = 1.0 if verdict.place else liar
        ttft_s, itl_s = folded.core.expected_s(verdict, verdict.place)
        lately.append(ended(f"d{number}", ttft_s * slower, itl_s * slower, now_s=now_s))
        if len(lately) > 40:
            folded.apply(lately.popleft())
    return [got[place] / requests for place in range(4)]


def is_fair(found: list[float]) -> bool:
    return all(0.001 < share < 0.9 for share in found)


@pytest.mark.parametrize("liar", [1e-4, 0.01, 0.1, 10.0, 100.0, 1e4, math.nan, -1.0])
def test_a_rank_whose_timings_lie_gets_neither_all_requests_nor_none(liar: float) -> None:
    found = shares(liar)
    assert is_fair(found), found


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0])
def test_nor_does_it_if_the_clock_steps(step_s: float) -> None:
    found = shares(100.0, requests=900, step_s=step_s)
    assert is_fair(found), found


def test_a_rank_that_was_slow_once_is_soon_taken_to_be_like_the_others() -> None:
    folded = workers()
    for at, slower in ((HERE, 3.0), (THERE, 1.0)):
        learn(folded, at, slower=slower, times=200)
    slow = columns(folded).prefill[0]
    later_slow, later_other, _ = columns(folded, now_s=NOW_S + 2 * FORGET_S).prefill
    assert slow > 1.1 * later_slow
    assert later_slow == later_other
