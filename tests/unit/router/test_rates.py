"""What is learnt of ranks' speed and of answers' lengths; a rank whose timings lie gets neither all nor none."""

import math
from collections import Counter, deque
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_protocol.ids import WorkerRank
from kv_protocol.journal import OutcomeKnown
from router.decision.decide import decide
from router.decision.policy import Policy
from router.decision.time_cost import expected_of
from router.fleet import rates as module
from router.fleet.rates import (
    ALIKE,
    FORGET_S,
    MAX,
    OUTPUT_TOKENS,
    SECONDS_MAX,
    Factor,
    Rates,
    RateSpread,
    used_in_numpy,
)
from router.journal.checkpoint_rows import ExpectedRow
from tests.unit.router.samples import MODEL, rank, route, row, view

TTFT_S, ITL_S, NOW_S = 0.1, 0.01, 1.0
HERE, THERE = rank("w0/0"), rank("w1/0")


def ended(decision_id: str, ttft_s: float, itl_s: float, output_tokens: int = 101, **changed: Any) -> OutcomeKnown:
    """Return an outcome whose later tokens came `itl_s` apart."""
    fields: dict[str, Any] = {
        "now_s": NOW_S,
        "outcome": "ok",
        "duration_s": ttft_s + itl_s * (output_tokens - 1),
    } | changed
    return OutcomeKnown(decision_id=decision_id, ttft_s=ttft_s, output_tokens=output_tokens, itl_s=itl_s, **fields)


def learn(rates: Rates, at: WorkerRank, *, slower: float, times: int = 1, output_tokens: int = 101) -> None:
    """The rank needs `slower` times as long as the reference engine."""
    for number in range(times):
        rates.decided(ExpectedRow(f"d{number}", MODEL, at, TTFT_S, ITL_S))
        rates.ended(ended(f"d{number}", TTFT_S * slower, ITL_S * slower, output_tokens))


def factors(rates: Rates, *ranks: WorkerRank, spread: RateSpread = "whole") -> tuple[list[float], list[float]]:
    columns = rates.columns(MODEL, ranks, NOW_S, spread)
    return columns.prefill.tolist(), columns.decode.tolist()


def near(number: float) -> list[Any]:
    return [pytest.approx(number, rel=0.02)]


def test_at_first_all_ranks_are_like_the_reference_engine() -> None:
    assert factors(Rates(), HERE, THERE) == ([1.0, 1.0], [1.0, 1.0])
    assert Rates().columns(MODEL, (HERE,), NOW_S).output_tokens == OUTPUT_TOKENS


def test_a_ranks_factors_come_near_what_is_measured() -> None:
    rates = Rates()
    learn(rates, HERE, slower=2.5, times=200)
    assert list(rates.statistics().ranks[HERE]) == near(2.5) * 2


def test_a_rank_without_measurements_is_taken_to_be_like_the_others_of_its_model() -> None:
    rates = Rates()
    learn(rates, HERE, slower=3.0, times=200)
    assert factors(rates, THERE) == (near(3.0), near(3.0))
    assert rates.columns("another", (THERE,), NOW_S).prefill.tolist() == [1.0]


def test_ranks_that_differ_by_chance_are_taken_to_be_alike() -> None:
    rates = Rates()
    for at, slower in ((HERE, 1.1), (THERE, 0.9)):
        learn(rates, at, slower=slower, times=200)
    assert factors(rates, HERE, THERE)[0] == near(1.0) * 2


@pytest.mark.parametrize(("spread", "apart"), [("whole", 3.0), ("lessened", 3.0 / ALIKE**2)])
def test_ranks_that_differ_by_much_are_not(spread: RateSpread, apart: float) -> None:
    rates = Rates()
    for _ in range(200):
        learn(rates, HERE, slower=3.0)
        learn(rates, THERE, slower=1.0)
    slow, fast = factors(rates, HERE, THERE, spread=spread)[0]
    assert slow / fast == pytest.approx(apart, rel=0.1)


@pytest.mark.parametrize(
    ("believed", "taken"), [(1.25, 1.0), (1.5, 1.45), (1.5625, 1.5625), (1.9, 1.9), (0.8, 1.0), (0.64, 0.64)]
)
def test_a_factor_counts_in_full_from_the_square_of_alike_on(believed: float, taken: float) -> None:
    columns = np.array([[believed], [1.0], [1.0], [1.0], [NOW_S]])
    prefill, decode = used_in_numpy(columns, Factor(), Factor(), NOW_S, "whole").tolist()
    assert (prefill, decode) == ([pytest.approx(taken)], [1.0])


def test_what_one_rank_shows_of_the_model_counts_for_all_its_ranks() -> None:
    rates = Rates()
    learn(rates, HERE, slower=0.2, times=4)
    learn(rates, THERE, slower=0.2, times=100)
    here, there, unknown = factors(rates, HERE, THERE, rank("w2/0"))[0]
    assert here == there == unknown


def test_a_worker_that_left_leaves_its_models_factors() -> None:
    rates = Rates()
    learn(rates, HERE, slower=3.0, times=200)
    rates.forget("w0")
    assert rates.statistics().ranks == {}
    assert factors(rates, HERE)[0] == near(3.0)


def test_one_stray_measurement_moves_a_factor_little() -> None:
    rates = Rates()
    learn(rates, HERE, slower=1.0, times=200)
    learn(rates, HERE, slower=1000.0)
    assert factors(rates, HERE)[0][0] < 1.13


