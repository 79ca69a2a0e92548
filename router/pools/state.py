"""The state of a pool, a fold of observations: `probed` and `attempt_failed` take one, and apply the passing of time.

A pool is

    down       if no router of it is up
    strained   if one is up, and one of these causes holds
                   queue   more requests wait than `queue_requests_max`
                   ttft    less than the share `attainment_min_ratio` of the answers began within `ttft_bound_ms`
                   itl     less than that share had a time between tokens within `itl_bound_ms`
    fit        otherwise

| what | begins | ends |
|---|---|---|
| a router is not up | `failures_max` probes or attempts in a row fail | `successes_min` probes in a row find it ready |
| queue | more wait than the bound, in routers and engines | half of it or fewer wait, or no figure for `hold_s` |
| ttft, itl | a window has more late answers than allowed | one has at most half as many, or none ends for `hold_s` |

A window is `window_requests_min` answers, or more. The first probe of a router decides at once. A pool that is passed
over gives no answers to judge: after `hold_s` it is tried again. Counts are those of routers since their start; a
falling count means that the router restarted.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec

from router.pools.config import PoolSettings, Target

Fitness = Literal["fit", "strained", "down"]
FITNESSES: tuple[Fitness, ...] = ("fit", "strained", "down")
Cause = Literal["unhealthy", "queue", "ttft", "itl"]
CAUSES: tuple[Cause, ...] = ("unhealthy", "queue", "ttft", "itl")


class Attained(NamedTuple):
    """Answers of a router since its start: those within the bound, and all."""

    within: float = 0.0
    total: float = 0.0


def attained(buckets: Mapping[float, float], bound_s: float) -> Attained:
    """Return the answers within `bound_s`; `buckets`: cumulative counts by upper edge in seconds, inf among them.

    They are the cumulative count at the last edge <= the bound, plus a linear part of the bucket with the bound in it.
    Answers above the last finite edge are not in time, whatever the bound. The result grows with the counts: the
    difference of two results counts the answers between them.
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


class ProbeResult(NamedTuple):
    """The result of probing a router."""

    reason: str = ""
    """Why it is not ready; empty: it is."""
    answered: bool = True
    """Whether it answered in time, ready or not: a router that drains answers, too."""
    queue: Queue | None = None
    """None: not stated."""
    attained: Mapping[Target, Attained] = {}
    """The answers by target, for the targets that are checked and that the router states."""


class PoolStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A pool's present status. `causes` and `reasons` (in words) say why it is unfit; ratios are of the last window."""

    namespace: str
    fitness: Fitness
    causes: tuple[Cause, ...]
    reasons: tuple[str, ...]
    routers_up: tuple[str, ...]
    queued_requests: int | None
    ttft_ratio: float | None
    itl_ratio: float | None


class _PoolRouter(msgspec.Struct):
    """One router of a pool."""

    up: bool | None = None
    """None: not probed yet."""
    answered: bool = True
    reason: str = ""
    failures: int = 0
    successes: int = 0
    queue: Queue | None = None
    queue_s: float = 0.0
    """When the queue was last stated."""
    attained: dict[Target, Attained] = {}


class _Window(msgspec.Struct):
    """Answers of a pool against one bound, until there are enough of them for a judgement."""

    within: float = 0.0
    total: float = 0.0
    ratio: float | None = None
    slow: bool = False
    judged_s: float = 0.0


