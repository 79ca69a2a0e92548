"""The state machine of replication: leases told between routers, for one model, without a network.

    told       an event of an own lease: goes out with the next message (`flush`), in its order
    alone      while no other router was heard nothing but the beat goes out, and of a lease that ends before it nothing
               is left. Whoever comes hears the beat and asks, and is heard by its own beat
    every BEAT_S     how far was told, and what the own leases come to (count, digest)
    heard      Told: the events of another router's leases are applied, in its order, each once
               Beat: what was missed is found out (`peer.py`), also where nothing comes after it
               Asked: answered with all own leases, to one router at most every `ANSWER_S`
               Open: the answer; what is known of that router becomes what it says, at once
    SILENT_S   without a word of a router, while others could be heard (not `deaf`): its leases end
    a new life of a router: the leases of the former one end. Of two lives the later counts; its own echo is not heard

So replicas agree once nobody has news: a lost message is found out at the next beat, at most `BEAT_S` later, and
healed by one question and one answer. Routers never correct each other's leases; every lease is told of by its owner.
"""

from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple, get_args

from kv_protocol.ledger import ENDINGS, Expired, LeaseEvent, Routed
from kv_protocol.replicas import (
    BEAT_S,
    LedgerAsked,
    LedgerBeat,
    LedgerOpen,
    LedgerTold,
    ReplicaMessage,
)
from router.replicas.open_leases import OpenLeases, announced_event, parts_of, split
from router.replicas.peer import Peer, Skew

SILENT_S = 5.0
ANSWER_S = 0.1
PEERS_MAX = 64
PENDING_MAX = 8192
_ENDINGS = get_args(ENDINGS)


class Say(NamedTuple):
    """A message is to be sent; to one router, or to all (empty)."""

    message: ReplicaMessage
    to: str = ""


class Apply(NamedTuple):
    """An event of another router's lease is to be applied."""

    event: LeaseEvent
    origin: str


Effect = Say | Apply


class ReplicaStatistics(NamedTuple):
    """Of one model. Messages sent and heard; what was missed and asked for; `skew` by router, at its newest beat."""

    own_leases: int
    sent_total: int
    received_total: int
    refused_total: int
    gaps_total: int
    differences_total: int
    requested_total: int
    replaced_total: int
    answered_total: int
    silent_total: int
    skew: dict[str, Skew]


