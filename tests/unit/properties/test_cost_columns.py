"""Cost terms are the same bits whether they are computed number by number or column by column."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kv_protocol.decided import TERMS, RequestPhase
from router.decision.cost import LISTS_MAX, CostColumns, cost_columns, credit_column, in_arrays
from router.decision.policy import CostParameters, Policy
from router.decision.time_cost import sizes_of, terms_in_numpy, terms_of, time_columns
from router.decision.view import View
from router.fleet.rates import Factor, RateColumns, used, used_in_numpy
from router.journal.records import pack_overlap
from tests.unit.router.samples import Row, rank, route, view

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
    credit = credit_column(moment, request, parameters)
    in_numpy = terms_in_numpy(moment, credit, rates, sizes)
    assert terms_of(moment, credit, rates, sizes).tobytes() == in_numpy.tobytes()
    found = time_columns(moment, request, Policy(cost="ms", parameters=parameters))
    columns = [found.column(name) for name in (*(name for name in TERMS if name.endswith("_ms")), "cost")]
    assert [each.tobytes() for each in columns if each is not None] == [each.tobytes() for each in in_numpy]
    assert found.unit == "ms"


@given(
    st.lists(st.tuples(_learnt, _learnt, _beliefs, _beliefs, _ages), min_size=1, max_size=40),
    st.lists(_learnt, min_size=4, max_size=4),
)
def test_factors_are_the_same_in_cpp_and_numpy(rows: list[tuple[float, ...]], learnt: list[float]) -> None:
    columns, factors = np.array(rows).T, (Factor(), Factor())
    for at, factor in enumerate(factors):
        factor.shared, factor.weighted, factor.weights = learnt[at], learnt[2 + at], 1
    assert used(columns, *factors, 0.0).tobytes() == used_in_numpy(columns, *factors, 0.0).tobytes()


def _bits(columns: CostColumns) -> list[tuple[str, bytes] | None]:
    found = [columns.column(name) for name in TERMS]
    return [None if each is None else (each.dtype.str, each.tobytes()) for each in (*found, columns.spilled)]


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
    assert _packed(moment) == _packed_wide(moment)


def _packed(moment: View) -> bytes:
    return pack_overlap(moment.overlap)


def _packed_wide(moment: View) -> bytes:
    """Return the overlap packed with so many ranks without overlap behind it that it is packed by columns."""
    count = moment.overlap.shape[1]
    padded = np.zeros((4, LISTS_MAX + 8), dtype=np.int32)
    padded[:, :count] = moment.overlap
    return _narrowed(pack_overlap(padded), count)


def _narrowed(data: bytes, count: int) -> bytes:
    """Return the packed overlap of the first `count` ranks alone."""
    if not data:
        return data
    size, number_bytes, at = (LISTS_MAX + 8 + 7) // 8, 4 if data[0] & 0x80 else 2, 1
    parts = [data[:1]]
    for tier in range(4):
        if data[0] >> tier & 1:
            holders = int.from_bytes(data[at : at + size], "little")
            numbers = number_bytes * holders.bit_count()
            parts += [holders.to_bytes((count + 7) // 8, "little"), data[at + size : at + size + numbers]]
            at += size + numbers
    return b"".join(parts)