class PoolState:
    """The state of one pool. Its methods raise `KeyError` for a router that is not of the pool."""

    def __init__(self, namespace: str, limits: PoolSettings) -> None:
        self._namespace, self._limits = namespace, limits
        self._routers = {each.url: _PoolRouter() for each in limits.routers}
        self._windows = {target: _Window() for target in limits.bounds_ms}
        self._queue_long = False

    def probed(self, url: str, look: ProbeResult, now_s: float) -> None:
        """Fold in the result of a probe of a router."""
        router = self._routers[url]
        router.answered = look.answered
        if look.reason:
            self._failed(router, look.reason, at_once=router.up is None)
        else:
            router.failures = 0
            router.successes += 1
            if router.up is None or router.successes >= self._limits.successes_min:
                router.up, router.reason = True, ""
        if look.queue is not None:
            router.queue, router.queue_s = look.queue, now_s
        for target, window in self._windows.items():
            if (seen := look.attained.get(target)) is not None:
                before = router.attained.get(target, seen)
                if seen.total < before.total:
                    before = Attained()
                router.attained[target] = seen
                window.within += max(0.0, seen.within - before.within)
                window.total += seen.total - before.total
                self._judge(window, now_s)
        self.tick(now_s)

    def attempt_failed(self, url: str, reason: str, now_s: float) -> None:
        """Fold in that a request could not connect to a router."""
        self._failed(self._routers[url], reason, at_once=False)
        self.tick(now_s)

    def tick(self, now_s: float) -> None:
        """Apply the passing of time."""
        for router in self._routers.values():
            if router.queue is not None and now_s - router.queue_s >= self._limits.hold_s:
                router.queue = None
        bound, queued = self._limits.queue_requests_max, self._queued_requests
        if bound is None or queued is None or queued <= bound / 2:
            self._queue_long = False
        elif queued > bound:
            self._queue_long = True
        for window in self._windows.values():
            if window.slow and now_s - window.judged_s >= self._limits.hold_s:
                window.slow, window.ratio = False, None
                window.within = window.total = 0.0

    def _failed(self, router: _PoolRouter, reason: str, *, at_once: bool) -> None:
        router.successes = 0
        router.failures += 1
        router.reason = reason
        if at_once or router.failures >= self._limits.failures_max:
            router.up = False

    def _judge(self, window: _Window, now_s: float) -> None:
        limits = self._limits
        if window.total < limits.window_requests_min:
            return
        window.ratio = min(1.0, window.within / window.total)
        window.within = window.total = 0.0
        window.judged_s = now_s
        least = limits.attainment_min_ratio
        window.slow = window.ratio < ((1 + least) / 2 if window.slow else least)

    def is_silent(self, url: str) -> bool:
        """Return whether a router is not up and answers no probe: requests there wait in vain."""
        router = self._routers[url]
        return router.up is False and not router.answered

    @property
    def _queued_requests(self) -> int | None:
        """Requests that wait in all routers that are up and state it, and in the engines, which they share.

        None: no router states it.
        """
        queues = [each.queue for each in self._routers.values() if each.up is not False and each.queue is not None]
        if not queues:
            return None
        return sum(queue.router for queue in queues) + max(queue.engines for queue in queues)

    @property
    def status(self) -> PoolStatus:
        """The present status."""
        up, limits = tuple(url for url, each in self._routers.items() if each.up is not False), self._limits
        found: dict[Cause, str] = {}
        if not up:
            found["unhealthy"] = "; ".join(f"{url}: {each.reason}" for url, each in self._routers.items())
        elif self._queue_long:
            allowed = f"{limits.queue_requests_max} at most, then half of that"
            found["queue"] = f"queue: {self._queued_requests} requests wait, allowed {allowed}"
        for target, window in self._windows.items():
            if up and window.slow and window.ratio is not None:
                within = f"{window.ratio:.0%} within {limits.bounds_ms[target]:g} ms"
                found[target] = f"{target}: {within}, allowed {limits.attainment_min_ratio:.0%}"
        ratios = {target: window.ratio for target, window in self._windows.items()}
        return PoolStatus(
            namespace=self._namespace,
            fitness="down" if not up else "strained" if found else "fit",
            causes=tuple(found),
            reasons=tuple(found.values()),
            routers_up=up,
            queued_requests=self._queued_requests,
            ttft_ratio=ratios.get("ttft"),
            itl_ratio=ratios.get("itl"),
        )