class Replication:
    """One router's part in it, for one model. `life` is the time at which it began, in ns."""

    def __init__(self, router: str, life: int) -> None:
        self._router, self._life = router, life
        self._own = OpenLeases()
        self._seq = 0
        self._pending: list[LeaseEvent] = []
        self._fresh: dict[str, Routed] = {}  # leases that began while nobody else was there, and since the last beat
        self._beat_due_s: float | None = None
        self._peers: dict[str, Peer] = {}
        self._owners: dict[str, str] = {}  # of leases that were applied here, by their ids
        self._answered_at_s: dict[str, float] = {}
        self._sent = self._received = self._refused = self._gaps = self._differences = 0
        self._requested = self._replaced = self._answered = self._silent = 0

    # ------------------------------------------------------------ our own leases

    @property
    def has_no_peers(self) -> bool:
        """Whether no other router was heard of late: then nobody waits for news."""
        return not self._peers

    def on_lease_event(self, event: LeaseEvent) -> None:
        """The event happened to a lease of this router, and will be told."""
        if not self._peers:
            if type(event) is Routed and len(self._fresh) < PENDING_MAX:
                self._fresh[event.lease_id] = event
                return
            if type(event) in _ENDINGS and self._fresh.pop(event.lease_id, None) is not None:
                return
        self._pending.append(event)
        if len(self._pending) > PENDING_MAX:
            self._fold_pending()
            self._seq += 1  # a message that nobody ever gets: they will ask

    def ended(self, lease_id: str) -> None:
        """This router's own ledger ended a lease of another one; if that still has it, it will be heard of again."""
        owner = self._owners.pop(lease_id, None)
        if owner is not None:
            self._peers[owner].open.fold(Expired(lease_id=lease_id))

    def _fold_pending(self) -> list[LeaseEvent]:
        events_due: Iterable[LeaseEvent] = chain(self._fresh.values(), self._pending)
        events = [event for event in map(announced_event, events_due) if self._own.fold(event)]
        self._fresh.clear()
        self._pending.clear()
        return events

    def flush(self) -> list[Say]:
        """Return the messages that tell what was not told yet; none where nobody is there to hear them."""
        events_of_all = self._fold_pending()
        if not self._peers:
            return []
        says = []
        for events in split(events_of_all):
            self._seq += 1
            says.append(Say(LedgerTold(router=self._router, life=self._life, seq=self._seq, events=events)))
        self._sent += len(says)
        return says

    def _beat(self) -> Say:
        own = self._own
        self._sent += 1
        return Say(
            LedgerBeat(
                router=self._router,
                life=self._life,
                seq=self._seq,
                leases=len(own),
                digest=own.digest,
                queued_tokens=own.queued_tokens,
                blocks=own.blocks,
            )
        )

    def deaf(self, now_s: float) -> None:
        """Nobody could be heard until now: that they were silent means nothing."""
        for peer in self._peers.values():
            peer.received_at_s = now_s

    def tick(self, now_s: float) -> list[Effect]:
        """Return what is to be told, asked and ended now; to be called every `ANSWER_S` or so."""
        is_beat_due = self._beat_due_s is None or now_s >= self._beat_due_s
        effects: list[Effect] = [*self.flush()] if self._peers or is_beat_due else []
        if is_beat_due:
            self._beat_due_s = now_s + BEAT_S
            effects.append(self._beat())
        for name, peer in list(self._peers.items()):
            if now_s - peer.received_at_s >= SILENT_S:
                self._silent += 1
                effects += self._parted(name)
            elif peer.is_request_due(now_s):
                effects.append(self._ask(name, peer, now_s))
        return effects

    # ------------------------------------------------------------ theirs

    def on_message(self, message: ReplicaMessage, now_s: float) -> list[Effect]:
        """Return what follows from a message, which came to all or to this router."""
        self._received += 1
        if message.router == self._router:
            self._refused += not isinstance(message, LedgerAsked) and message.life != self._life  # a namesake
            return []
        if isinstance(message, LedgerAsked):
            return self._answer(message, now_s)
        effects: list[Effect] = []
        peer = self._peers.get(message.router)
        if peer is not None and message.life > peer.life:
            effects, peer = self._parted(message.router), None
        if peer is None:
            if len(self._peers) >= PEERS_MAX:
                self._refused += 1
                return effects
            peer = self._peers[message.router] = Peer(message.life, now_s)
        if message.life < peer.life:
            self._refused += 1
            return effects
        peer.received_at_s = max(now_s, peer.received_at_s)
        return effects + self._taken(message, peer)

    def _taken(self, message: LedgerTold | LedgerBeat | LedgerOpen, peer: Peer) -> list[Effect]:
        was_behind, differed = peer.is_behind, peer.differs
        news: list[LeaseEvent] = []
        if isinstance(message, LedgerTold):
            news = peer.on_events(message)
        elif isinstance(message, LedgerBeat):
            peer.beat(message)
        elif (replaced := peer.answered(message)) is not None:
            self._replaced += 1
            news = replaced
        self._gaps += peer.is_behind and not was_behind
        self._differences += peer.differs and not differed
        return self._applied(message.router, news)

    def _ask(self, name: str, peer: Peer, now_s: float) -> Say:
        self._requested += 1
        self._sent += 1
        return Say(LedgerAsked(router=self._router, number=peer.new_request(now_s)), name)

    def _applied(self, name: str, events: Iterable[LeaseEvent]) -> list[Effect]:
        """Return the events of leases that are the router's: an id that somebody else has already is refused."""
        effects: list[Effect] = []
        for event in events:
            lease_id = event.lease_id
            if isinstance(event, Routed) and lease_id not in self._owners and lease_id not in self._own:
                self._owners[lease_id] = name
            if self._owners.get(lease_id) != name:
                self._refused += 1
                continue
            if isinstance(event, ENDINGS):
                del self._owners[lease_id]
            effects.append(Apply(event, name))
        return effects

    def _parted(self, name: str) -> list[Effect]:
        """The router is known no more; return the endings of its leases."""
        gone = self._peers.pop(name)
        ended: list[Effect] = []
        for lease in gone.open:
            lease_id = lease.routed.lease_id
            if self._owners.get(lease_id) == name:
                del self._owners[lease_id]
                ended.append(Apply(Expired(lease_id=lease_id), name))
        return ended

    def _answer(self, message: LedgerAsked, now_s: float) -> list[Effect]:
        """Return all own leases as they are now, in parts, behind what was not told yet."""
        recent = {name: at_s for name, at_s in self._answered_at_s.items() if now_s - at_s < ANSWER_S}
        self._answered_at_s = recent
        if message.router in recent or len(recent) >= PEERS_MAX:
            self._refused += 1
            return []
        recent[message.router] = now_s
        self._answered += 1
        effects: list[Effect] = [*self.flush()]
        parts = parts_of(self._own)
        for at, leases in enumerate(parts):
            part = LedgerOpen(
                router=self._router,
                life=self._life,
                seq=self._seq,
                number=message.number,
                part=at,
                parts=len(parts),
                leases=leases,
            )
            effects.append(Say(part, message.router))
        self._sent += len(parts)
        return effects

    def statistics(self) -> ReplicaStatistics:
        """Return the figures of this moment."""
        return ReplicaStatistics(
            own_leases=len(self._own),
            sent_total=self._sent,
            received_total=self._received,
            refused_total=self._refused,
            gaps_total=self._gaps,
            differences_total=self._differences,
            requested_total=self._requested,
            replaced_total=self._replaced,
            answered_total=self._answered,
            silent_total=self._silent,
            skew={name: peer.skew for name, peer in self._peers.items()},
        )
