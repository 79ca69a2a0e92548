"""Exchanges leases with the other routers of the fleet over core NATS.

    news      what happened to own leases: read at each turn, and sent to all other routers
    record    the own ledger ended a lease: the end of an own lease is sent, the end of another router's is only noted
    theirs    what happened to other routers' leases: applied to the own ledger

`Replication` decides (`replication.py`); this module is its network. While there are peers, news wait `FLUSH_S` for
further ones. Without peers there is one turn per beat: a lease that begins and ends between two beats is never sent.
Without news there is a turn when `Replication.due_s` says so.
While the log is away nothing is sent, and silence is ignored; once it is back, the next beat shows the others what they
missed.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import structlog

from kv_protocol import subjects
from kv_protocol.errors import MalformedMessage
from kv_protocol.journal import LedgerApplied
from kv_protocol.ledger import (
    Cancelled,
    Expired,
    Finished,
    FirstToken,
    LeaseEvent,
    Renewed,
    decode_replica,
    encode_replica,
)
from kv_runtime.event_log import BrokerUnavailable, EventLog, LogMessage
from kv_runtime.telemetry import Family, RateLimitedLog, by_name, counter, gauge
from router.decision.routing import Routing
from router.replicas.peer import Skew
from router.replicas.replication import Effect, Replication

FLUSH_S = 0.005
OUTGOING_MAX = 1024
"""How many messages may wait to be sent; beyond it the oldest are dropped, which the other routers detect."""

_NEWS: dict[str, Callable[..., LeaseEvent]] = {
    "first_token": FirstToken,
    "renewed": Renewed,
    "finished": Finished,
    "cancelled": Cancelled,
}
"""The events that `built.Leases.news` names."""

_log = structlog.get_logger("router")


class Replicas:
    """One router's part in the shared ledger; a part of a process: `run` sends, and applies the passing of time."""

    def __init__(self, routing: Routing, log: EventLog, router_id: str) -> None:
        """Create it; `start` subscribes. `router_id` is unique in the fleet: letters, digits and dashes."""
        self._routing, self._event_log, self._clock = routing, log, routing.clock
        self._refusals = RateLimitedLog(_log, self._clock)
        self._router_id = router_id
        self.replication = Replication(router_id, self._clock.wall_ns())
        """The wall time identifies this run of the router."""
        routing.listeners[LedgerApplied].append(self._on_applied)
        self._outgoing: deque[tuple[str, bytes]] = deque()
        self._news = asyncio.Event()

    async def start(self) -> None:
        """Subscribe to the messages of the other routers."""
        for subject in (subjects.LEDGER, subjects.ledger_of(self._router_id)):
            await self._event_log.listen(subject, self._on_message)

    def _on_applied(self, applied: LedgerApplied) -> None:
        """Pass on that the own ledger ended a lease."""
        if not applied.router and isinstance(applied.event, Expired):
            self._read_news()
            self.replication.on_lease_event(applied.event)
            self._news.set()

    def _read_news(self) -> None:
        """Queue for the next messages what happened to own leases since the last call."""
        events, begun = self._routing.leases.news()
        tell = self.replication.on_lease_event
        for tag, lease_id in events:
            tell(_NEWS[tag](lease_id=lease_id))
        for verdict, is_prefilled in begun:
            tell(verdict.promise)
            if is_prefilled:
                tell(FirstToken(lease_id=verdict.decision_id))

    async def run(self, stop: asyncio.Event) -> None:
        """Send and apply the passing of time until `stop` is set; pending events are then sent, if possible."""
        loop, stopping = asyncio.get_running_loop(), asyncio.ensure_future(stop.wait())
        stopping.add_done_callback(lambda _: self._news.set())
        try:
            while not stop.is_set():
                self._news.clear()
                await self._turn()
                self._routing.leases.on_news = self._news.set if self.replication.peers else None
                timer = loop.call_later(max(0.0, self.replication.due_s() - self._clock.now()), self._news.set)
                await self._news.wait()
                timer.cancel()
                await self._clock.sleep(FLUSH_S)  # for more news
        finally:
            stopping.cancel()
        await self._turn()

    async def _turn(self) -> None:
        now_s = self._clock.now()
        self._read_news()
        if not self._event_log.is_connected:
            self.replication.restart_silence(now_s)
        self._take(self.replication.tick(now_s))
        while self._outgoing:
            subject, data = self._outgoing.popleft()
            try:
                await self._event_log.announce(subject, data)
                self.replication.counts["sent"] += 1
            except BrokerUnavailable as error:
                self.replication.counts["unsent"] += 1
                _log.debug("ledger_message_lost", subject=subject, reason=str(error))

    def _take(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, LedgerApplied):
                self._routing.apply(effect)
                continue
            subject = subjects.ledger_of(effect.to) if effect.to else subjects.LEDGER
            self._outgoing.append((subject, encode_replica(effect.message)))
            if len(self._outgoing) > OUTGOING_MAX:
                self._outgoing.popleft()
                self.replication.counts["unsent"] += 1

    async def _on_message(self, message: LogMessage) -> None:
        try:
            received = decode_replica(message.data)
        except MalformedMessage as error:
            self.replication.counts["refused"] += 1
            reason, subject = str(error), message.subject
            self._refusals.warning("message_refused", key=subject, subject=subject, reason=reason)
            return
        self._read_news()
        due_s = self.replication.due_s()
        self._take(self.replication.on_message(received, self._clock.now()))
        if self._outgoing or self.replication.due_s() < due_s:
            self._news.set()

    def families(self) -> Iterator[Family]:
        """Yield the metrics."""
        counts = self.replication.counts
        messages = {outcome: counts[outcome] for outcome in ("sent", "unsent", "heard", "refused")}
        doubts = {cause: counts[cause] for cause in ("gap", "difference", "silence")}
        dumps = {role: counts[role] for role in ("asked", "taken", "given")}
        for name, meaning, label, found in (
            ("messages", "Ledger messages between routers, by outcome", "outcome", messages),
            ("doubts", "Times that the known leases of another router were in doubt, by cause", "cause", doubts),
            ("dumps", "Whole ledgers requested from, taken from and given to other routers", "role", dumps),
        ):
            yield counter(f"replica_{name}", meaning, (label,), by_name((), found))
        for field in Skew._fields:
            meaning = "Difference between the leases that a router last stated and those known of it"
            by_router = {router: getattr(peer.skew, field) for router, peer in self.replication.peers.items()}
            yield gauge(f"replica_skew_{field}", meaning, ("router",), by_name((), by_router))
