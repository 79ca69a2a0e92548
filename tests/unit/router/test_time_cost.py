"""Every line of the formula against numbers worked out by hand: B = 16, ISL = 1600, so N = 100."""

import math
import sys
from typing import Any

import numpy as np
import pytest

from kv_protocol.decision import CostTerms
from router.decision.policy import CostParameters, Policy
from router.decision.verdict import Verdict
from router.decision.view import RateColumns
from tests.support.decide import decide
from tests.unit.router.samples import Row, joined, registered, route, row, state, view

TOKENS = 1600
TOKEN_MS, PAIR_MS = 22.8e-3, 0.830e-6
STEP_MS, SEQUENCE_MS, KV_TOKEN_MS = 5.52, 12.7e-3, 34.7e-6
OUTPUT_TOKENS = 100.0


def terms(
    *rows: Row, prefill: float = 1.0, decode: float = 1.0, parameters: CostParameters | None = None, **changed: Any
) -> CostTerms:
    """Return the terms of the first rank; its factors are `prefill` and `decode`."""
    rows = rows or (row(),)
    factors = (np.full(len(rows), prefill), np.full(len(rows), decode))
    moment = view(*rows)._replace(rates=RateColumns(*factors, OUTPUT_TOKENS))
    return decided(moment, parameters, **changed).terms(0)


def decided(moment: Any, parameters: CostParameters | None = None, **changed: Any) -> Verdict:
    policy = Policy(parameters=parameters or CostParameters())
    return decide(moment, route(TOKENS, block_size=16, **changed), policy, 1)


def prefill_ms(uncached: float) -> float:
    return uncached * TOKEN_MS + uncached * (TOKENS - uncached / 2) * PAIR_MS


def test_an_idle_rank_that_holds_nothing_costs_its_prefill_and_its_steps() -> None:
    found = terms()
    step = STEP_MS + SEQUENCE_MS + TOKENS * KV_TOKEN_MS
    assert found.prefill_ms == pytest.approx(prefill_ms(TOKENS))
    assert found.decode_ms == pytest.approx(OUTPUT_TOKENS * step)
    assert (found.wait_ms, found.stall_ms, found.slowdown_ms) == (0.0, 0.0, 0.0)
    assert found.lateness_ms == pytest.approx(found.prefill_ms**2 / 2000)
    assert found.cost == pytest.approx(4 * (found.prefill_ms + found.lateness_ms) + found.decode_ms)


HELD = (3, 5, 6, 9)
"""On the GPU 3 blocks, on the host 2 more, on disk 1 more, elsewhere 3 more."""


@pytest.mark.parametrize(
    ("parameters", "changed", "credit"),
    [
        ({}, {}, 3 + 0.75 * 2 + 0.25),
        ({"overlap_credit": 0.5}, {}, 0.5 * 3 + 0.75 * 2 + 0.25),
        ({"host_weight": 0.0}, {}, 3 + 0.25),
        ({"disk_weight": 1.0}, {}, 3 + 1.5 + 1.0),
        ({"overlap_credit": 0.0}, {}, 0.0),
        ({}, {"trust": "DEGRADED"}, 0.5 * 4.75),
        ({}, {"trust": "FALLBACK"}, 4.75),
        ({}, {"predicted_blocks": 2}, 4.75),  # it has more already
        ({}, {"predicted_blocks": 4}, 4 + 0.75 + 0.25),  # one that lay on the host is on its way to the GPU
        ({}, {"predicted_blocks": 8}, 8.0),
    ],
)
def test_every_tier_is_credited_with_what_it_adds_to_the_prefix(
    parameters: dict[str, float], changed: dict[str, Any], credit: float
) -> None:
    found = terms(row(overlap_blocks=HELD, **changed), parameters=CostParameters(**parameters))
    assert found.overlap_credit_blocks == credit
    assert found.prefill_ms == pytest.approx(prefill_ms(TOKENS - 16 * credit))


def test_prefill_is_never_less_than_none() -> None:
    assert terms(row(overlap_blocks=(0, 90, 90, 90)), parameters=CostParameters(host_weight=3.0)).prefill_ms == 0.0


def test_the_multiplier_of_the_constraints_multiplies_the_whole_sum_and_is_told() -> None:
    carried = [(), ("near",), ("near", "old"), ("best",)]
    preferred = (("near", 0.5), ("old", -0.5), ("best", 1e9))
    moment = view(*(row(f"w{at}/0", taints=taints) for at, taints in enumerate(carried)))
    found = [decided(moment, preferred_taints=preferred).terms(at) for at in range(4)]
    factors = [1.0, math.exp(-math.tanh(0.5)), 1.0, math.exp(-1.0)]
    plain = found[0].cost
    assert [(each.constraint_multiplier, each.cost) for each in found] == [(each, plain * each) for each in factors]


def test_the_prompt_stalls_every_active_request_and_its_answer_slows_each_of_their_steps() -> None:
    found = terms(row(active_requests=5, active_blocks=500))
    assert found.stall_ms == pytest.approx(5 * prefill_ms(TOKENS))
    assert found.slowdown_ms == pytest.approx(OUTPUT_TOKENS * 5 * (SEQUENCE_MS + TOKENS * KV_TOKEN_MS))
    assert found.decode_ms == pytest.approx(OUTPUT_TOKENS * (STEP_MS + 6 * SEQUENCE_MS + 600 * 16 * KV_TOKEN_MS))


def test_a_first_token_as_late_as_lateness_s_counts_twice() -> None:
    found = terms(row(prefill_tokens_queued=40_000), parameters=CostParameters(lateness_s=0.5))
    until_first = found.wait_ms + found.prefill_ms
    assert found.lateness_ms == pytest.approx(until_first * until_first / 500)


