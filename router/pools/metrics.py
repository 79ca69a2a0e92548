"""Metrics of pools: requests, attempts, fitness.

Every label set is there at 0 before anything was counted: phases, pools and causes are those of the configuration.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Literal

from kv_runtime.telemetry import Family, by_name, counter, gauge
from router.pools.selection import PoolGroup, PoolPhase, PoolSequence
from router.pools.state import CAUSES, FITNESSES, TARGETS, PoolsLive, PoolStatus

AttemptOutcome = Literal["ok", "refused", "failed", "cancelled"]
ATTEMPT_OUTCOMES: tuple[AttemptOutcome, ...] = ("ok", "refused", "failed", "cancelled")
REQUEST_OUTCOMES = ATTEMPT_OUTCOMES
LookOutcome = Literal["ready", "not_ready", "unreachable"]
LOOK_OUTCOMES: tuple[LookOutcome, ...] = ("ready", "not_ready", "unreachable")
_WHYS = ("grid", "override")


class PoolMetrics:
    """Counters, and projections of `live`."""

    def __init__(self, groups: tuple[PoolGroup, ...], live: PoolsLive) -> None:
        pools = [(group.phase, name) for group in groups for name in dict.fromkeys(group.namespaces)]
        names = dict.fromkeys(name for _, name in pools)
        self._live = live
        self._selections = Counter({(*at, why): 0 for at in pools for why in _WHYS})
        self._attempts = Counter({(*at, outcome): 0 for at in pools for outcome in ATTEMPT_OUTCOMES})
        self._passed_over = Counter({(*at, cause): 0 for at in pools for cause in CAUSES})
        self._probes = Counter({(name, outcome): 0 for name in names for outcome in LOOK_OUTCOMES})
        self._requests = Counter(dict.fromkeys(REQUEST_OUTCOMES, 0))
        self.inflight = 0
        """Requests in flight."""

    def planned(self, plan: PoolSequence) -> None:
        """A pool was chosen for one phase of a request; count it, and the pools passed over, by cause."""
        selection = plan.selection
        why = "grid" if selection.override is None else "override"
        self._selections[selection.phase, selection.namespace, why] += 1
        for candidate in plan.passed_over:
            for cause in candidate.causes:
                self._passed_over[selection.phase, candidate.namespace, cause] += 1

    def attempted(self, phase: PoolPhase, namespace: str, outcome: AttemptOutcome) -> None:
        """A pool was tried, with this outcome."""
        self._attempts[phase, namespace, outcome] += 1

    def looked(self, namespace: str, outcome: LookOutcome) -> None:
        """A router of a pool was probed."""
        self._probes[namespace, outcome] += 1

    def began(self) -> None:
        """A request came."""
        self.inflight += 1

    def ended(self, outcome: AttemptOutcome) -> None:
        """A request ended."""
        self.inflight -= 1
        self._requests[outcome] += 1

    def families(self) -> Iterator[Family]:
        """Yield all counters, and the status of pools."""
        at = ("phase", "pool")
        for name, meaning, labels, counts in (
            ("pool_selections", "Requests by the pool chosen first, and by what chose it", (*at, "by"),
             self._selections),
            ("pool_attempts", "Attempts of a pool to serve a request, by outcome", (*at, "outcome"), self._attempts),
            ("pool_passed_over", "Requests that passed over an unfit pool, by cause", (*at, "cause"),
             self._passed_over),
            ("pool_looks", "Probes of the routers of a pool, by outcome", ("pool", "outcome"), self._probes),
        ):  # fmt: skip
            yield counter(name, meaning, labels, [(values, float(count)) for values, count in counts.items()])
        yield counter("pools_requests", "Requests by outcome", ("outcome",), by_name((), self._requests))
        yield gauge("pools_inflight_requests", "Requests being served", rows=[((), self.inflight)])
        yield from _status_families(self._live.statuses())


def _status_families(statuses: tuple[PoolStatus, ...]) -> Iterator[Family]:
    states = [((each.namespace, state), float(each.fitness == state)) for each in statuses for state in FITNESSES]
    yield gauge("pool_state", "1 for the pool's present state: fit, strained or down", ("pool", "state"), states)
    up = [((each.namespace,), float(len(each.routers_up))) for each in statuses]
    yield gauge("pool_routers_up", "Routers of the pool that are up", ("pool",), up)
    queues = [(each.namespace, each.queued_requests) for each in statuses]
    queued = [((name,), float(requests)) for name, requests in queues if requests is not None]
    yield gauge(
        "pool_queued_requests", "Requests waiting in the pool's routers and engines, where known", ("pool",), queued
    )
    ratios = [
        ((each.namespace, target), ratio)
        for each in statuses
        for target, ratio in zip(TARGETS, (each.ttft_ratio, each.itl_ratio), strict=True)
        if ratio is not None
    ]
    yield gauge(
        "pool_attainment_ratio",
        "Share of the answers of the last window that met the target",
        ("pool", "target"),
        ratios,
    )
