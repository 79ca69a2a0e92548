"""Surveys a fleet for some seconds: its state at the beginning, events meanwhile, its state at the end.

    1   subscribe to the log: heartbeats and loads are received, `KV_FLEET` is read
    2   query routers and workers
    3   wait for the rest of the time
    4   query routers and workers' counters again, and the log's size

The facts state what could not be observed. `CannotLook` means that nothing could be: neither the log nor a router
answers, or a router requires another token.
"""

from contextlib import AsyncExitStack
from functools import partial
from typing import NamedTuple

import aiohttp

from kv_protocol.fleet import WorkerDraining, WorkerLeft, WorkerRegistered
from kv_protocol.fleet_gate import FleetGate
from kv_runtime.clock import Clock
from kv_runtime.event_log import BrokerUnavailable, EventLog
from router.doctor.facts import AddressAnswer, Bounds, FleetFacts, LogSeen, WorkerSeen
from router.doctor.http_client import HttpAsker, in_lanes
from router.doctor.log_watch import LogWatch, fills
from router.doctor.router_probe import RouterProbe, ready_answer
from router.doctor.worker_probe import WorkerProbe


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
        log = _LogLook(wanted, clock)
        await log.open(cleanup)
        return await _Look(wanted, clock, asker, log).facts()


class _Look:
    def __init__(self, wanted: SurveyScope, clock: Clock, asker: HttpAsker, log: "_LogLook") -> None:
        self._wanted, self._clock, self._asker, self._log = wanted, clock, asker, log
        self._routers = [RouterProbe(asker, url, wanted.control_token) for url in wanted.control_urls]
        self._planes: dict[str, AddressAnswer] = {}

    async def facts(self) -> FleetFacts:
        began_s = self._clock.now()
        planes = (partial(self._ask_plane, url) for url in self._wanted.data_urls)
        await in_lanes([*(each.first for each in self._routers), *planes])
        self._require_something()
        await self._log.first()
        workers = [
            WorkerProbe(self._asker, registration, self._wanted.worker_token) for registration in self._registered()
        ]
        await in_lanes(each.first for each in workers)
        await self._clock.sleep(began_s + self._wanted.listen_s - self._clock.now())
        await in_lanes([*(each.last for each in self._routers), *(each.last for each in workers)])
        await self._log.last()
        return self._facts_of(tuple(each.seen() for each in workers), self._clock.now() - began_s)

    async def _ask_plane(self, url: str) -> None:
        self._planes[url] = await ready_answer(self._asker, url)

    def _require_something(self) -> None:
        if refused := [each.url for each in self._routers if each.is_token_refused]:
            raise CannotLook(f"--token: found none or another at {', '.join(refused)}, allowed its control.token")
        if self._log.problem and all(each.answer.problem for each in self._routers):
            routers = (f"--router {each.url}: {each.answer.problem}" for each in self._routers)
            raise CannotLook("; ".join((self._log.problem, *routers)))

    def _registered(self) -> list[WorkerRegistered]:
        """Return the registered workers, by the log; by the routers if the log cannot be read."""
        if not self._log.problem:
            return [event for event in self._log.events() if isinstance(event, WorkerRegistered)]
        return list(
            {
                registration.worker_id: registration for each in self._routers for registration in each.registrations
            }.values()
        )

    def _facts_of(self, workers: tuple[WorkerSeen, ...], window_s: float) -> FleetFacts:
        events, watch = self._log.events(), self._log.watch
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
            log=self._log.seen(),
            reads_overlap=self._wanted.reads_overlap,
        )


class _LogLook:
    """The log; `problem` says why it could not be observed, or not to the end."""

    def __init__(self, wanted: SurveyScope, clock: Clock) -> None:
        self._wanted, self._clock = wanted, clock
        self._log: EventLog | None = None
        self._fills: dict[str, tuple[int, int]] = {}
        self.watch: LogWatch | None = None
        self.problem = ""

    async def open(self, cleanup: AsyncExitStack) -> None:
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
            self._log, self.watch = log, LogWatch(log, self._clock, FleetGate(wanted.fleet_keys))
            await self.watch.start()
        except BrokerUnavailable as error:
            self.problem = str(error)

    def events(self) -> list[WorkerRegistered | WorkerDraining | WorkerLeft]:
        """Return the newest fleet event of every worker."""
        return list(self.watch.events.values()) if self.watch else []

    async def first(self) -> None:
        """Read the fleet."""
        if self.problem or self.watch is None:
            return
        try:
            await self.watch.read_fleet(self._wanted.timeout_s)
        except BrokerUnavailable as error:
            self.problem = str(error)

    async def last(self) -> None:
        """Read how full the log is."""
        if self.problem or self._log is None:
            return
        try:
            self._fills = await fills(self._log)
        except BrokerUnavailable as error:
            self.problem = str(error)

    def seen(self) -> LogSeen:
        """Return the observations."""
        return LogSeen(problem=self.problem, fills=self._fills)
