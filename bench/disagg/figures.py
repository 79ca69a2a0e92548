"""Figures of one run of a layout, and the comparison of layouts.

ITL                  of a request: (E2E - TTFT) / (output tokens - 1)
goodput              requests a second and GPU whose TTFT and ITL both met an SLO
tokens/s/GPU         answered output tokens a second and GPU
tokens/s/user        1 / ITL p50
hit rate             cached prompt tokens / prompt tokens, where the prompt was computed
local                share of answers whose prompt was computed by the worker that decoded, of a layout that could split
handover             from the prefill worker's answer to the client's first token: way, queue, transfer, one iteration
transfer             the mean from the request for KV to its arrival: slots in both buffers, and the network

Seconds are from the first arrival to the last end. Figures of tokens and times are of answered requests only; a
failed one meets no SLO.
"""

from collections.abc import Iterator, Sequence
from operator import gt, lt
from typing import NamedTuple

from bench.disagg.fleet import DisaggRun
from bench.report import percentile
from bench.routing.figures import Slo

QUANTILES = (0.50, 0.90)
SLOS = (Slo(2.0, 0.050), Slo(2.0, 0.020))
"""One near the reading speed of most users, and one faster than any user needs."""
DRAW_RATIO = 0.01
"""Figures that differ by less are equal."""


class DisaggFigures(NamedTuple):
    """One run. Times in seconds, at `QUANTILES`; rates as shares; goodput and share by SLO."""

    requests: int
    failed: int
    retries: int
    ttft_s: tuple[float, ...]
    itl_s: tuple[float, ...]
    goodput_rps_gpu: tuple[float, ...]
    slo_rate: tuple[float, ...]
    tokens_s_gpu: float
    tokens_s_user: float
    hit_rate: float
    local_rate: float
    handover_s: tuple[float, ...]
    transfer_s: float
    transfers_failed: int


def figures(run: DisaggRun, *, gpus: int, slos: Sequence[Slo]) -> DisaggFigures:
    """Return the figures of a run that had requests."""
    outcomes = [each.outcome for each in run.answers]
    within_slo = [sum(each.ttft_s <= slo.ttft_s and each.itl_s <= slo.itl_s for each in outcomes) for slo in slos]
    requests, prompt_tokens = len(outcomes) + run.failed, sum(each.isl_tokens for each in outcomes)
    itl_s = _quantiles([each.itl_s for each in outcomes if each.osl_tokens > 1])
    done = sum(each.fetches_total["done"] for each in run.transfers)
    return DisaggFigures(
        requests=requests,
        failed=run.failed,
        retries=sum(each.retries for each in run.answers),
        ttft_s=_quantiles([each.ttft_s for each in outcomes]),
        itl_s=itl_s,
        goodput_rps_gpu=tuple(each / run.span_s / gpus for each in within_slo),
        slo_rate=tuple(each / requests for each in within_slo),
        tokens_s_gpu=sum(each.osl_tokens for each in outcomes) / run.span_s / gpus,
        tokens_s_user=1 / itl_s[0] if itl_s[0] else 0.0,
        hit_rate=sum(each.cached_tokens for each in outcomes) / prompt_tokens if prompt_tokens else 0.0,
        local_rate=sum(each.phase == "alone" for each in run.answers) / max(1, len(outcomes)),
        handover_s=_quantiles([each.handover_s for each in run.answers if each.handover_s is not None]),
        transfer_s=sum(each.fetch_seconds_total for each in run.transfers) / max(1, done),
        transfers_failed=sum(sum(each.fetches_total.values()) for each in run.transfers) - done,
    )


def _quantiles(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(percentile(values, quantile) for quantile in QUANTILES)


class LayoutComparison(NamedTuple):
    """At one rate, by one figure: the aggregated layout against the best of the others."""

    rate: float
    figure: str
    aggregated: float
    best: str
    value: float
    winner: str
    """The name of the layout that is better; empty: neither is by more than `DRAW_RATIO`."""


def comparisons(
    rate: float, aggregated: tuple[str, DisaggFigures], others: Sequence[tuple[str, DisaggFigures]], slos: Sequence[Slo]
) -> Iterator[LayoutComparison]:
    """Yield how the aggregated layout compares with the best of the others by each figure; in these nothing failed."""
    name, mine = aggregated
    for figure, own, is_better, column in (
        ("TTFT p50, ms", mine.ttft_s[0] * 1e3, lt, [each.ttft_s[0] * 1e3 for _, each in others]),
        ("TTFT p90, ms", mine.ttft_s[1] * 1e3, lt, [each.ttft_s[1] * 1e3 for _, each in others]),
        ("ITL p50, ms", mine.itl_s[0] * 1e3, lt, [each.itl_s[0] * 1e3 for _, each in others]),
        ("ITL p90, ms", mine.itl_s[1] * 1e3, lt, [each.itl_s[1] * 1e3 for _, each in others]),
        ("tokens/s/GPU", mine.tokens_s_gpu, gt, [each.tokens_s_gpu for _, each in others]),
        *(
            (f"goodput {slo_name(slo)}", mine.goodput_rps_gpu[at], gt, [each.goodput_rps_gpu[at] for _, each in others])
            for at, slo in enumerate(slos)
        ),
    ):
        best_index = column.index((min if is_better is lt else max)(column))
        best, value = others[best_index][0], column[best_index]
        is_draw = abs(own - value) <= DRAW_RATIO * max(abs(own), abs(value))
        yield LayoutComparison(
            rate, figure, own, best, value, "" if is_draw else name if is_better(own, value) else best
        )


def slo_name(slo: Slo) -> str:
    """Return how an SLO is called in a table: the most ms of TTFT / of ITL."""
    return f"{slo.ttft_s * 1e3:g}/{slo.itl_s * 1e3:g}"
