"""What is compared of a live run: figures of one policy, their ratios, and the order of the policies.

    hit rate             within 2 points of the recording
    all other figures    within 25 %
    order                two policies whose requests/s differ by more than 3 % in the recording have the same order

Two runs of one policy on the GPU differ by 0.7 to 1.3 % in requests/s; 3 % is beyond that.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple, Self

from bench.fidelity.live_recording import LiveRun
from bench.report import percentile
from bench.routing.virtual_fleet import RequestFigures

HIT_BOUND = 0.02
RATIO_BOUND = 0.25
APART = 1.03


class LiveFigures(NamedTuple):
    """Requests a second, a ratio of prompt tokens, and seconds."""

    requests_per_s: float
    hit_ratio: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    e2e_p50_s: float
    e2e_p99_s: float

    @classmethod
    def of(cls, answered: Sequence[RequestFigures]) -> Self:
        """Return the figures of a run that had requests."""
        return cls(
            len(answered) / max(each.arrival_s + each.e2e_s for each in answered),
            sum(each.cached_tokens for each in answered) / sum(each.isl_tokens for each in answered),
            *(percentile([each.ttft_s for each in answered], quantile) for quantile in (0.5, 0.9, 0.99)),
            *(percentile([each.e2e_s for each in answered], quantile) for quantile in (0.5, 0.99)),
        )

    @classmethod
    def recorded(cls, run: LiveRun) -> Self:
        """Return the figures of a recorded run."""
        ttfts_s = (run.ttft_ms[quantile] / 1e3 for quantile in ("50", "90", "99"))
        return cls(run.req_s, run.hit, *ttfts_s, *(run.e2e_ms[quantile] / 1e3 for quantile in ("50", "99")))

    @classmethod
    def mean(cls, runs: Sequence[Self]) -> Self:
        """Return the mean of each figure over one or more runs."""
        return cls(*(sum(values) / len(runs) for values in zip(*runs, strict=True)))


HIT = LiveFigures._fields.index("hit_ratio")


def is_within(name: str, real: float, simulated: float) -> bool:
    """Return whether a figure is within its bound."""
    if name == "hit_ratio":
        return abs(simulated - real) <= HIT_BOUND
    return abs(simulated / real - 1) <= RATIO_BOUND


def within(real: LiveFigures, simulated: LiveFigures) -> list[bool]:
    """Return for each figure whether it is within its bound."""
    return [is_within(*each) for each in zip(LiveFigures._fields, real, simulated, strict=True)]


class Order(NamedTuple):
    """The policies by requests/s, best first, and of the pairs that are apart in the recording, those that agree."""

    real: tuple[str, ...]
    simulated: tuple[str, ...]
    agreeing: int
    apart: int


def order(real: Mapping[str, LiveFigures], simulated: Mapping[str, LiveFigures]) -> Order:
    """Compare the order of the policies; both have the same."""
    pairs = [pair for pair in combinations(real, 2) if _apart(*(real[each].requests_per_s for each in pair))]
    agreeing = sum(
        (real[one].requests_per_s > real[other].requests_per_s)
        == (simulated[one].requests_per_s > simulated[other].requests_per_s)
        for one, other in pairs
    )
    return Order(_ranked(real), _ranked(simulated), agreeing, len(pairs))


def _apart(one: float, other: float) -> bool:
    return max(one, other) > APART * min(one, other)


def _ranked(figures: Mapping[str, LiveFigures]) -> tuple[str, ...]:
    return tuple(sorted(figures, key=lambda name: -figures[name].requests_per_s))
