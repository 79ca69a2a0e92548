"""Probes every router of every pool periodically; `state.py` folds the results.

A probe is three requests, answered within `look_timeout_s` together, each answer of 16 MiB at most. A missing answer of
the control plane does not count against a router: its queue and latencies are unknown then.
"""

import asyncio

import aiohttp
import structlog

from kv_runtime.clock import Clock
from kv_runtime.supervise import TaskSet, until
from router.doctor.http_client import OK, HttpAsker
from router.doctor.pages import PageUnreadable, not_ready
from router.pools.config import PoolsConfig
from router.pools.metrics import LookOutcome, PoolMetrics
from router.pools.probes import AttemptFailed, Looked
from router.pools.router_page import Busyness, busyness, not_serving
from router.pools.state import PoolsLive
from router.pools.targets import PoolSettings, RouterAddress

_CONNECTIONS_MAX = 64
_PAGE_BYTES_MAX = 16 << 20
_UNREADY = 503

_log = structlog.get_logger("pools")


class PoolWatch:
    """Keeps `live` current while it runs; `seen` takes in the observations of requests."""

    def __init__(
        self, config: PoolsConfig, models: tuple[str, ...], live: PoolsLive, metrics: PoolMetrics, clock: Clock
    ) -> None:
        self.live, self.metrics = live, metrics
        self._config, self._models, self._clock = config, models, clock
        self._routers = [(name, pool, each) for name, pool in config.pools.items() for each in pool.routers]

    async def run(self, stop: asyncio.Event) -> None:
        """Probe all routers, now and every `look_period_s`, until `stop` is set."""
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=_CONNECTIONS_MAX)) as session:
            await until(stop, self._keep_looking(session))

    def attempt_failed(self, namespace: str, url: str, reason: str) -> None:
        """A request could not connect to a router."""
        self.seen(AttemptFailed(now_s=self._clock.now(), namespace=namespace, url=url, reason=reason))

    def seen(self, event: Looked | AttemptFailed) -> None:
        """Take in an observation; changes of fitness, also by the passing of time, are logged."""
        for change in (*self.live.apply(event), *self.live.tick(event.now_s)):
            say = _log.info if change.after == "fit" else _log.warning
            say("pool_changed", pool=change.namespace, before=change.before, after=change.after, reasons=change.reasons)

    async def _keep_looking(self, session: aiohttp.ClientSession) -> None:
        while True:
            async with TaskSet(len(self._routers)) as probes:
                for name, pool, router in self._routers:
                    probes.spawn(self._look_at(session, name, pool, router))
            await self._clock.sleep(self._config.look_period_s)

    async def _look_at(
        self, session: aiohttp.ClientSession, namespace: str, pool: PoolSettings, router: RouterAddress
    ) -> None:
        outcome: LookOutcome = "unreachable"
        busy = Busyness()
        try:
            async with asyncio.timeout(self._config.look_timeout_s):
                reason = await self._unfit(session, router)
                outcome = "not_ready" if reason else "ready"
                busy = await self._busyness(session, router, pool)
        except TimeoutError:
            if outcome == "unreachable":
                reason = f"no answer within {self._config.look_timeout_s:g} s"
        except PageUnreadable as error:
            reason = str(error)
        self.metrics.looked(namespace, outcome)
        self.seen(
            Looked(
                now_s=self._clock.now(),
                namespace=namespace,
                url=router.url,
                ready=outcome == "ready",
                answered=outcome != "unreachable",
                reason=reason,
                queue=busy.queue,
                ttft=busy.ttft,
                itl=busy.itl,
            )
        )

    async def _unfit(self, session: aiohttp.ClientSession, router: RouterAddress) -> str:
        """Return why requests should not be sent there; empty if they may."""
        ready = await self._get(session, f"{router.url}/ready", also=_UNREADY)
        if reason := not_ready(ready):
            return reason
        return not_serving(await self._get(session, f"{router.url}/v1/models"), self._models)

    async def _busyness(self, session: aiohttp.ClientSession, router: RouterAddress, pool: PoolSettings) -> Busyness:
        if not router.control_url:
            return Busyness()
        try:
            return busyness(await self._get(session, f"{router.control_url}/metrics"), pool.limits)
        except PageUnreadable as error:
            _log.debug("pool_metrics_unknown", url=router.control_url, reason=str(error))
            return Busyness()

    async def _get(self, session: aiohttp.ClientSession, url: str, *, also: int = OK) -> bytes:
        """Return the body of an answer of status 200, or `also`; raise `PageUnreadable`."""
        reply = await HttpAsker(session, self._config.look_timeout_s, _PAGE_BYTES_MAX).get(url)
        if reply.problem or reply.status not in (OK, also):
            raise PageUnreadable(f"{url}: {reply.problem or f'status {reply.status}'}")
        return reply.body
