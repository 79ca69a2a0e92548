"""Probes every router of every pool periodically, and counts for metrics; `state.py` folds the results.

| asked | plane | read |
|---|---|---|
| `GET /ready` | data | `ready`, `reasons` |
| `GET /v1/models` | data | whether it serves one of our models |
| `GET /metrics` | control | `kvrouter_queued_requests`; `kvrouter_ledger_reported_waiting`, summed over ranks |
| | | buckets of `kvrouter_time_to_first_token_seconds`, `kvrouter_inter_token_latency_seconds`, summed |

All three have to be answered within `look_timeout_s` together, in 16 MiB at most each. A missing answer of the control
plane does not count against a router: its queue and latencies are unknown then. Source: `docs/reference/metrics.md`.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping

import aiohttp
import msgspec
import structlog

from kv_protocol.journal import OutcomeName
from kv_runtime.clock import Clock
from kv_runtime.supervise import TaskSet, until
from kv_runtime.telemetry import Family, by_name, counter, gauge
from router.doctor.pages import HttpAsker, PageUnreadable, decoded, not_ready, samples
from router.pools.config import LiveLimits, PoolGroup, PoolsConfig, PoolSettings, RouterAddress, Target
from router.pools.selection import PoolSequence
from router.pools.state import CAUSES, FITNESSES, Fitness, PoolState, ProbeResult, Queue, attained

ATTEMPT_OUTCOMES: tuple[OutcomeName, ...] = ("ok", "refused", "failed", "cancelled")
LOOK_OUTCOMES = ("ready", "not_ready", "unreachable")
_WHYS = ("grid", "override")
_QUEUED, _WAITING = "kvrouter_queued_requests", "kvrouter_ledger_reported_waiting"
_LATENCIES: dict[str, Target] = {
    "kvrouter_time_to_first_token_seconds_bucket": "ttft",
    "kvrouter_inter_token_latency_seconds_bucket": "itl",
}
_MS_PER_S = 1000
_CONNECTIONS_MAX = 64
_PAGE_BYTES_MAX = 16 << 20
_UNREADY = 503
_log = structlog.get_logger("pools")


class PoolMetrics:
    """Counts what happens to requests and probes; yields the counters, and the status of `pools`."""

    def __init__(self, groups: tuple[PoolGroup, ...], pools: Mapping[str, PoolState]) -> None:
        phases = [(group.phase, name) for group in groups for name in dict.fromkeys(group.namespaces)]
        names = dict.fromkeys(name for _, name in phases)
        self._pools = pools
        self._selections = Counter({(*at, why): 0 for at in phases for why in _WHYS})
        self.attempts = Counter({(*at, outcome): 0 for at in phases for outcome in ATTEMPT_OUTCOMES})
        """Attempts of a pool for a phase, by outcome."""
        self._passed_over = Counter({(*at, cause): 0 for at in phases for cause in CAUSES})
        self.probes = Counter({(name, outcome): 0 for name in names for outcome in LOOK_OUTCOMES})
        """Probes of a pool's routers, by outcome."""
        self._requests = Counter(dict.fromkeys(ATTEMPT_OUTCOMES, 0))
        self.inflight = 0
        """Requests that are being served: `PoolService.serve` adds each, `ended` subtracts it."""

    def planned(self, plan: PoolSequence) -> None:
        """A pool was chosen for one phase of a request; count it, and the pools passed over, by cause."""
        selection = plan.selection
        why = "grid" if selection.override is None else "override"
        self._selections[selection.phase, selection.namespace, why] += 1
        for candidate in plan.passed_over:
            for cause in candidate.causes:
                self._passed_over[selection.phase, candidate.namespace, cause] += 1

    def ended(self, outcome: OutcomeName) -> None:
        """A request ended."""
        self.inflight -= 1
        self._requests[outcome] += 1

    def families(self) -> Iterator[Family]:
        """Yield all counters, and the status of pools."""
        at = ("phase", "pool")
        for name, meaning, labels, counts in (
            ("pool_selections", "Requests by the pool chosen first, and by what chose it", (*at, "by"),
             self._selections),
            ("pool_attempts", "Attempts of a pool to serve a request, by outcome", (*at, "outcome"), self.attempts),
            ("pool_passed_over", "Requests that passed over an unfit pool, by cause", (*at, "cause"),
             self._passed_over),
            ("pool_looks", "Probes of the routers of a pool, by outcome", ("pool", "outcome"), self.probes),
        ):  # fmt: skip
            yield counter(name, meaning, labels, counts.items())
        yield counter("pools_requests", "Requests by outcome", ("outcome",), by_name((), self._requests))
        yield gauge("pools_inflight_requests", "Requests being served", rows=[((), self.inflight)])
        statuses = [each.status for each in self._pools.values()]
        states = [((each.namespace, state), each.fitness == state) for each in statuses for state in FITNESSES]
        yield gauge("pool_state", "1 for the pool's present state: fit, strained or down", ("pool", "state"), states)
        up = {each.namespace: len(each.routers_up) for each in statuses}
        yield gauge("pool_routers_up", "Routers of the pool that are up", ("pool",), by_name((), up))
        queued = {each.namespace: each.queued_requests for each in statuses if each.queued_requests is not None}
        meaning = "Requests waiting in the pool's routers and engines, where known"
        yield gauge("pool_queued_requests", meaning, ("pool",), by_name((), queued))
        of_all = ((each.namespace, {"ttft": each.ttft_ratio, "itl": each.itl_ratio}) for each in statuses)
        ratios = [((name, target), ratio) for name, of in of_all for target, ratio in of.items() if ratio is not None]
        meaning = "Share of the answers of the last window that met the target"
        yield gauge("pool_attainment_ratio", meaning, ("pool", "target"), ratios)


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def not_serving(body: bytes, models: Collection[str]) -> str:
    """Return why a router serves none of `models`, empty if it serves one; raise `PageUnreadable`."""
    found = [each.id for each in decoded(body, _Models, "/v1/models").data]
    if not set(models).isdisjoint(found):
        return ""
    return f"serves {', '.join(found[:8]) or 'no model'}, wanted {', '.join(models)}"


