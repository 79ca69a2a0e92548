"""Every line of both formulas against numbers worked out by hand."""

import math
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from kv_protocol.decided import RouteRequest
from kv_protocol.decision import CostTerms
from router.decision.policy import CostParameters, Policy
from router.decision.verdict import Verdict
from router.decision.view import RateColumns, View
from tests.support.decide import decide
from tests.unit.router.samples import Row, route, row, state, view

TOKENS = 1600
TOKEN_MS, PAIR_MS = 22.8e-3, 0.830e-6
STEP_MS, SEQUENCE_MS, KV_TOKEN_MS = 5.52, 12.7e-3, 34.7e-6
OUTPUT_TOKENS = 100.0


def terms_ms(
    *rows: Row, prefill: float = 1.0, decode: float = 1.0, parameters: CostParameters | None = None, **changed: Any
) -> CostTerms:
    """Return the terms of the first rank; its factors are `prefill` and `decode`."""
    rows = rows or (row(),)
    factors = (np.full(len(rows), prefill), np.full(len(rows), decode))
    moment = view(*rows)._replace(rates=RateColumns(*factors, OUTPUT_TOKENS))
    return decided(moment, parameters, **changed).terms(0)


def decided(moment: View, parameters: CostParameters | None = None, **changed: Any) -> Verdict:
    policy = Policy(parameters=parameters or CostParameters())
    return decide(moment, route(TOKENS, block_size=16, **changed), policy, 1)


def prefill_ms(uncached: float) -> float:
    return uncached * TOKEN_MS + uncached * (TOKENS - uncached / 2) * PAIR_MS


def test_an_idle_rank_that_holds_nothing_costs_its_prefill_and_its_steps() -> None:
    found = terms_ms()
    step = STEP_MS + SEQUENCE_MS + TOKENS * KV_TOKEN_MS
    assert found.prefill_ms == pytest.approx(prefill_ms(TOKENS))
    assert found.decode_ms == pytest.approx(OUTPUT_TOKENS * step)
    assert (found.wait_ms, found.stall_ms, found.slowdown_ms) == (0.0, 0.0, 0.0)
    assert found.lateness_ms == pytest.approx(found.prefill_ms**2 / 2000)
    assert found.cost == pytest.approx(4 * (found.prefill_ms + found.lateness_ms) + found.decode_ms)


def test_the_prompt_stalls_every_active_request_and_its_answer_slows_each_of_their_steps() -> None:
    found = terms_ms(row(active_requests=5, active_blocks=500))
    assert found.stall_ms == pytest.approx(5 * prefill_ms(TOKENS))
    assert found.slowdown_ms == pytest.approx(OUTPUT_TOKENS * 5 * (SEQUENCE_MS + TOKENS * KV_TOKEN_MS))
    assert found.decode_ms == pytest.approx(OUTPUT_TOKENS * (STEP_MS + 6 * SEQUENCE_MS + 600 * 16 * KV_TOKEN_MS))


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
    assert terms_ms(**changed).decode_ms == pytest.approx(tokens * (STEP_MS + SEQUENCE_MS + TOKENS * KV_TOKEN_MS))


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
    found = terms_ms(crowded(active_blocks=active_blocks))
    assert (found.overlap_credit_blocks, found.overlap_lost_blocks) == (credited, 40 - credited)
    assert found.prefill_ms == pytest.approx(prefill_ms(TOKENS - 16 * credited))


@pytest.mark.parametrize("changed", [{"total_kv_blocks": 0}, {"active_blocks": 510}])
def test_nothing_is_lost_where_there_is_room_or_where_nobody_knows(changed: dict[str, Any]) -> None:
    found = terms_ms(crowded(**changed))
    assert (found.overlap_lost_blocks, found.overlap_credit_blocks) == (0.0, 40.0)


def test_measurements_are_compared_without_what_is_lost() -> None:
    moment = view(crowded(active_blocks=525))._replace(rates=RateColumns(np.ones(1), np.ones(1), OUTPUT_TOKENS))
    verdict = decided(moment)
    assert verdict.lost_blocks == 15
    assert state().core.expected_s(verdict, 0)[0] == pytest.approx(17e-3 + prefill_ms(75 * 16) / 1e3)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"queued_tokens": np.zeros(1)}, "queued_tokens: found 1, allowed 1 x 1 int64"),
        ({"active_blocks": np.zeros((1, 1), np.int64)}, "active_blocks: found 1, allowed 1 x 1 int64"),
        ({"shared_blocks": np.zeros(1, np.int32)}, "shared_blocks: found 1, allowed 1 x 1 int64"),
        ({"active_requests": np.zeros(2, np.int64)}, "active_requests: found 2, allowed 1 x 1 int64"),
        ({"overlap": np.zeros((3, 1), np.int32)}, "overlap: found 1, allowed 4 x 1 int32"),
        ({"overlap": np.zeros((4, 1))}, "overlap: found 1, allowed 4 x 1 int32"),
        ({"overlap": np.zeros((4, 2), np.int32)}, "overlap: found 2, allowed 4 x 1 int32"),
        ({"trust_factor": np.zeros(2)}, "trust_factor: found 2, allowed 1 x 1 float64"),
    ],
)
def test_columns_of_another_shape_are_refused(changed: dict[str, Any], message: str) -> None:
    moment = view(row())._replace(rates=RateColumns(np.ones(1), np.ones(1), OUTPUT_TOKENS))._replace(**changed)
    refused = next(iter(changed.values()))
    references = sys.getrefcount(refused)
    with pytest.raises(ValueError, match=message):
        decided(moment)
    assert sys.getrefcount(refused) == references


