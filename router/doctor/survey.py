"""Surveys a fleet for some seconds: its state at the beginning, events meanwhile, its state at the end.

    1   subscribe to the log: heartbeats and loads are received, `KV_FLEET` is read
    2   query routers and workers
    3   wait for the rest of the time
    4   query routers and workers' counters again, and the log's size

The facts state what could not be observed. `CannotLook` means that nothing could be: neither the log nor a router
answers, or a router requires another token. An engine that is attached without our agent has `/health` alone: whatever
else it lacks is not held against it.
"""

from collections.abc import Awaitable, Callable, Collection
from contextlib import AsyncExitStack
from functools import partial
from typing import NamedTuple

import aiohttp
from msgspec.structs import replace

from kv_protocol.fleet import FleetEvent, WorkerDraining, WorkerLeft, WorkerRegistered
from kv_protocol.fleet_gate import FleetGate
from kv_runtime.clock import Clock
from kv_runtime.event_log import BrokerUnavailable, EventLog
from router.config import RouterSettings
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
    """A control plane. Call `first`, later `last`; `seen` has the observations of both looks."""

    def __init__(self, asker: HttpAsker, url: str, token: str) -> None:
        self._asker, self._token = asker, token
        self.seen = RouterSeen(control=AddressAnswer(url=url, problem="not asked"))
        self.registrations: list[WorkerRegistered] = []
        """Workers that the router knows."""
        self.is_token_refused = False

    async def first(self) -> None:
        """`seen.control` is the router's status; without a problem, all of it was read."""
        control = await ready_answer(self._asker, self.seen.control.url)
        self.seen = replace(self.seen, control=control)
        await self._try(self._read_first)

    async def last(self) -> None:
        """Query it again."""
        await self._try(self._read_last)

    async def _try(self, read: Callable[[], Awaitable[None]]) -> None:
        control = self.seen.control
        if not control.problem:
            try:
                await read()
            except PageUnreadable as error:
                self.seen = replace(self.seen, control=AddressAnswer(url=control.url, problem=str(error)))

    async def _read_first(self) -> None:
        policy = decoded(await self._page("/v1/policy"), PolicyPage, "/v1/policy")
        self.seen = replace(self.seen, mode=policy.mode, reads_overlap=any(map(reads_overlap, policy.modes())))
        look = await self._look()
        self.seen = replace(self.seen, before=look)

    async def _read_last(self) -> None:
        look = await self._look()
        self.seen = replace(self.seen, after=look)

    async def _look(self) -> RouterLook:
        workers = decoded(await self._page("/v1/workers"), Workers, "/v1/workers")
        self.registrations = [each.registration for each in workers.workers]
        ids = tuple(each.worker_id for each in self.registrations)
        self.seen = replace(self.seen, workers=ids, broken=workers.broken())
        return RouterLook(ranks=workers.statuses(), metrics=counts(await self._page("/metrics"), WATCHED))

    async def _page(self, path: str) -> bytes:
        reply = await self._asker.get(f"{self.seen.control.url}{path}", self._token)
        if reply.is_ok:
            return reply.body
        self.is_token_refused = self.is_token_refused or reply.status == _UNAUTHORIZED
        raise PageUnreadable(reply.problem or f"status {reply.status} at {path}, {_ALLOWED}")


class WorkerProbe:
    """A worker at its registered address. Call `first`, later `last`; `seen` has the observations of both looks."""

    def __init__(self, asker: HttpAsker, registration: WorkerRegistered, token: str) -> None:
        self._asker, self._token, self._url = asker, token, registration.base_url.rstrip("/")
        self.seen = WorkerSeen(registration=registration)

    async def first(self) -> None:
        """Query its health; if it does not answer, query nothing else."""
        reply = await self._asker.get(f"{self._url}/health")
        reason = "" if reply.is_ok or reply.problem else unhealthy(reply.body) or f"status {reply.status} at /health"
        http = AddressAnswer(url=self._url, problem=reply.problem, reason=reason)
        self.seen = replace(self.seen, http=http, before={} if reply.problem else await self._losses())

    async def last(self) -> None:
        """Read its counters again."""
        if self.seen.http is not None and not self.seen.http.problem:
            self.seen = replace(self.seen, after=await self._losses())

    async def _losses(self) -> Counts:
        return counts((await self._asker.get(f"{self._url}/metrics", self._token)).body, LOSSES)


def reads_overlap(mode: str) -> bool:
    """Return whether the mode reads overlap; assumed for a user's mode."""
    return mode not in MODES or MODES[mode].reads_overlap


class CannotLook(Exception):
    """Nothing can be observed; the message says why."""


