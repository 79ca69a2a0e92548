"""What is observed of pools, the limits by which they are judged, and their status."""

from typing import Literal, NamedTuple

import msgspec

Fitness = Literal["fit", "strained", "down"]
FITNESSES: tuple[Fitness, ...] = ("fit", "strained", "down")
Cause = Literal["unhealthy", "queue", "ttft", "itl"]
CAUSES: tuple[Cause, ...] = ("unhealthy", "queue", "ttft", "itl")
Target = Literal["ttft", "itl"]
TARGETS: tuple[Target, ...] = ("ttft", "itl")


class LiveLimits(msgspec.Struct, frozen=True, kw_only=True):
    """When a pool is passed over, and when no longer. Of a bound that is None nothing is judged."""

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
        """Return within how many milliseconds an answer should have begun, or its tokens follow each other."""
        return self.ttft_bound_ms if target == "ttft" else self.itl_bound_ms


class Attained(NamedTuple):
    """Answers of a router since it began: those within the bound, and all."""

    within: float = 0.0
    total: float = 0.0


class Queue(NamedTuple):
    """Requests that wait: in a router for room in its fleet, and in the engines that it sends to."""

    router: int
    engines: int = 0


class Looked(msgspec.Struct, frozen=True, kw_only=True):
    """A router was asked how it is. What it does not say is None; `reason` says why it is not ready."""

    now_s: float
    namespace: str
    url: str
    ready: bool
    reason: str = ""
    queue: Queue | None = None
    ttft: Attained | None = None
    itl: Attained | None = None


class AttemptFailed(msgspec.Struct, frozen=True, kw_only=True):
    """No connection to a router could be made for a request."""

    now_s: float
    namespace: str
    url: str
    reason: str


class PoolStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A pool at this moment. `causes` say why it is not fit, `reasons` in words; ratios are of the last window."""

    namespace: str
    fitness: Fitness
    causes: tuple[Cause, ...]
    reasons: tuple[str, ...]
    routers_up: tuple[str, ...]
    queued_requests: int | None
    ttft_ratio: float | None
    itl_ratio: float | None


class Change(NamedTuple):
    """A pool's fitness became another one."""

    namespace: str
    before: Fitness
    after: Fitness
    reasons: tuple[str, ...]