REQUEST = route(100, block_size=10)
PLAIN = CostParameters(prefill_scale=1.0, history_weight=0.0)
"""Every term counts as it is: the figures of the tests are blocks."""


def cost_terms(
    request: RouteRequest, rows: Sequence[Row], parameters: CostParameters, spill_tokens: int = 0
) -> list[CostTerms]:
    """Return the terms of every rank, in their order."""
    verdict = decide(
        view(*rows), request, Policy(mode="kv-blocks", parameters=parameters, spill_tokens=spill_tokens), 1
    )
    return [verdict.terms(at) for at in range(len(rows))]


def terms(parameters: CostParameters = PLAIN, **changed: Any) -> CostTerms:
    """Return the terms of one rank that is alone."""
    return cost_terms(REQUEST, [row(**changed)], parameters)[0]


def test_an_idle_rank_that_holds_nothing_costs_its_prefill_and_its_blocks() -> None:
    assert terms() == CostTerms(prefill_blocks=10.0, decode_blocks=10.0, cost=20.0)


def test_promised_blocks_are_rounded_up_and_prefill_is_not() -> None:
    (found,) = cost_terms(route(95, block_size=10), [row()], PLAIN)
    assert (found.prefill_blocks, found.decode_blocks) == (9.5, 10.0)


def test_every_tier_is_credited_with_what_it_adds_to_the_prefix() -> None:
    # gpu 3, host 2 more, disk 1 more, external 3 more: 1.0 * 3 + 0.75 * 2 + 0.25 * 1 + 0 * 3
    found = terms(overlap_blocks=(3, 5, 6, 9))
    assert found == CostTerms(overlap_credit_blocks=4.75, prefill_blocks=5.25, decode_blocks=10.0, cost=15.25)


def test_prefill_is_never_less_than_none() -> None:
    generous = msgspec.structs.replace(PLAIN, host_weight=3.0)
    found = terms(generous, overlap_blocks=(0, 9, 9, 9))
    assert (found.overlap_credit_blocks, found.prefill_blocks, found.cost) == (27.0, 0.0, 10.0)


def test_a_block_that_the_rank_works_on_already_counts_once() -> None:
    # 25 active, 4 of them are among our 10: the union has 31
    assert terms(active_blocks=25, shared_blocks=4).decode_blocks == 31.0


@pytest.mark.parametrize(
    ("parameters", "changed", "expected"),
    [
        ({"prefill_scale": 2.0}, {}, CostTerms(prefill_blocks=20.0, decode_blocks=10.0, cost=30.0)),
        ({"prefill_scale": 0.0}, {}, CostTerms(prefill_blocks=0.0, decode_blocks=10.0, cost=10.0)),
        ({}, {"active_requests": 9, "history_blocks": 7.0}, CostTerms(prefill_blocks=10, decode_blocks=10, cost=20.0)),
    ],
)
def test_every_weight_of_the_sum_is_heeded(
    parameters: dict[str, float], changed: dict[str, Any], expected: CostTerms
) -> None:
    assert terms(msgspec.structs.replace(PLAIN, **parameters), **changed) == expected


def test_the_defaults_are_those_of_the_design() -> None:
    assert CostParameters() == CostParameters(
        overlap_credit=1.0,
        overlap_credit_decay=0.0,
        host_weight=0.75,
        disk_weight=0.25,
        prefill_scale=4.0,
        request_weight=0.0,
        history_weight=0.0,
    )


def test_the_multiplier_of_the_constraints_multiplies_the_whole_sum_and_is_told() -> None:
    preferred = msgspec.structs.replace(REQUEST, preferred_taints=(("near", 0.5), ("old", -0.5), ("best", 1e9)))
    carried = [(), ("near",), ("near", "old"), ("best",)]
    found = cost_terms(preferred, [row(f"w{at}/0", taints=taints) for at, taints in enumerate(carried)], PLAIN)
    factors = [1.0, math.exp(-math.tanh(0.5)), 1.0, math.exp(-1.0)]
    assert [(each.constraint_multiplier, each.cost) for each in found] == [(each, 20.0 * each) for each in factors]


# ---------------------------------------------------------------- the spill gate


def spilled(*queued: int, spill_tokens: int = 1000, isl_tokens: int = 100) -> list[bool]:
    """Return which ranks have no credit; each holds the whole prompt and has so much queued."""
    rows = [row(f"w{at}/0", overlap_blocks=(9, 9, 9, 9), prefill_tokens_queued=each) for at, each in enumerate(queued)]
    request = route(isl_tokens, block_size=10)
    verdict = decide(view(*rows), request, Policy(mode="kv-blocks", parameters=PLAIN, spill_tokens=spill_tokens), 1)
    told = [verdict.is_spilled(at) for at in range(len(rows))]
    assert [verdict.terms(at).overlap_credit_blocks == 0.0 for at in range(len(rows))] == told
    return told


@pytest.mark.parametrize(
    ("queued", "expected"),
    [
        ((1001, 499), [True, False]),
        ((1000, 499), [False, False]),  # not over its gate
        ((1001, 500), [False, False]),  # no rank is under half of it
        ((1001, 1500, 0), [True, True, False]),
        ((1001, 1000, 0), [True, False, False]),
        ((5000, 5000), [False, False]),
        ((5000,), [False]),  # there is no other rank
    ],
)
def test_a_rank_over_its_gate_has_no_credit_while_another_is_under_half_of_it(
    queued: tuple[int, ...], expected: list[bool]
) -> None:
    assert spilled(*queued) == expected


def test_a_long_prompt_has_a_higher_gate() -> None:
    assert spilled(2001, 0, isl_tokens=500) == [True, False]
    assert spilled(2000, 0, isl_tokens=500) == [False, False]
