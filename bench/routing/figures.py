"""Figures of one run of a trace.

hit rate      cached prompt tokens / prompt tokens
imbalance     most uncached tokens of a worker / their mean over all workers, in windows of 10 s by time of arrival;
              the mean over the windows in which there were any
goodput       requests a second, from first arrival to last end, whose TTFT and mean ITL both met the SLO
"""

from collections.abc import Sequence
from typing import NamedTuple

from bench.report import imbalance, percentile
from bench.routing.virtual_fleet import RequestFigures

QUANTILES = (0.50, 0.90, 0.99)


class Slo(NamedTuple):
    """What a user is promised: seconds to the first token, and mean seconds between the others."""

    ttft_s: float = 2.0
    itl_s: float = 0.050


class RoutingFigures(NamedTuple):
    """One run. Times in seconds at `QUANTILES`; rates as shares; `predicted_rate` is what the router counted on."""

    requests: int
    hit_rate: float
    predicted_rate: float
    ttft_s: tuple[float, ...]
    e2e_s: tuple[float, ...]
    imbalance: float
    goodput_rps: float
    slo_rate: float


def figures(outcomes: Sequence[RequestFigures], *, workers: int, slo: Slo) -> RoutingFigures:
    """Return the figures of a run that had requests."""
    prompt_tokens = sum(each.isl_tokens for each in outcomes)
    within_slo = sum(each.ttft_s <= slo.ttft_s and each.itl_s <= slo.itl_s for each in outcomes)
    span_s = max(each.arrival_s + each.e2e_s for each in outcomes) - min(each.arrival_s for each in outcomes)
    return RoutingFigures(
        requests=len(outcomes),
        hit_rate=sum(each.cached_tokens for each in outcomes) / prompt_tokens,
        predicted_rate=sum(each.predicted_tokens for each in outcomes) / prompt_tokens,
        ttft_s=_quantiles([each.ttft_s for each in outcomes]),
        e2e_s=_quantiles([each.e2e_s for each in outcomes]),
        imbalance=imbalance(
            [(each.arrival_s, each.worker, each.isl_tokens - each.cached_tokens) for each in outcomes], workers=workers
        ),
        goodput_rps=within_slo / span_s,
        slo_rate=within_slo / len(outcomes),
    )


def _quantiles(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(percentile(values, quantile) for quantile in QUANTILES)