class SurveyScope(NamedTuple):
    """What to survey, and for how long. `settings` are those of a router: the log, tokens, bounds."""

    settings: RouterSettings
    control_urls: tuple[str, ...]
    data_urls: tuple[str, ...]
    listen_s: float
    timeout_s: float


async def look(wanted: SurveyScope, clock: Clock) -> FleetFacts:
    """Return the facts, after `listen_s` or more; raise `CannotLook`."""
    async with AsyncExitStack() as cleanup:
        session = await cleanup.enter_async_context(aiohttp.ClientSession())
        return await _Look(wanted, clock, HttpAsker(session, wanted.timeout_s)).facts(cleanup)


class _Look:
    def __init__(self, wanted: SurveyScope, clock: Clock, asker: HttpAsker) -> None:
        self._wanted, self._clock, self._asker = wanted, clock, asker
        self._watch: LogWatch | None = None
        self._log_problem = ""
        """Why the log could not be observed, or not to the end."""
        token = wanted.settings.control.token.get_secret_value()
        self._routers = [RouterProbe(asker, url, token) for url in wanted.control_urls]
        self._planes: dict[str, AddressAnswer] = {}

    async def facts(self, cleanup: AsyncExitStack) -> FleetFacts:
        wanted, clock, routers = self._wanted, self._clock, self._routers
        await self._open_log(cleanup)
        began_s = clock.now()
        await in_lanes(
            [*(each.first for each in routers), *(partial(self._ask_plane, url) for url in wanted.data_urls)]
        )
        self._require_something()
        await self._of_log(lambda watch: watch.read_fleet(wanted.timeout_s))
        token = wanted.settings.data.worker_token.get_secret_value()
        workers = [WorkerProbe(self._asker, each, token) for each in self._registered()]
        await in_lanes(each.first for each in workers)
        await clock.sleep(began_s + wanted.listen_s - clock.now())
        await in_lanes([*(each.last for each in routers), *(each.last for each in workers)])
        await self._of_log(LogWatch.read_fills)
        events, watch, queue = self._events(), self._watch, wanted.settings.queue
        return FleetFacts(
            window_s=clock.now() - began_s,
            bounds=Bounds(queue_requests_max=queue.requests_max, inflight_requests_max=queue.inflight_requests_max),
            workers=tuple(each.seen for each in workers),
            draining=sum(isinstance(event, WorkerDraining) for event in events),
            left={event.worker_id: event.reason for event in events if isinstance(event, WorkerLeft)},
            heads=watch.heads() if watch else (),
            used_blocks=watch.used_blocks if watch else {},
            refused=watch.refused if watch else "",
            routers=tuple(each.seen for each in routers),
            planes=tuple(self._planes[url] for url in wanted.data_urls),
            log=LogSeen(problem=self._log_problem, fills=watch.fills if watch else {}),
            reads_overlap=reads_overlap(wanted.settings.policy.mode),
        )

    async def _open_log(self, cleanup: AsyncExitStack) -> None:
        """Subscribe to heartbeats, if the log can be reached."""
        nats = self._wanted.settings.nats
        url, token = nats.url or f"nats://127.0.0.1:{nats.port}", nats.credentials.get_secret_value()
        try:
            log = await EventLog.connect(
                url, name="doctor", user=nats.user, token=token, confirm_s=self._wanted.timeout_s
            )
            cleanup.push_async_callback(log.close)
            self._watch = LogWatch(log, self._clock, FleetGate(nats.fleet_secrets))
            await self._watch.start()
        except BrokerUnavailable as error:
            self._log_problem = str(error)

    async def _of_log(self, read: Callable[[LogWatch], Awaitable[None]]) -> None:
        if self._watch is not None and not self._log_problem:
            try:
                await read(self._watch)
            except BrokerUnavailable as error:
                self._log_problem = str(error)

    def _events(self) -> Collection[FleetEvent]:
        """Return the newest fleet event of every worker."""
        return self._watch.events.values() if self._watch else ()

    async def _ask_plane(self, url: str) -> None:
        self._planes[url] = await ready_answer(self._asker, url)

    def _require_something(self) -> None:
        answers = [each.seen.control for each in self._routers]
        if refused := [each.seen.control.url for each in self._routers if each.is_token_refused]:
            raise CannotLook(f"--token: found none or another at {', '.join(refused)}, allowed its control.token")
        if self._log_problem and all(each.problem for each in answers):
            raise CannotLook(
                "; ".join([self._log_problem, *(f"--router {each.url}: {each.problem}" for each in answers)])
            )

    def _registered(self) -> list[WorkerRegistered]:
        """Return the registered workers, by the log; by the routers if the log cannot be read."""
        if not self._log_problem:
            return [event for event in self._events() if isinstance(event, WorkerRegistered)]
        return [*{known.worker_id: known for each in self._routers for known in each.registrations}.values()]
