"""Surveys a fleet for some seconds: its state at the beginning, events meanwhile, its state at the end.

    1   subscribe to the log: heartbeats and loads are received, `KV_FLEET` is read
    2   query routers and workers
    3   wait for the rest of the time
    4   query routers and workers' counters again, and the log's size

The facts state what could not be observed. `CannotLook` means that nothing could be: neither the log nor a router
answers, or a router requires another token.
"""

from collections.abc import Awaitable, Callable, Collection
from contextlib import AsyncExitStack
from functools import partial
from typing import NamedTuple

import aiohttp

from kv_protocol.fleet import FleetEvent, WorkerDraining, WorkerLeft, WorkerRegistered
from kv_protocol.fleet_gate import FleetGate
from kv_runtime.clock import Clock
from kv_runtime.event_log import BrokerUnavailable, EventLog
from router.doctor.facts import AddressAnswer, Bounds, FleetFacts, LogSeen, WorkerSeen
from router.doctor.http_client import HttpAsker, in_lanes
from router.doctor.log_watch import LogWatch
from router.doctor.probes import RouterProbe, WorkerProbe, ready_answer


class CannotLook(Exception):
    """Nothing can be observed; the message says why."""


class SurveyScope(NamedTuple):
    """What to survey, and for how long. Tokens are bearer tokens; empty: none."""

    control_urls: tuple[str, ...]
    data_urls: tuple[str, ...]
    nats_url: str
    nats_user: str
    nats_token: str
    fleet_keys: tuple[bytes, ...]
    control_token: str
    worker_token: str
    listen_s: float
    timeout_s: float
    bounds: Bounds
    reads_overlap: bool


async def look(wanted: SurveyScope, clock: Clock) -> FleetFacts:
    """Return the facts, after `listen_s` or more; raise `CannotLook`."""
    async with AsyncExitStack() as cleanup:
        session = await cleanup.enter_async_context(aiohttp.ClientSession())
        asker = HttpAsker(session, wanted.timeout_s)
        found = _Look(wanted, clock, asker)
        await found.open_log(cleanup)
        return await found.facts()


class _Look:
    def __init__(self, wanted: SurveyScope, clock: Clock, asker: HttpAsker) -> None:
        self._wanted, self._clock, self._asker = wanted, clock, asker
        self._watch: LogWatch | None = None
        self._log_problem = ""
        """Why the log could not be observed, or not to the end."""
        self._routers = [RouterProbe(asker, url, wanted.control_token) for url in wanted.control_urls]
        self._planes: dict[str, AddressAnswer] = {}

    async def open_log(self, cleanup: AsyncExitStack) -> None:
        """Subscribe to heartbeats, if the log can be reached."""
        wanted = self._wanted
        try:
            log = await EventLog.connect(
                wanted.nats_url,
                name="doctor",
                user=wanted.nats_user,
                token=wanted.nats_token,
                confirm_s=wanted.timeout_s,
            )
            cleanup.push_async_callback(log.close)
            self._watch = LogWatch(log, self._clock, FleetGate(wanted.fleet_keys))
            await self._watch.start()
        except BrokerUnavailable as error:
            self._log_problem = str(error)

    async def _read_log(self, read: Callable[[LogWatch], Awaitable[None]]) -> None:
        if self._log_problem or self._watch is None:
            return
        try:
            await read(self._watch)
        except BrokerUnavailable as error:
            self._log_problem = str(error)

    def _events(self) -> Collection[FleetEvent]:
        """Return the newest fleet event of every worker."""
        return self._watch.events.values() if self._watch else ()

    async def facts(self) -> FleetFacts:
        began_s = self._clock.now()
        planes = (partial(self._ask_plane, url) for url in self._wanted.data_urls)
        await in_lanes([*(each.first for each in self._routers), *planes])
        self._require_something()
        await self._read_log(lambda watch: watch.read_fleet(self._wanted.timeout_s))
        workers = [
            WorkerProbe(self._asker, registration, self._wanted.worker_token) for registration in self._registered()
        ]
        await in_lanes(each.first for each in workers)
        await self._clock.sleep(began_s + self._wanted.listen_s - self._clock.now())
        await in_lanes([*(each.last for each in self._routers), *(each.last for each in workers)])
        await self._read_log(LogWatch.read_fills)
        return self._facts_of(tuple(each.seen() for each in workers), self._clock.now() - began_s)

    async def _ask_plane(self, url: str) -> None:
        self._planes[url] = await ready_answer(self._asker, url)

    def _require_something(self) -> None:
        if refused := [each.url for each in self._routers if each.is_token_refused]:
            raise CannotLook(f"--token: found none or another at {', '.join(refused)}, allowed its control.token")
        if self._log_problem and all(each.answer.problem for each in self._routers):
            routers = (f"--router {each.url}: {each.answer.problem}" for each in self._routers)
            raise CannotLook("; ".join((self._log_problem, *routers)))

    def _registered(self) -> list[WorkerRegistered]:
        """Return the registered workers, by the log; by the routers if the log cannot be read."""
        if not self._log_problem:
            return [event for event in self._events() if isinstance(event, WorkerRegistered)]
        return list(
            {
                registration.worker_id: registration for each in self._routers for registration in each.registrations
            }.values()
        )

    def _facts_of(self, workers: tuple[WorkerSeen, ...], window_s: float) -> FleetFacts:
        events, watch = self._events(), self._watch
        return FleetFacts(
            window_s=window_s,
            bounds=self._wanted.bounds,
            workers=workers,
            draining=sum(isinstance(event, WorkerDraining) for event in events),
            left={event.worker_id: event.reason for event in events if isinstance(event, WorkerLeft)},
            heads=watch.heads() if watch else (),
            used_blocks=watch.used_blocks if watch else {},
            refused=watch.refused if watch else "",
            routers=tuple(each.seen() for each in self._routers),
            planes=tuple(self._planes[url] for url in self._wanted.data_urls),
            log=LogSeen(problem=self._log_problem, fills=watch.fills if watch else {}),
            reads_overlap=self._wanted.reads_overlap,
        )
