"""What is made of outcomes: figures, and verdicts on them."""

from typing import Any

import pytest

from bench.report import imbalance
from bench.routing.figures import RoutingFigures, Slo, figures
from bench.routing.grid import GridResult, GridShape, RoutingCell, cells, check_fits, control_cells, lag_cells
from bench.routing.trace import TraceInvalid
from bench.routing.verdicts import RoutingVerdict, verdicts
from bench.routing.virtual_fleet import RequestFigures
from tests.unit.bench.traces import request


def outcome(**changed: Any) -> RequestFigures:
    fields: dict[str, Any] = {
        "arrival_s": 0.0,
        "worker": 0,
        "isl_tokens": 1000,
        "osl_tokens": 11,
        "cached_tokens": 0,
        "predicted_tokens": 0,
        "ttft_s": 1.0,
        "e2e_s": 1.3,
    }
    return RequestFigures(**fields | changed)


def test_rates_are_shares_of_all_prompt_tokens() -> None:
    found = figures(
        [outcome(cached_tokens=512, predicted_tokens=256), outcome(isl_tokens=3000)], workers=1, slo=Slo(ttft_s=9.0)
    )
    assert (found.requests, found.hit_rate, found.predicted_rate) == (2, 512 / 4000, 256 / 4000)


def test_quantiles_are_nearest_ranks() -> None:
    found = figures([outcome(ttft_s=each / 100, e2e_s=each) for each in range(100)], workers=1, slo=Slo())
    assert (found.ttft_s, found.e2e_s) == ((0.5, 0.9, 0.99), (50, 90, 99))


@pytest.mark.parametrize(
    ("changed", "is_good"),
    [
        ({}, True),
        ({"ttft_s": 2.0, "e2e_s": 2.5}, True),
        ({"ttft_s": 2.01, "e2e_s": 2.5}, False),
        ({"e2e_s": 1.501}, False),
        ({"osl_tokens": 1, "e2e_s": 1.0}, True),
    ],
)
def test_goodput_counts_requests_that_met_both_targets(changed: dict[str, Any], is_good: bool) -> None:
    each = outcome(arrival_s=3.0, **changed)
    found = figures([each], workers=1, slo=Slo(ttft_s=2.0, itl_s=0.05))
    assert found.slo_rate == float(is_good)
    assert found.goodput_rps == pytest.approx(is_good / each.e2e_s)


def test_goodput_is_over_the_time_from_first_arrival_to_last_end() -> None:
    found = figures([outcome(arrival_s=5.0), outcome(arrival_s=8.7)], workers=1, slo=Slo())
    assert found.goodput_rps == pytest.approx(2 / 5.0)


def test_imbalance_counts_workers_that_got_nothing() -> None:
    assert imbalance([(0.0, 0, 1000), (0.0, 1, 1000)], workers=4) == 2.0


def test_imbalance_is_of_uncached_tokens_and_the_mean_of_its_windows() -> None:
    even, uneven = [(0.0, "a", 1000), (0.0, "b", 1000)], [(10.0, "a", 1000), (19.9, "a", 1000)]
    assert imbalance([*even, *uneven], workers=2) == (1.0 + 2.0) / 2
    assert imbalance([(0.0, "a", 0)], workers=2) == 1.0


SHAPE = GridShape(workers=(2, 4), rates=(1.0, 2.0), lags_s=(0.005, 0.0))


def test_the_grid_is_every_combination_and_the_middle_cell_again_by_lag_and_without_sharing() -> None:
    assert len(cells(SHAPE)) == 2 * 2 * 2 + 1 + 2
    assert lag_cells(SHAPE) == [RoutingCell(4, 2.0, "kv", 0.0, 1.0), RoutingCell(4, 2.0, "kv", 0.005, 1.0)]
    assert [each.mode for each in control_cells(SHAPE)] == ["kv", "round-robin"]
    assert len(cells(SHAPE._replace(lags_s=(0.005,), control=False))) == 8


def made(
    shape: GridShape, kv: dict[str, Any], *, bound: float = 0.5, kv_in_first_cell: Any = None
) -> list[RoutingVerdict]:
    """Return the verdicts on a grid in which round robin has 1 s and no hits in every cell."""
    plain = RoutingFigures(9, 0.0, 0.0, (1.0, 1.0, 1.0), (1.0, 1.0, 1.0), 1.0, 1.0, 1.0)
    found = {cell: plain._replace(**kv) if cell.mode == "kv" and cell.shared else plain for cell in cells(shape)}
    first = RoutingCell(shape.workers[0], shape.rates[0], "kv", shape.lags_s[0], 1.0)
    found[first] = found[first]._replace(**kv_in_first_cell or {})
    return list(verdicts(GridResult(shape, found, dict.fromkeys(shape.workers, bound))))


def test_where_kv_wins_everywhere_every_target_is_reached() -> None:
    judged = made(GridShape(), {"hit_rate": 0.45, "ttft_s": (1.0, 9.0, 1.0)})
    assert [(each.reached, each.of, each.needed, each.holds) for each in judged] == [
        (9, 9, 9, True),
        (9, 9, 8, True),
        (9, 9, 8, True),
        (2, 2, 2, True),
    ]


def test_one_lost_cell_is_printed_and_forgiven_in_latency_but_not_in_hit_rate() -> None:
    lost = {"hit_rate": 0.44, "ttft_s": (1.001, 1.0, 2.0)}
    hits, p50, p99, _ = made(GridShape(), {"hit_rate": 0.45}, kv_in_first_cell=lost)
    assert (hits.holds, hits.losing) == (False, ("4 workers x 0.5: 0.88",))
    assert (p50.holds, p50.losing) == (True, ("4 workers x 0.5: 1001 ms against 1000",))
    assert (p99.holds, p99.losing) == (True, ("4 workers x 0.5: 2000 ms against 1000",))


def test_a_hit_in_the_control_is_a_fault() -> None:
    shape = GridShape(modes=("kv",))
    found = dict.fromkeys(cells(shape), RoutingFigures(9, 0.1, 0.1, (1.0,) * 3, (1.0,) * 3, 1.0, 1.0, 1.0))
    *_, control = verdicts(GridResult(shape, found, dict.fromkeys(shape.workers, 0.1)))
    assert (control.holds, control.losing) == (False, ("10.00%",))


def test_a_request_beyond_a_workers_cache_is_named() -> None:
    shape = GridShape(kv_tokens=1024)
    check_fits([request(0.0, 1, 2, short_by=4)], shape)
    message = "request 2: length: found '1021 + 4 tokens = 3 blocks of 512', allowed a worker's 2 blocks at most"
    with pytest.raises(TraceInvalid) as refused:
        check_fits([request(0.0, 1), request(0.0, 1, 2, short_by=3)], shape)
    assert str(refused.value) == message
