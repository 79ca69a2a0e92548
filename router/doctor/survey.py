"""Surveys a fleet for some seconds: its state at the beginning, events meanwhile, its state at the end.

    1   subscribe to heartbeats and loads on the log
    2   query routers, read `KV_FLEET`, then query workers
    3   wait for the rest of the time
    4   query routers again, and the log's size

The facts state what could not be observed. `CannotLook` means that nothing could be: neither the log nor a router
answers, or a router requires another token. An engine without our agent is asked for `/health` only.
"""

import asyncio
from collections.abc import Collection, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import aiohttp

from kv_protocol import fleet, load, subjects
from kv_protocol.errors import MalformedMessage
from kv_protocol.fleet import WorkerDraining, WorkerLeft, WorkerRegistered
from kv_protocol.fleet_gate import FleetEventRefused, FleetGate
from kv_protocol.ids import WorkerRank
from kv_runtime.clock import Clock
from kv_runtime.event_log import BrokerUnavailable, EventLog, LogMessage, connected_log
from router.config import RouterSettings
from router.decision.policies import MODES
from router.doctor.facts import AddressAnswer, FleetFacts, RouterSeen, StreamHead, Workers, WorkerSeen
from router.doctor.pages import (
    CannotLook,
    ControlPages,
    HttpAsker,
    PageUnreadable,
    PolicyPage,
    in_lanes,
    not_ready,
    unhealthy,
)

HEADS_MAX = 65_536
"""How many epochs of ranks, and ranks with load reports, are kept; further ones are ignored."""
_POLL_S = 0.05
_UNREADY, _UNAUTHORIZED = 503, 401
_ALLOWED = "allowed a router's control plane"
_T = TypeVar("_T")


class LogWatch:
    """Writes what the log's messages show into `facts`; for one survey."""

    def __init__(self, facts: FleetFacts, clock: Clock, gate: FleetGate) -> None:
        """`gate` checks fleet events."""
        self._facts, self._clock, self._gate = facts, clock, gate
        self._heads = dict[tuple[WorkerRank, str, int], StreamHead]()
        facts.heads = self._heads.values()
        self.events: dict[str, fleet.FleetEvent] = {}
        """The newest event of every worker, by its subject."""

    async def start(self, log: EventLog) -> None:
        """Subscribe to heartbeats and loads."""
        self._event_log, self._began_s = log, self._clock.now()
        await self._event_log.listen(subjects.HEARTBEAT_ALL, self._on_heartbeat)
        await self._event_log.listen(subjects.LOAD_ALL, self._on_load)

    async def read_fleet(self, timeout_s: float) -> None:
        """Read `KV_FLEET` completely, and subscribe to it; raise `BrokerUnavailable` if that takes longer."""
        reading = await self._event_log.follow(subjects.FLEET_STREAM, subjects.FLEET_ALL, self._on_fleet_event)
        ends_s = self._clock.now() + timeout_s
        while reading.unread:
            if self._clock.now() > ends_s:
                missing = f"{reading.unread} messages not read in {timeout_s:g} s"
                raise BrokerUnavailable(f"{subjects.FLEET_STREAM}: {missing}")
            await self._clock.sleep(_POLL_S)

    async def _on_fleet_event(self, message: LogMessage) -> None:
        try:
            self.events[message.subject] = self._gate.admit(message.subject, message.data, message.headers)
        except FleetEventRefused as error:
            self._facts.refused = f"{message.subject}: {error}"

    async def _on_heartbeat(self, message: LogMessage) -> None:
        try:
            rank, beat = subjects.rank_of(message.subject), fleet.decode_heartbeat(message.data)
        except MalformedMessage:
            return
        key, now_s = (rank, beat.instance, beat.epoch), self._clock.now() - self._began_s
        if key in self._heads or len(self._heads) < HEADS_MAX:
            first_s = self._heads[key].first_s if key in self._heads else now_s
            self._heads[key] = StreamHead(*key, first_s, now_s, beat.last_seq, beat.stale)

    async def _on_load(self, message: LogMessage) -> None:
        try:
            rank, report = subjects.rank_of(message.subject), load.decode_load(message.data)
        except MalformedMessage:
            return
        used = self._facts.used_blocks
        if rank in used or len(used) < HEADS_MAX:
            used[rank] = max(report.used_blocks, used.get(rank, 0))


async def fills(log: EventLog) -> dict[str, tuple[int, int]]:
    """Return size and limit, in bytes, of `KV_EVENTS` and of all streams of the account. A limit of 0 or less: none.

    Source: docs.nats.io, reference/jetstream/api: `$JS.API.INFO`, `$JS.API.STREAM.INFO.<stream>`.

    Raises:
        BrokerUnavailable: the server did not answer.
    """
    account = await log.answer_of("INFO", dict[str, Any])
    events = await log.answer_of(f"STREAM.INFO.{subjects.EVENTS_STREAM}", dict[str, Any])
    found = {} if account is None else {"the store": (account["storage"], account["limits"]["max_storage"])}
    if events is not None:
        found[subjects.EVENTS_STREAM] = events["state"]["bytes"], events["config"]["max_bytes"]
    return found


async def ready_answer(asker: HttpAsker, url: str) -> AddressAnswer:
    """Return a plane's answer."""
    try:
        return AddressAnswer(url=url, reason=not_ready(await asker.get(f"{url}/ready", also=_UNREADY)))
    except PageUnreadable as error:
        return AddressAnswer(url=url, problem=f"{error} at /ready" if error.status else str(error))


