"""Figures of one run. Pure.

ITL                  of a request: (E2E - TTFT) / (output tokens - 1)
tokens/s/worker      answered output tokens a second, by the workers or GPUs that served
tokens/s/user        1 / ITL p50
hit rate             cached prompt tokens / prompt tokens, as the endpoint reports them in `usage`

Seconds are from the first request's sending to the last answer's end. Figures of tokens and times are of answered
requests only. A percentile is the value at place `int(q * n)` of the sorted n.
"""

from collections import Counter
from collections.abc import Sequence

import msgspec

from bench.report import percentile
from bench.streaming_client import Measured

QUANTILES = (0.50, 0.90, 0.99)
_REASONS_MAX = 3


class RunFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Times in seconds, at `QUANTILES`; the hit rate is a share."""

    requests: int
    failed: int
    reasons: tuple[str, ...] = ()
    """The most frequent errors, with how often they came."""
    span_s: float
    requests_s: float
    output_tokens_s: float
    tokens_s_worker: float
    tokens_s_user: float
    ttft_s: tuple[float, ...]
    itl_s: tuple[float, ...]
    e2e_s: tuple[float, ...]
    hit_rate: float
    isl_tokens: float
    """Mean, as the endpoint counted."""
    osl_tokens: float
    lag_p99_s: float | None = None
    """Event-loop lag of the router or worker that had the most; above 10 ms, latencies are those of a busy machine."""


def figures(measured: Sequence[Measured], *, workers: int, lag_p99_s: float | None = None) -> RunFigures:
    """Return the figures of a run that had requests."""
    answered = [each for each in measured if not each.error]
    span_s = max(each.sent_s + each.duration_s for each in measured) - min(each.sent_s for each in measured)
    prompt_tokens = sum(each.prompt_tokens for each in answered)
    output_tokens_s = sum(each.output_tokens for each in answered) / span_s
    itl_s = _quantiles([_itl_s(each) for each in answered if each.output_tokens > 1])
    reasons = Counter(each.error for each in measured if each.error).most_common(_REASONS_MAX)
    return RunFigures(
        requests=len(measured),
        failed=len(measured) - len(answered),
        reasons=tuple(f"{count} x {reason}" for reason, count in reasons),
        span_s=span_s,
        requests_s=len(answered) / span_s,
        output_tokens_s=output_tokens_s,
        tokens_s_worker=output_tokens_s / workers,
        tokens_s_user=1 / itl_s[0] if itl_s[0] else 0.0,
        ttft_s=_quantiles([each.ttft_s for each in answered]),
        itl_s=itl_s,
        e2e_s=_quantiles([each.duration_s for each in answered]),
        hit_rate=sum(each.cached_tokens for each in answered) / prompt_tokens if prompt_tokens else 0.0,
        isl_tokens=prompt_tokens / max(1, len(answered)),
        osl_tokens=sum(each.output_tokens for each in answered) / max(1, len(answered)),
        lag_p99_s=lag_p99_s,
    )


def _itl_s(each: Measured) -> float:
    return (each.duration_s - each.ttft_s) / (each.output_tokens - 1)


def _quantiles(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(percentile(values, quantile) for quantile in QUANTILES)
