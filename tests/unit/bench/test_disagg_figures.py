"""Figures of runs that are written down, which layout is better, what is drawn, and the words for layouts."""

import msgspec
import pytest

from bench.disagg.figures import DisaggFigures, comparisons, figures
from bench.disagg.fleet import DisaggRun
from bench.disagg.journey import JourneyAnswer
from bench.routing.figures import Slo
from bench.routing.virtual_fleet import RequestFigures
from worker_agent.engines.simulated.transfer import TransferCounts, TransferRules

SLOS = (Slo(1.0, 0.050), Slo(1.0, 0.010))
NO_TRANSFERS = TransferCounts().statistics(TransferRules(), 0, 0, 0)
TRANSFERS = msgspec.structs.replace(
    NO_TRANSFERS, fetches_total={"done": 4, "stalled": 1, "timeout": 2, "gone": 0, "lost": 0}, fetch_seconds_total=2.0
)


def outcome(ttft_s: float, itl_s: float, cached_tokens: int = 0) -> RequestFigures:
    """Return what became of a request for 100 tokens that was answered with 11."""
    return RequestFigures(0.0, 0, 100, 11, cached_tokens, 0, ttft_s, ttft_s + 10 * itl_s)


RUN = DisaggRun(
    [
        JourneyAnswer(outcome(0.5, 0.005, 60), "decode", 0.25, 0),
        JourneyAnswer(outcome(0.6, 0.020), "decode", 0.5, 2),
        JourneyAnswer(outcome(2.0, 0.005, 30), "alone", None, 0),
    ],
    failed=1,
    span_s=10.0,
    transfers=[NO_TRANSFERS, TRANSFERS],
)


def test_figures_of_a_run() -> None:
    found = figures(RUN, gpus=2, slos=SLOS)
    assert (found.requests, found.failed, found.retries, found.transfers_failed) == (4, 1, 2, 3)
    assert found.ttft_s == (0.6, 2.0)
    assert found.itl_s == pytest.approx((0.005, 0.020))
    assert found.slo_rate == (0.5, 0.25)
    assert found.goodput_rps_gpu == pytest.approx((0.1, 0.05))
    assert found.tokens_s_gpu == pytest.approx(33 / 10 / 2)
    assert found.tokens_s_user == pytest.approx(200.0)
    assert found.hit_rate == pytest.approx(0.3)
    assert found.local_rate == pytest.approx(1 / 3)
    assert found.handover_s == (0.5, 0.5)
    assert found.transfer_s == 0.5


def test_a_run_in_which_all_requests_failed_has_figures() -> None:
    found = figures(RUN._replace(answers=[], failed=3), gpus=2, slos=SLOS)
    assert (found.requests, found.failed, found.tokens_s_gpu, found.tokens_s_user, found.hit_rate) == (3, 3, 0, 0, 0)
    assert found.slo_rate == (0.0, 0.0)


def test_the_aggregated_layout_is_held_against_the_best_of_the_others_by_each_figure() -> None:
    mine = figures(RUN, gpus=2, slos=SLOS)
    faster = mine._replace(ttft_s=(0.3, 2.0), tokens_s_gpu=mine.tokens_s_gpu * 0.995, goodput_rps_gpu=(0.05, 0.05))
    worse: DisaggFigures = mine._replace(ttft_s=(0.9, 3.0), tokens_s_gpu=0.1, goodput_rps_gpu=(0.01, 0.06))
    found = {each.figure: each for each in comparisons(2.0, ("2a", mine), [("p", worse), ("q", faster)], SLOS)}
    assert {name: (each.best, each.winner) for name, each in found.items()} == {
        "TTFT p50, ms": ("q", "q"),
        "TTFT p90, ms": ("q", ""),
        "ITL p50, ms": ("p", ""),
        "ITL p90, ms": ("p", ""),
        "tokens/s/GPU": ("q", ""),
        "goodput 1000/50": ("q", "2a"),
        "goodput 1000/10": ("p", "p"),
    }
    assert found["TTFT p50, ms"].value == pytest.approx(300.0)