class RouterProbe:
    """A control plane. Call `first`, later `last`; `seen` has the observations of both looks."""

    def __init__(self, asker: HttpAsker, url: str, token: str) -> None:
        self._asker, self._pages = asker, ControlPages(asker, url, token)
        self.seen = RouterSeen(control=AddressAnswer(url=url, problem="not asked"))
        self.is_token_refused = False

    async def first(self) -> None:
        """Set `seen`; `seen.control` is the router's status, and without a problem there all pages were read."""
        seen = self.seen
        seen.control = await ready_answer(self._asker, seen.control.url)
        if (policy := await self._page("/v1/policy", PolicyPage)) is not None:
            seen.mode, seen.reads_overlap = policy.mode, any(map(reads_overlap, policy.modes()))
        seen.before = await self._page("/v1/workers", Workers) or seen.before

    async def last(self) -> None:
        """Set `seen.after` to the workers that the router has now."""
        self.seen.after = await self._page("/v1/workers", Workers) or self.seen.before

    async def _page(self, path: str, kind: type[_T]) -> _T | None:
        """Return a page; None if there is a problem, which `seen.control` has."""
        if self.seen.control.problem:
            return None
        try:
            return await self._pages.page(path, kind)
        except PageUnreadable as error:
            self.is_token_refused = self.is_token_refused or error.status == _UNAUTHORIZED
            problem = f"{error} at {path}, {_ALLOWED}" if error.status else str(error)
            self.seen.control = AddressAnswer(url=self._pages.url, problem=problem)
            return None


async def worker_seen(asker: HttpAsker, registration: WorkerRegistered) -> WorkerSeen:
    """Return a worker with the answer of its registered address about its health."""
    url = registration.base_url.rstrip("/")
    problem = reason = ""
    try:
        await asker.get(f"{url}/health")
    except PageUnreadable as error:
        if error.status:
            reason = unhealthy(error.body) or f"{error} at /health"
        else:
            problem = str(error)
    return WorkerSeen(registration=registration, http=AddressAnswer(url=url, problem=problem, reason=reason))


def reads_overlap(mode: str) -> bool:
    """Return whether the mode reads overlap; assumed for a user's mode."""
    return mode not in MODES or MODES[mode].reads_overlap


async def look(
    settings: RouterSettings,
    control_urls: Sequence[str],
    data_urls: Sequence[str],
    listen_s: float,
    timeout_s: float,
    clock: Clock,
) -> FleetFacts:
    """Return the facts, after `listen_s` or more; raise `CannotLook`. `settings` have the log's address and tokens."""
    facts, token = FleetFacts(reads_overlap=reads_overlap(settings.policy.mode)), settings.control.token
    watch = LogWatch(facts, clock, FleetGate(settings.nats.fleet_secrets))

    @contextmanager
    def noted() -> Iterator[None]:
        try:
            yield
        except BrokerUnavailable as error:
            facts.log_problem = str(error)

    async with AsyncExitStack() as cleanup:
        asker = HttpAsker(await cleanup.enter_async_context(aiohttp.ClientSession()), timeout_s)
        routers = [RouterProbe(asker, url, token.get_secret_value()) for url in control_urls]
        facts.routers = [each.seen for each in routers]
        with noted():
            nats = settings.nats
            there = nats.model_copy(update={"url": nats.url or f"nats://127.0.0.1:{nats.port}"})
            log = await cleanup.enter_async_context(connected_log(there, "doctor", confirm_s=timeout_s))
            await watch.start(log)
        began_s = clock.now()
        asked = in_lanes(partial(ready_answer, asker, url) for url in data_urls)
        _, facts.planes = await asyncio.gather(in_lanes(each.first for each in routers), asked)
        _require_something(facts, routers)
        if not facts.log_problem:
            with noted():
                await watch.read_fleet(timeout_s)
        events = watch.events.values()
        registered = _registered(facts, events)
        facts.workers = await in_lanes(partial(worker_seen, asker, each) for each in registered)
        await clock.sleep(began_s + listen_s - clock.now())
        await in_lanes(each.last for each in routers)
        if not facts.log_problem:
            with noted():
                facts.fills = await fills(log)
    facts.window_s = clock.now() - began_s
    facts.draining = sum(isinstance(event, WorkerDraining) for event in events)
    facts.left = {event.worker_id: event.reason for event in events if isinstance(event, WorkerLeft)}
    return facts


def _require_something(facts: FleetFacts, routers: list[RouterProbe]) -> None:
    answers = [each.control for each in facts.routers]
    if refused := [each.seen.control.url for each in routers if each.is_token_refused]:
        raise CannotLook(f"--token: found none or another at {', '.join(refused)}, allowed its control.token")
    if facts.log_problem and all(each.problem for each in answers):
        raise CannotLook("; ".join([facts.log_problem, *(f"--router {each.url}: {each.problem}" for each in answers)]))


def _registered(facts: FleetFacts, events: Collection[fleet.FleetEvent]) -> list[WorkerRegistered]:
    """Return the registered workers, by the log; by the routers if the log cannot be read."""
    if not facts.log_problem:
        return [event for event in events if isinstance(event, WorkerRegistered)]
    known = [row.registration for each in facts.routers for row in each.before.workers]
    return [*{each.worker_id: each for each in known}.values()]
