"""Surveys a fleet for some seconds: its state at the beginning, events meanwhile, its state at the end.

    1   subscribe to the log: heartbeats and loads are received, `KV_FLEET` is read
    2   query routers and workers
    3   wait for the rest of the time
    4   query routers and workers' counters again, and the log's size

The facts state what could not be observed. `CannotLook` means that nothing could be: neither the log nor a router
answers, or a router requires another token. An engine that is attached without our agent has `/health` alone: whatever
else it lacks is not held against it.
"""

from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import NamedTuple

import aiohttp

from kv_protocol.fleet import FleetEvent, WorkerDraining, WorkerLeft, WorkerRegistered
from kv_protocol.fleet_gate import FleetGate
from kv_runtime.clock import Clock
from kv_runtime.event_log import BrokerUnavailable, EventLog
from router.decision.policies import MODES
from router.doctor.facts import (
    LOSSES,
    WATCHED,
    AddressAnswer,
    Bounds,
    Counts,
    FleetFacts,
    LogSeen,
    RouterLook,
    RouterSeen,
    WorkerSeen,
)
from router.doctor.log_watch import LogWatch
from router.doctor.pages import (
    OK,
    HttpAsker,
    PageUnreadable,
    PolicyPage,
    Reply,
    Workers,
    counts,
    decoded,
    in_lanes,
    not_ready,
    unhealthy,
)

_UNREADY, _UNAUTHORIZED = 503, 401
_ALLOWED = "allowed a router's control plane"


async def ready_answer(asker: HttpAsker, url: str) -> AddressAnswer:
    """Return a plane's answer."""
    reply = await asker.get(f"{url}/ready")
    if reply.problem or reply.status not in (OK, _UNREADY):
        return AddressAnswer(url=url, problem=reply.problem or f"status {reply.status} at /ready")
    try:
        return AddressAnswer(url=url, reason=not_ready(reply.body))
    except PageUnreadable as error:
        return AddressAnswer(url=url, problem=str(error))


class RouterProbe:
    """A control plane. Call `first`, later `last`; then `seen`."""

    def __init__(self, asker: HttpAsker, url: str, token: str) -> None:
        self._asker, self.url, self._token = asker, url, token
        self._policy: PolicyPage | None = None
        self._workers = Workers([])
        self._before = self._after = RouterLook()
        self.answer = AddressAnswer(url=url, problem="not asked")
        self.is_token_refused = False

    @property
    def registrations(self) -> Sequence[WorkerRegistered]:
        """Workers that the router knows."""
        return [each.registration for each in self._workers.workers]

    async def first(self) -> None:
        """`answer` is the router's status; without a problem, all of it was read."""
        self.answer = await ready_answer(self._asker, self.url)
        if not self.answer.problem:
            await self._read_policy()
            self._before = await self._look()

    async def last(self) -> None:
        """Query it again."""
        if not self.answer.problem:
            self._after = await self._look()

    def seen(self) -> RouterSeen:
        """Return the observations of both looks."""
        policy = self._policy
        return RouterSeen(
            control=self.answer,
            mode="" if policy is None else policy.mode,
            reads_overlap=policy is None or any(map(reads_overlap, policy.modes())),
            workers=tuple(registration.worker_id for registration in self.registrations),
            broken=self._workers.broken(),
            before=self._before,
            after=self._after,
        )

    async def _read_policy(self) -> None:
        try:
            self._policy = decoded(await self._page("/v1/policy"), PolicyPage, "/v1/policy")
        except PageUnreadable as error:
            self._fail(error)

    async def _look(self) -> RouterLook:
        try:
            self._workers = decoded(await self._page("/v1/workers"), Workers, "/v1/workers")
            metrics = counts(await self._page("/metrics"), WATCHED)
        except PageUnreadable as error:
            self._fail(error)
            return RouterLook()
        return RouterLook(ranks=self._workers.statuses(), metrics=metrics)

    async def _page(self, path: str) -> bytes:
        reply: Reply = await self._asker.get(f"{self.url}{path}", self._token)
        if reply.is_ok:
            return reply.body
        self.is_token_refused = self.is_token_refused or reply.status == _UNAUTHORIZED
        raise PageUnreadable(reply.problem or f"status {reply.status} at {path}, {_ALLOWED}")

    def _fail(self, error: PageUnreadable) -> None:
        if not self.answer.problem:
            self.answer = AddressAnswer(url=self.url, problem=str(error))


class WorkerProbe:
    """A worker at its registered address. Call `first`, later `last`; then `seen`."""

    def __init__(self, asker: HttpAsker, registration: WorkerRegistered, token: str) -> None:
        self._asker, self._registration, self._token = asker, registration, token
        self._url = registration.base_url.rstrip("/")
        self._answer: AddressAnswer | None = None
        self._before: Counts = {}
        self._after: Counts = {}

    async def first(self) -> None:
        """Query its health; if it does not answer, query nothing else."""
        reply = await self._asker.get(f"{self._url}/health")
        reason = "" if reply.is_ok or reply.problem else unhealthy(reply.body) or f"status {reply.status} at /health"
        self._answer = AddressAnswer(url=self._url, problem=reply.problem, reason=reason)
        self._before = await self._losses()

    async def last(self) -> None:
        """Read its counters again."""
        self._after = await self._losses()

    def seen(self) -> WorkerSeen:
        """Return the observations of both looks."""
        return WorkerSeen(registration=self._registration, http=self._answer, before=self._before, after=self._after)

    async def _losses(self) -> Counts:
        if self._answer is None or self._answer.problem:
            return {}
        return counts((await self._asker.get(f"{self._url}/metrics", self._token)).body, LOSSES)


def reads_overlap(mode: str) -> bool:
    """Return whether the mode reads overlap; assumed for a user's mode."""
    return mode not in MODES or MODES[mode].reads_overlap


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