def busyness(page: bytes, limits: LiveLimits) -> ProbeResult:
    """Return what a router's page of metrics says: its queue, and how many answers met the bounds of `limits`.

    Raises:
        PageUnreadable: it is no page of metrics.
    """
    waiting: defaultdict[str, float] = defaultdict(float)
    buckets: dict[Target, defaultdict[float, float]] = {"ttft": defaultdict(float), "itl": defaultdict(float)}
    try:
        for sample in samples(page, (_QUEUED, _WAITING, *_LATENCIES)):
            if (target := _LATENCIES.get(sample.name)) is None:
                waiting[sample.name] += sample.value
            else:
                buckets[target][float(sample.labels["le"])] += sample.value
        queue = Queue(int(waiting[_QUEUED]), int(waiting[_WAITING])) if _QUEUED in waiting else None
        bounds = limits.bounds_ms.items()
        found = {each: attained(buckets[each], bound / _MS_PER_S) for each, bound in bounds if buckets[each]}
        return ProbeResult(queue=queue, attained=found)
    except (ValueError, LookupError, OverflowError) as error:
        raise PageUnreadable(f"/metrics: {error}") from error


class PoolWatch:
    """Keeps `pools` current while it runs, and logs how their fitness changes."""

    def __init__(self, config: PoolsConfig, models: tuple[str, ...], clock: Clock) -> None:
        self.pools = {name: PoolState(name, settings) for name, settings in config.pools.items()}
        self.metrics = PoolMetrics(config.groups, self.pools)
        self.config, self._models, self._clock = config, models, clock
        self._logged: dict[str, Fitness] = dict.fromkeys(self.pools, "fit")
        self._routers = [(name, pool, each) for name, pool in config.pools.items() for each in pool.routers]

    async def run(self, stop: asyncio.Event) -> None:
        """Probe all routers, now and every `look_period_s`, until `stop` is set."""
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=_CONNECTIONS_MAX)) as session:
            await until(stop, self._keep_looking(session))

    def attempt_failed(self, namespace: str, url: str, reason: str) -> None:
        """Tell the pool that a request could not connect to a router, and log a change of its fitness."""
        self.pools[namespace].attempt_failed(url, reason, self._clock.now())
        self._log_change(namespace)

    def _log_change(self, name: str) -> None:
        """Log a pool if its fitness has changed."""
        before, status = self._logged[name], self.pools[name].status
        if before != status.fitness:
            self._logged[name] = status.fitness
            say = _log.info if status.fitness == "fit" else _log.warning
            say("pool_changed", pool=name, before=before, after=status.fitness, reasons=status.reasons)

    async def _keep_looking(self, session: aiohttp.ClientSession) -> None:
        while True:
            async with TaskSet(len(self._routers)) as probes:
                for name, pool, router in self._routers:
                    probes.spawn(self._look_at(session, name, pool, router))
            await self._clock.sleep(self.config.own.look_period_s)

    async def _look_at(
        self, session: aiohttp.ClientSession, namespace: str, pool: PoolSettings, router: RouterAddress
    ) -> None:
        timeout_s = self.config.own.look_timeout_s
        asker = HttpAsker(session, timeout_s, _PAGE_BYTES_MAX)
        look, url = ProbeResult(answered=False), f"{router.url}/ready"
        try:
            async with asyncio.timeout(timeout_s):
                reason = not_ready(await asker.get(url, also=_UNREADY))
                if not reason:
                    url = f"{router.url}/v1/models"
                    reason = not_serving(await asker.get(url), self._models)
                look = ProbeResult(reason)
                if router.control_url:
                    url = f"{router.control_url}/metrics"
                    look = busyness(await asker.get(url), pool)._replace(reason=reason)
        except (TimeoutError, PageUnreadable) as error:
            why = str(error) or f"no answer within {timeout_s:g} s"
            if look.answered:
                _log.debug("pool_metrics_unknown", url=url, reason=why)
            else:
                look = look._replace(reason=why if isinstance(error, TimeoutError) else f"{url}: {why}")
        outcome = "unreachable" if not look.answered else "not_ready" if look.reason else "ready"
        self.metrics.probes[namespace, outcome] += 1
        self.pools[namespace].probed(router.url, look, self._clock.now())
        self._log_change(namespace)
