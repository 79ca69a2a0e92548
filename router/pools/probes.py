"""Observations of pools, the limits by which they are judged, and their status."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec

Fitness = Literal["fit", "strained", "down"]
FITNESSES: tuple[Fitness, ...] = ("fit", "strained", "down")
Cause = Literal["unhealthy", "queue", "ttft", "itl"]
CAUSES: tuple[Cause, ...] = ("unhealthy", "queue", "ttft", "itl")
Target = Literal["ttft", "itl"]
TARGETS: tuple[Target, ...] = ("ttft", "itl")


class LiveLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits that decide when a pool stops being fit, and when it is fit again. A bound that is None is not checked."""

    failures_max: int = 2
    successes_min: int = 2
    queue_requests_max: int | None = 64
    queue_release_ratio: float = 0.5
    ttft_bound_ms: float | None = None
    itl_bound_ms: float | None = None
    attainment_min_ratio: float = 0.9
    attainment_release_ratio: float = 0.95
    window_requests_min: int = 20
    hold_s: float = 30.0

    def bound_ms(self, target: Target) -> float | None:
        """Return the target's bound in milliseconds: for an answer's beginning, or for the time between its tokens."""
        return self.ttft_bound_ms if target == "ttft" else self.itl_bound_ms


class Attained(NamedTuple):
    """Answers of a router since its start: those within the bound, and all."""

    within: float = 0.0
    total: float = 0.0


def attained(buckets: Mapping[float, float], bound_s: float) -> Attained:
    """Return the answers within `bound_s`; `buckets`: cumulative counts by upper edge in seconds, inf among them.

    It is the cumulative count at the last edge <= the bound, and a linear part of the bucket that the bound lies in.
    Answers above the last finite edge are not in time, whatever the bound. The result grows with the counts, so that
    the difference of two results is that of the answers between them.
    """
    edges = sorted(buckets)
    if not edges:
        return Attained()
    total, edge, count = buckets[edges[-1]], 0.0, 0.0
    for upper in edges:
        if upper > bound_s:
            part = 0.0 if upper == float("inf") else (bound_s - edge) / (upper - edge)
            return Attained(count + part * (buckets[upper] - count), total)
        edge, count = upper, buckets[upper]
    return Attained(count, total)


class Queue(NamedTuple):
    """Waiting requests: in a router, and in the engines behind it."""

    router: int
    engines: int = 0


class Looked(msgspec.Struct, frozen=True, kw_only=True):
    """The result of probing a router. Unstated values are None; `reason` says why it is not ready.

    `answered`: also if it is not ready, as one that drains; else it could not be reached in time.
    """

    now_s: float
    namespace: str
    url: str
    ready: bool
    answered: bool = True
    reason: str = ""
    queue: Queue | None = None
    ttft: Attained | None = None
    itl: Attained | None = None


class AttemptFailed(msgspec.Struct, frozen=True, kw_only=True):
    """A request could not connect to a router."""

    now_s: float
    namespace: str
    url: str
    reason: str


class PoolStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A pool's present status. `causes` and `reasons` (in words) of being unfit; ratios are of the last window."""

    namespace: str
    fitness: Fitness
    causes: tuple[Cause, ...]
    reasons: tuple[str, ...]
    routers_up: tuple[str, ...]
    queued_requests: int | None
    ttft_ratio: float | None
    itl_ratio: float | None


class Change(NamedTuple):
    """A pool's fitness changed."""

    namespace: str
    before: Fitness
    after: Fitness
    reasons: tuple[str, ...]
