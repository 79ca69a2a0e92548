"""Exchanges leases with the other routers of the fleet over core NATS.

    news           what happened to own leases is read at each turn, and goes to all others
    record(applied)    the end of a lease by the ledger: an own one's goes to all others, another router's is noted
    theirs         events of another router's leases are applied here

One `Replication` per model decides (`replication.py`); this module is its network. While there are peers, news wait
`FLUSH_S` for further ones. Without peers there is one turn per beat, and a lease that ends before the next is never
looked at. While the log is away nothing is sent, and silence is ignored; once it is back, the next beat shows the
others what they missed.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from operator import add

import structlog

from kv_protocol import subjects
from kv_protocol.errors import MalformedMessage
from kv_protocol.journal import JournalRecord, LedgerApplied
from kv_protocol.ledger import (
    BEAT_S,
    ENDINGS,
    Cancelled,
    Expired,
    Finished,
    FirstToken,
    LeaseEvent,
    Renewed,
    Routed,
    decode_replica,
    encode_replica,
)
from kv_runtime.event_log import BrokerUnavailable, EventLog, LogMessage
from kv_runtime.supervise import until
from kv_runtime.telemetry import Family, RateLimitedLog, by_name, counter, gauge
from router.decision.routing import Routing
from router.replicas.peer import Skew
from router.replicas.replication import Apply, Counted, Effect, Replication

TICK_S = 0.1
FLUSH_S = 0.005
MODELS_MAX = 256
OUTGOING_MAX = 1024
"""Messages; beyond them the oldest are dropped, which the other routers detect."""

_NEWS: dict[str, Callable[..., LeaseEvent]] = {
    "first_token": FirstToken,
    "renewed": Renewed,
    "finished": Finished,
    "cancelled": Cancelled,
}
"""The events that `built.Leases.news` names."""

_slug = lru_cache(MODELS_MAX)(subjects.model_slug)
_log = structlog.get_logger("router")


class Replicas:
    """One router's part in the shared ledger; a part of a process: `run` sends, and applies the passing of time."""

    def __init__(self, routing: Routing, log: EventLog, router_id: str) -> None:
        """Create it; `start` subscribes. `router_id` is unique in the fleet: letters, digits and dashes."""
        self._routing, self._event_log, self._clock = routing, log, routing.clock
        self._refusals = RateLimitedLog(_log, self._clock)
        self._router_id, self._life = router_id, self._clock.wall_ns()
        """The wall time identifies this run of the router."""
        routing.records.append(self.record)
        self._replications: dict[str, Replication] = {}
        self._of_lease: dict[str, Replication] = {}
        self._outgoing: deque[tuple[str, bytes]] = deque()
        self._news = asyncio.Event()
        self.unsent_total = self.refused_total = 0
        """Messages that could not be sent, or read."""

    async def start(self) -> None:
        """Subscribe to the messages of the other routers."""
        await self._event_log.listen(subjects.LEDGER_ALL, self._on_message)
        await self._event_log.listen(subjects.ledger_of("*", self._router_id), self._on_message)

    def record(self, what: JournalRecord) -> None:
        """Note the end of a lease, or tell of it; implements `Recorder`."""
        if type(what) is LedgerApplied and not what.router and isinstance(what.event, Expired):
            self._read_news()
            self.tell(what.event)

    def _read_news(self) -> None:
        """Tell the replications what happened to own leases since the last call."""
        events, begun = self._routing.leases.news()
        for tag, lease_id in events:
            self.tell(_NEWS[tag](lease_id=lease_id))
        for verdict, is_prefilled in begun:
            self.tell(verdict.promise)
            if is_prefilled:
                self.tell(FirstToken(lease_id=verdict.decision_id))

    def tell(self, event: LeaseEvent) -> None:
        """Send an event of an own lease with the next messages."""
        if isinstance(event, Routed):
            worker = self._routing.state.fleet.worker(event.worker_id)
            replication = None if worker is None else self._replication(_slug(worker.registration.model))
            if replication is not None:
                self._of_lease[event.lease_id] = replication
        elif isinstance(event, ENDINGS):
            replication = self._of_lease.pop(event.lease_id, None)
        else:
            replication = self._of_lease.get(event.lease_id)
        if replication is not None:
            replication.on_lease_event(event)
        elif isinstance(event, Expired):  # perhaps of another router's lease
            for each in self._replications.values():
                each.ended(event.lease_id)

    def _replication(self, slug: str) -> Replication | None:
        known = self._replications.get(slug)
        if known is None and len(self._replications) < MODELS_MAX:
            known = self._replications[slug] = Replication(self._router_id, self._life)
        return known

    async def run(self, stop: asyncio.Event) -> None:
        """Send and apply the passing of time until `stop` is set; pending events are then sent, if possible."""
        while not stop.is_set():
            self._news.clear()
            await self._turn()
            await until(stop, self._pause())
        await self._turn()

    async def _pause(self) -> None:
        """Wait for news, and a moment for more of them; or until the next turn is due."""
        is_alone = not any(each.peers for each in self._replications.values())
        self._routing.leases.on_news = None if is_alone else self._news.set
        with suppress(TimeoutError):
            async with asyncio.timeout(BEAT_S if is_alone else TICK_S):
                await self._news.wait()
            await self._clock.sleep(FLUSH_S)

    async def _turn(self) -> None:
        now_s = self._clock.now()
        self._read_news()
        for slug, replication in self._replications.items():
            if not self._event_log.is_connected:
                replication.deaf(now_s)
            self._take(slug, replication.tick(now_s))
        while self._outgoing:
            subject, data = self._outgoing.popleft()
            try:
                await self._event_log.announce(subject, data)
            except BrokerUnavailable as error:
                self.unsent_total += 1
                _log.debug("ledger_message_lost", subject=subject, reason=str(error))

    def _take(self, slug: str, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Apply):
                applied = LedgerApplied(now_s=self._clock.now(), event=effect.event, router=effect.origin)
                self._routing.apply(applied)
                continue
            subject = subjects.ledger_of(slug, effect.to) if effect.to else subjects.ledger(slug)
            self._outgoing.append((subject, encode_replica(effect.message)))
            if len(self._outgoing) > OUTGOING_MAX:
                self._outgoing.popleft()
                self.unsent_total += 1

    async def _on_message(self, message: LogMessage) -> None:
        try:
            received = decode_replica(message.data)
        except MalformedMessage as error:
            self._refuse(message, str(error))
            return
        slug = subjects.slug_of(message.subject)
        replication = self._replication(slug)
        if replication is None:
            self._refuse(message, f"more than {MODELS_MAX} models")
            return
        self._read_news()
        self._take(slug, replication.on_message(received, self._clock.now()))
        if self._outgoing:
            self._news.set()

    def _refuse(self, message: LogMessage, reason: str) -> None:
        self.refused_total += 1
        self._refusals.warning("message_refused", key=message.subject, subject=message.subject, reason=reason)

    def counts(self) -> Counter[Counted]:
        """Return what was counted, over all models."""
        return sum((each.counts for each in self._replications.values()), Counter[Counted]())

    def skew(self) -> dict[str, Skew]:
        """Return each router's skew, over all models."""
        skews: dict[str, Skew] = {}
        for router, skew in (found for each in self._replications.values() for found in each.skew().items()):
            skews[router] = Skew(*map(add, skew, skews.get(router, Skew())))
        return skews


def replica_families(replicas: Replicas) -> Iterator[Family]:
    """Yield the metrics of replication, over all models."""
    counts, unsent = replicas.counts(), replicas.unsent_total
    messages = {
        "sent": counts["sent"] - unsent,
        "unsent": unsent,
        "heard": counts["heard"],
        "refused": counts["refused"] + replicas.refused_total,
    }
    doubts = {cause: counts[cause] for cause in ("gap", "difference", "silence")}
    dumps = {role: counts[role] for role in ("asked", "taken", "given")}
    for name, meaning, label, found in (
        ("messages", "Ledger messages between routers, by outcome", "outcome", messages),
        ("doubts", "Times that the known leases of another router were in doubt, by cause", "cause", doubts),
        ("dumps", "Whole ledgers requested from, taken from and given to other routers", "role", dumps),
    ):
        yield counter(f"replica_{name}", meaning, (label,), by_name((), found))
    skews = replicas.skew()
    for field in Skew._fields:
        meaning = "Difference between the leases that a router last stated and those known of it"
        by_router = {router: getattr(skew, field) for router, skew in skews.items()}
        yield gauge(f"replica_skew_{field}", meaning, ("router",), by_name((), by_router))
