"""Observations of pools, the limits by which they are judged, and their status."""

from typing import Literal, NamedTuple

import msgspec

Fitness = Literal["fit", "strained", "down"]
FITNESSES: tuple[Fitness, ...] = ("fit", "strained", "down")
Cause = Literal["unhealthy", "queue", "ttft", "itl"]
CAUSES: tuple[Cause, ...] = ("unhealthy", "queue", "ttft", "itl")
Target = Literal["ttft", "itl"]
TARGETS: tuple[Target, ...] = ("ttft", "itl")


class LiveLimits(msgspec.Struct, frozen=True, kw_only=True):
    """When a pool becomes unfit, and fit again. A bound that is None is not checked."""

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


class Queue(NamedTuple):
    """Waiting requests: in a router, and in the engines behind it."""

    router: int
    engines: int = 0


class Looked(msgspec.Struct, frozen=True, kw_only=True):
    """The result of probing a router. Unstated values are None; `reason` says why it is not ready."""

    now_s: float
    namespace: str
    url: str
    ready: bool
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