def test_the_length_of_answers_is_learnt_by_model() -> None:
    rates = Rates()
    learn(rates, HERE, slower=1.0, times=300, output_tokens=41)
    assert rates.columns(MODEL, (THERE,), NOW_S).output_tokens == pytest.approx(41, rel=0.02)
    assert rates.columns("another", (THERE,), NOW_S).output_tokens == OUTPUT_TOKENS


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, SECONDS_MAX * 2])
def test_an_impossible_latency_is_counted_and_not_learnt(seconds: float) -> None:
    rates = Rates()
    rates.decided(ExpectedRow("d", MODEL, HERE, TTFT_S, ITL_S))
    rates.ended(msgspec.structs.replace(ended("d", seconds, ITL_S), duration_s=None, came_whole=True))
    assert factors(rates, HERE)[0] == [1.0]
    assert rates.statistics().refused_total == 1


def test_a_failed_request_teaches_nothing() -> None:
    rates = Rates()
    rates.decided(ExpectedRow("d", MODEL, HERE, TTFT_S, ITL_S))
    rates.ended(ended("d", 9.0, 9.0, outcome="failed"))
    assert rates.statistics() == Rates().statistics()


def test_a_decode_worker_teaches_nothing_of_prompts() -> None:
    request = route(100, block_size=10, phase="decode")
    assert expected_of(view(row("w0/0")), request, 0).ttft_s == 0.0
    rates = Rates()
    rates.decided(expected_of(view(row("w0/0")), request, 0))
    rates.ended(ended("d-1", 9.0, 1.0))
    prefill, decode = factors(rates, HERE)
    assert (prefill, decode[0] > 1.0) == ([1.0], True)


@given(
    st.lists(
        st.tuples(st.sampled_from((HERE, THERE)), st.floats(allow_nan=True), st.floats(allow_nan=True)), max_size=300
    )
)
def test_factors_keep_within_their_bounds_whatever_is_measured(told: list[tuple[WorkerRank, float, float]]) -> None:
    rates = Rates()
    for number, (at, ttft_s, itl_s) in enumerate(told):
        rates.decided(ExpectedRow(f"d{number}", MODEL, at, TTFT_S, ITL_S))
        rates.ended(msgspec.structs.replace(ended(f"d{number}", ttft_s, ITL_S), itl_s=itl_s, came_whole=True))
    for of_all in factors(rates, HERE, THERE, rank("w9/0")):
        assert all(1 / MAX <= factor <= MAX for factor in of_all)


def shares(liar: float, *, requests: int = 3000, step_s: float = 0.0) -> list[float]:
    """Return each of four ranks' share of the requests while one seems to be `liar` times as slow as it is.

    Ten requests of 2,000 tokens a second, which share nothing; each rank works on those of the last 40 that it got.
    The clock steps by `step_s` after a third of them, and back after two thirds.
    """
    rates, lately, got = Rates(), deque[int](maxlen=40), Counter[int]()
    for number in range(requests):
        now_s = number / 10 + step_s * (requests < 3 * number < 2 * requests)
        active = [lately.count(at) for at in range(4)]
        moment = view(*(row(f"w{at}/0", active_requests=of, active_blocks=of * 130) for at, of in enumerate(active)))
        moment = moment._replace(rates=rates.columns(MODEL, moment.ranks, now_s), now_s=now_s)
        verdict = decide(moment, route(2000, block_size=16, decision_id=f"d{number}"), Policy.current(), number)
        place = verdict.rank_indices[verdict.winner_at]
        got[place] += 1
        lately.append(place)
        expected = expected_of(moment, verdict.request, place)
        rates.decided(expected)
        slower = 1.0 if place else liar
        rates.ended(ended(f"d{number}", expected.ttft_s * slower, expected.itl_s * slower, now_s=now_s))
    return [got[place] / requests for place in range(4)]


LIES = (1e-4, 0.01, 0.1, 10.0, 100.0, 1e4, math.nan, -1.0)


def is_fair(found: list[float]) -> bool:
    return all(0.001 < share < 0.9 for share in found)


@pytest.mark.parametrize("liar", LIES)
def test_a_rank_whose_timings_lie_gets_neither_all_requests_nor_none(liar: float) -> None:
    found = shares(liar)
    assert is_fair(found), found


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0])
def test_nor_does_it_if_the_clock_steps(step_s: float) -> None:
    found = shares(100.0, requests=900, step_s=step_s)
    assert is_fair(found), found


def test_factors_without_bounds_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RANK_MAX", 1e9)
    assert not all(is_fair(shares(liar)) for liar in LIES)


def test_a_rank_that_was_slow_once_is_soon_taken_to_be_like_the_others() -> None:
    rates = Rates()
    for at, slower in ((HERE, 3.0), (THERE, 1.0)):
        learn(rates, at, slower=slower, times=200)
    slow, _ = rates.columns(MODEL, (HERE, THERE), NOW_S).prefill.tolist()
    later_slow, later_other = rates.columns(MODEL, (HERE, THERE), NOW_S + 2 * FORGET_S).prefill.tolist()
    assert slow > 1.1 * later_slow
    assert later_slow == later_other


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from((HERE, THERE)), st.floats(0.01, 10.0)), max_size=40), st.integers(0, 40))
def test_a_checkpoint_has_all_that_was_learnt(told: list[tuple[WorkerRank, float]], at: int) -> None:
    whole, restored = Rates(), Rates()
    for number, (where, slower) in enumerate(told):
        if number == at:
            restored.restore_totals(whole.totals_row())
            for model in whole.model_rows():
                restored.restore_model(model)
            for each in whole.rank_rows():
                restored.restore_rank(each)
            for expected in whole.expected_rows():
                restored.restore_expected(expected)
        for rates in (whole, restored) if number >= at else (whole,):
            learn(rates, where, slower=slower)
    if at < len(told):
        assert restored.statistics() == whole.statistics()
