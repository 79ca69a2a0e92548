"""Cost terms, and what a record has of them, are the same bits in C++, in numpy, and number by number."""

from array import array
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_protocol.decided import TERMS, RequestPhase
from router import native
from router.decision.cost import LISTS_MAX, CostColumns, cost_columns, in_arrays
from router.decision.policy import CostParameters, Policy
from router.decision.time_cost import sizes_of, terms_in_numpy, terms_of, time_columns
from router.fleet.rank_table import RankTable
from router.fleet.rates import Factor, RateColumns, RateSpread, used, used_in_numpy
from router.journal.records import costs_in_python, overlap_in_numpy
from tests.unit.router.samples import Row, rank, route, view

CALM = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""Under the sanitizers, drawing rows takes long."""
_weights = st.sampled_from((0.0, 1.0, 0.1, 0.75, 1.3, 1e-3))
_tokens = st.one_of(st.integers(0, 200), st.integers(0, (1 << 40) - 1))
_parameters = st.builds(
    CostParameters,
    overlap_credit=_weights,
    overlap_credit_decay=_weights,
    host_weight=_weights,
    disk_weight=_weights,
    prefill_scale=_weights,
    decode_scale=_weights,
    request_weight=_weights,
    history_weight=_weights,
)


@st.composite
def _rows(draw: st.DrawFn) -> Row:
    steps = draw(st.lists(st.integers(0, 300) | st.just(0), min_size=4, max_size=4))
    tiers = np.cumsum(steps).tolist()
    return Row(
        rank(f"w{draw(st.integers(0, 999))}/0"),
        trust=draw(st.sampled_from(("EXACT", "EXACT", "DEGRADED", "FALLBACK"))),
        overlap_blocks=(tiers[0], tiers[1], tiers[2], tiers[3]),
        predicted_blocks=draw(st.integers(0, 500)),
        prefill_tokens_queued=draw(_tokens),
        active_requests=draw(st.integers(0, 1000)),
        active_blocks=draw(st.integers(0, 1 << 40)),
        shared_blocks=draw(st.integers(0, 500)),
        history_blocks=draw(st.floats(0.0, 1e9)),
    )


_factors = st.sampled_from((1.0, 0.25, 3.7, 1e-3))
_learnt = st.floats(1 / 64, 64.0)
_beliefs = st.floats(0.0, 1.0)
_ages = st.sampled_from((-np.inf, -1e300, 1e300)) | st.floats(-5000.0, 5.0)


@CALM
@given(
    st.lists(_rows(), min_size=1, max_size=2 * LISTS_MAX),
    st.integers(1, 100_000),
    st.integers(1, 64),
    _parameters,
    st.sampled_from(("whole", "prefill", "decode", "alone")),
    st.data(),
)
def test_terms_in_ms_are_the_same_in_cpp_and_numpy(
    rows: list[Row],
    tokens: int,
    block_size: int,
    parameters: CostParameters,
    phase: RequestPhase,
    data: st.DataObject,
) -> None:
    drawn = [np.array(data.draw(st.lists(_factors, min_size=len(rows), max_size=len(rows)))) for _ in range(2)]
    rates = RateColumns(drawn[0], drawn[1], data.draw(st.floats(1.0, 1e6)))
    moment = view(*rows)._replace(rates=rates)
    request = route(tokens, block_size=block_size, phase=phase, max_tokens=data.draw(st.integers(0, 2000)))
    sizes = sizes_of(request, parameters, rates)
    in_numpy = terms_in_numpy(moment, request, parameters, sizes)
    assert terms_of(moment, request, parameters, sizes).tobytes() == in_numpy.tobytes()
    found = time_columns(moment, request, Policy.current(parameters=parameters))
    names = *(name for name in TERMS if name.endswith("_ms")), "cost", "overlap_credit_blocks"
    columns = [found.column(name) for name in names]
    assert [each.tobytes() for each in columns if each is not None] == [each.tobytes() for each in in_numpy]
    assert found.unit == "ms"
    for winner in {0, len(rows) - 1, len(rows) // 2}:
        _check_packed(found, winner, range(len(rows)))
        _check_packed(found, winner, [3 * at + 1 for at in range(len(rows))])


def _check_packed(costs: CostColumns, winner: int, rank_indices: Sequence[int]) -> None:
    in_cpp = required().packed_costs(costs.timed, winner, rank_indices)
    assert in_cpp == costs_in_python(costs, winner, rank_indices)


def required() -> Any:
    built = native.load()
    if built is None:
        pytest.skip("the extension was not built")
    return built


@given(st.lists(st.sampled_from((0.0, 1.0, 2.5, 1e30, np.inf)), min_size=1, max_size=40), st.data())
def test_equal_infinite_and_zero_costs_are_packed_alike(drawn: list[float], data: st.DataObject) -> None:
    terms = np.zeros((8, len(drawn)))
    terms[6] = drawn
    *addends, cost, credit = terms.tolist()
    costs = CostColumns((credit, None, None, None, None, None, cost, *addends), timed=terms)
    _check_packed(costs, data.draw(st.integers(0, len(drawn) - 1)), range(len(drawn)))


def test_where_a_cost_is_not_a_number_python_packs() -> None:
    terms = np.zeros((8, 2))
    terms[6, 1] = np.nan
    assert required().packed_costs(terms, 0, range(2)) is None


@pytest.mark.parametrize(("winner", "columns"), [(2, 2), (0, 3)])
def test_a_winner_or_columns_of_other_candidates_are_refused(winner: int, columns: int) -> None:
    with pytest.raises(ValueError, match="allowed one of 2 candidates with a column each"):
        required().packed_costs(np.zeros((8, 2)), winner, range(columns))


@CALM
@given(st.lists(_rows(), min_size=1, max_size=40), st.sampled_from((0, 1, 300)))
def test_overlap_is_packed_alike_in_cpp_and_numpy(rows: list[Row], times: int) -> None:
    overlap = view(*rows).overlap * np.int32(times)
    assert required().packed_overlap(overlap) == overlap_in_numpy(overlap)
    assert required().packed_overlap(overlap[:, ::2]) == overlap_in_numpy(overlap[:, ::2])


@given(st.lists(st.floats(0.0, 1e9), min_size=1, max_size=100), st.floats(0.0, 1.0))
def test_sums_decay_alike_in_cpp_and_numpy(sums: list[float], factor: float) -> None:
    table, ranks = RankTable("d", (0.0,)), tuple(rank(f"w{number}/0") for number in range(len(sums)))
    for each, number in zip(ranks, sums, strict=True):
        table.put(table.row(each), number)
    asked = (*ranks[::-1], rank("unknown/0"))
    assert required().scaled(*table.rows_of(asked), factor) == (table.columns(asked)[0] * factor).tobytes()


def test_rows_outside_of_a_table_are_refused() -> None:
    items = array("d", bytes(80))
    for capacity, row, message in (
        (11, 0, "items: found 10, allowed 11 numbers or more"),
        (10, 10, "row: found 10, allowed one of 10"),
        (10, -1, "row: found -1, allowed one of 10"),
    ):
        with pytest.raises(ValueError, match=message):
            required().scaled(items, capacity, array("q", [row]).tobytes(), 1.0)


@given(
    st.lists(st.tuples(_learnt, _learnt, _beliefs, _beliefs, _ages), min_size=1, max_size=40),
    st.lists(_learnt, min_size=4, max_size=4),
    st.sampled_from(get_args(RateSpread)),
)
def test_factors_are_the_same_in_cpp_and_numpy(
    rows: list[tuple[float, ...]], learnt: list[float], spread: RateSpread
) -> None:
    table, ranks = RankTable("d", (1.0,) * 5), tuple(rank(f"w{number}/0") for number in range(len(rows)))
    for each, numbers in zip(ranks, rows, strict=True):
        table.put(table.row(each), *numbers)
    columns, factors = table.columns(ranks), (Factor(), Factor())
    for at, factor in enumerate(factors):
        factor.shared, factor.weighted, factor.weights = learnt[at], learnt[2 + at], 1
    found = used(table, ranks, *factors, 0.0, spread)
    assert found.tobytes() == used_in_numpy(columns, *factors, 0.0, spread).tobytes()


def _bits(columns: CostColumns) -> list[tuple[str, bytes] | None]:
    found = [columns.column(name) for name in TERMS]
    return [None if each is None else (each.dtype.str, each.tobytes()) for each in (*found, columns.spilled)]


@CALM
@given(
    st.lists(_rows(), min_size=1, max_size=LISTS_MAX),
    st.integers(1, 100_000),
    st.integers(1, 64),
    _parameters,
    st.sampled_from((0, 1, 100, 16384)),
    st.none() | st.floats(0.1, 2.7),
)
def test_lists_and_arrays_give_the_same_terms(
    rows: list[Row],
    tokens: int,
    block_size: int,
    parameters: CostParameters,
    spill_tokens: int,
    multiplier: float | None,
) -> None:
    moment, request = view(*rows), route(tokens, block_size=block_size)
    policy = Policy(parameters=parameters, spill_tokens=spill_tokens)
    factors = None if multiplier is None else np.linspace(1.0, multiplier, len(rows))
    listed = cost_columns(moment, request, policy, factors)
    assert _bits(listed) == _bits(in_arrays(moment, request, policy, factors))