@pytest.mark.parametrize(
    ("changed", "tokens"),
    [
        ({}, OUTPUT_TOKENS),
        ({"max_tokens": 20}, 20),
        ({"max_tokens": 9000}, OUTPUT_TOKENS),
        ({"expected_osl": 700}, 700),
    ],
)
def test_the_answer_is_as_long_as_learnt_or_as_the_client_says(changed: dict[str, Any], tokens: float) -> None:
    assert terms(**changed).decode_ms == pytest.approx(tokens * (STEP_MS + SEQUENCE_MS + TOKENS * KV_TOKEN_MS))


def test_latencies_are_predicted_by_the_wait_the_prefill_and_the_step_at_the_speed_of_the_rank() -> None:
    slow = row(prefill_tokens_queued=1000, factors=(2.0, 3.0))
    ttft_s = 2 * (17e-3 + (1000 * TOKEN_MS + prefill_ms(TOKENS)) / 1e3)
    itl_s = 3 * (STEP_MS + SEQUENCE_MS + TOKENS * KV_TOKEN_MS) / 1e3
    assert decided(view(slow)).predicted_s(0) == pytest.approx((ttft_s, itl_s))
    assert decided(view(row(role="decode")), phase="decode").predicted_s(0) == pytest.approx((None, itl_s / 3))
    assert decided(view(row(role="prefill")), phase="prefill").predicted_s(0)[1] is None


def test_a_prefill_worker_decodes_nothing() -> None:
    found = terms(row(role="prefill", active_requests=5, prefill_tokens_queued=10), phase="prefill")
    assert (found.stall_ms, found.decode_ms, found.slowdown_ms) == (0.0, 0.0, 0.0)
    assert found.prefill_ms > 0 < found.wait_ms


def test_a_decode_worker_computes_no_prompt() -> None:
    found = terms(row(role="decode", active_requests=5, prefill_tokens_queued=10), phase="decode")
    assert (found.wait_ms, found.prefill_ms, found.lateness_ms, found.stall_ms) == (0.0, 0.0, 0.0, 0.0)
    assert found.decode_ms > 0 < found.slowdown_ms


def test_what_the_reference_engine_would_need_is_what_measurements_are_compared_with() -> None:
    busy = row("w1/0", prefill_tokens_queued=1000, active_requests=5, active_blocks=500)
    verdict = decided(view(row("w0/0"), busy)._replace(rates=RateColumns(np.ones(2), np.ones(2), OUTPUT_TOKENS)))
    ttft_s, itl_s = state().core.expected_s(verdict, 1)
    assert ttft_s == pytest.approx(17e-3 + (1000 * TOKEN_MS + prefill_ms(TOKENS)) / 1e3)
    assert itl_s == pytest.approx((STEP_MS + 6 * SEQUENCE_MS + 600 * 16 * KV_TOKEN_MS) / 1e3)


def crowded(name: str = "w0/0", **changed: Any) -> Row:
    """A rank of 600 blocks of which 550 are in use, 10 of them the request's own; it holds 40 of its blocks."""
    has: dict[str, Any] = {"total_kv_blocks": 600, "active_requests": 5, "active_blocks": 550, "shared_blocks": 10}
    return row(name, **has | {"overlap_blocks": (40, 40, 40, 40)} | changed)


@pytest.mark.parametrize(("active_blocks", "credited"), [(510, 40), (525, 25), (540, 10), (600, 10)])
def test_as_many_blocks_as_are_missing_are_lost_of_those_that_nothing_uses(active_blocks: int, credited: int) -> None:
    found = terms(crowded(active_blocks=active_blocks))
    assert (found.overlap_credit_blocks, found.overlap_lost_blocks) == (credited, 40 - credited)
    assert found.prefill_ms == pytest.approx(prefill_ms(TOKENS - 16 * credited))


def test_what_is_lost_is_still_worth_a_copy_where_it_falls_to_the_host() -> None:
    found = terms(crowded(active_blocks=525, overlap_blocks=(40, 44, 44, 44)))
    assert found.overlap_credit_blocks == 25 + 0.75 * (4 + 15)


@pytest.mark.parametrize("changed", [{"total_kv_blocks": 0}, {"active_blocks": 510}])
def test_nothing_is_lost_where_there_is_room_or_where_nobody_knows(changed: dict[str, Any]) -> None:
    found = terms(crowded(**changed))
    assert (found.overlap_lost_blocks, found.overlap_credit_blocks) == (0.0, 40.0)


def test_measurements_are_compared_without_what_is_lost() -> None:
    moment = view(crowded(active_blocks=525))._replace(rates=RateColumns(np.ones(1), np.ones(1), OUTPUT_TOKENS))
    verdict = decided(moment)
    assert verdict.lost_blocks == 15
    assert state().core.expected_s(verdict, 0)[0] == pytest.approx(17e-3 + prefill_ms(75 * 16) / 1e3)


@pytest.mark.parametrize(
    ("overlap", "size"), [(np.zeros((3, 1), np.int32), 1), (np.zeros((4, 1)), 1), (np.zeros((4, 2), np.int32), 2)]
)
def test_an_answer_of_the_index_of_another_shape_is_refused(overlap: Any, size: int) -> None:
    folded, answered = joined(registered()), (overlap, (0,), (0,), ("",))
    references = sys.getrefcount(overlap)
    with pytest.raises(ValueError, match=f"overlap: found {size}, allowed 4 x 1 int32"):
        folded.decide(route(), lambda *_: answered, 0.0, 1)
    assert sys.getrefcount(overlap) == references
