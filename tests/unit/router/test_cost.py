"""Every line of the formula against numbers worked out by hand: B = 10, ISL = 100, so N = 10."""

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from kv_protocol.decided import RouteRequest
from kv_protocol.decision import CostTerms
from router.decision.policy import CostParameters, Policy
from tests.support.decide import decide
from tests.unit.router.samples import Row, route, row, view

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


@pytest.mark.parametrize(
    ("predicted", "credit"),
    [
        (0, 3 + 0.75 * 2 + 0.25 * 1),
        (2, 3 + 0.75 * 2 + 0.25 * 1),  # it has more already
        (4, 4 + 0.75 * 1 + 0.25 * 1),  # one that lay on the host is on its way to the GPU
        (6, 6.0),
        (8, 8.0),
    ],
)
def test_what_is_on_its_way_counts_as_on_the_gpu(predicted: int, credit: float) -> None:
    assert terms(overlap_blocks=(3, 5, 6, 9), predicted_blocks=predicted).overlap_credit_blocks == credit


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
        (
            {"request_weight": 1.5},
            {"active_requests": 4},
            CostTerms(prefill_blocks=10.0, decode_blocks=10.0, request_blocks=6.0, cost=26.0),
        ),
        (
            {"history_weight": 0.5},
            {"history_blocks": 7.0},
            CostTerms(prefill_blocks=10.0, decode_blocks=10.0, history_blocks=3.5, cost=23.5),
        ),
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
