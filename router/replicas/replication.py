"""The state machine by which routers exchange leases; `service.py` connects it to the network.

    own event        sent with the next message (`flush`), in its order
    no peers         only the beat is sent. A router that joins receives the beat and asks, and is discovered by its
                     own beat
    every BEAT_S     the beat: the last sequence number sent, and the sums of the own leases (count, digest)
    received         Told: the events of another router's leases are applied, in its order, each once
                     Beat: missed messages are detected (`peer.py`), also if no message follows them
                     Asked: answered with all own leases, to one router at most every `ANSWER_S`
                     Open: the answer; it replaces what is known of that router at once
    SILENT_S         without a message of a router, while the log is connected: its leases end
    a restarted router: the leases of its former run end, that run's messages are refused; own messages are ignored

So replicas agree once no event is in transit: a lost message is detected at the next beat, at most `BEAT_S` later, and
repaired by one request and one answer. Routers never correct each other's leases; only the owner reports a lease.
"""

from collections import Counter
from math import inf
from typing import Literal, NamedTuple

from kv_protocol.journal import LedgerApplied
from kv_protocol.ledger import (
    BEAT_S,
    BLOCKS_MAX,
    Expired,
    LeaseEvent,
    LedgerAsked,
    LedgerBeat,
    LedgerOpen,
    LedgerTold,
    ReplicaMessage,
    Routed,
)
from router.replicas.peer import OpenLeases, Peer, cut, parts_of, split

SILENT_S = 5.0
ANSWER_S = 0.1
PEERS_MAX = 64
PENDING_MAX = 8192


class Outgoing(NamedTuple):
    """A message to send: to one router, or to all if `to` is empty."""

    message: ReplicaMessage
    to: str = ""


Effect = Outgoing | LedgerApplied
"""A message to send, or an event of another router's lease to apply."""
Counted = Literal["sent", "unsent", "heard", "refused", "gap", "difference", "silence", "asked", "taken", "given"]
"""What is counted: messages, by outcome; doubts, by cause; requests for all leases, and answers to them."""


class Replication:
    """One router's part in replication. `life` is the time at which it began, in ns."""

    def __init__(self, router: str, life: int) -> None:
        self._router, self._life = router, life
        self._own = OpenLeases()
        self._seq = 0
        self._pending: list[LeaseEvent] = []
        self._beat_due_s = -inf
        self.peers: dict[str, Peer] = {}
        """Routers that sent a message lately: without any, events need not be sent at once."""
        self._answered_at_s: dict[str, float] = {}
        self.counts: Counter[Counted] = Counter()

    # ------------------------------------------------------------ our own leases

    def on_lease_event(self, event: LeaseEvent) -> None:
        """Queue an event of a lease of this router for sending.

        The own ledger may also end (`Expired`) a lease of another router. This is not sent: if that router still has
        the lease, a later answer restores it.
        """
        if isinstance(event, Expired) and any(peer.open.fold(event) for peer in self.peers.values()):
            return
        sent = cut(event, BLOCKS_MAX) if isinstance(event, Routed) else event
        if not self._own.fold(sent):
            return
        self._pending.append(sent)
        if len(self._pending) > PENDING_MAX:
            self._pending.clear()
            self._seq += 1  # a message that is never sent: peers will detect that

    def flush(self) -> list[Outgoing]:
        """Return messages with all pending events; without peers, drop the events."""
        pending, self._pending = self._pending, []
        outgoing = list[Outgoing]()
        for events in split(pending) if self.peers else ():
            self._seq += 1
            outgoing.append(Outgoing(LedgerTold(router=self._router, life=self._life, seq=self._seq, events=events)))
        return outgoing

    def restart_silence(self, now_s: float) -> None:
        """Restart the silence timers: no message could be received until now."""
        for peer in self.peers.values():
            peer.received_at_s = now_s

    def tick(self, now_s: float) -> list[Effect]:
        """Return the messages to send and the endings to apply now."""
        is_beat_due = now_s >= self._beat_due_s
        effects: list[Effect] = [*self.flush()] if self.peers or is_beat_due else []
        if is_beat_due:
            self._beat_due_s = now_s + BEAT_S
            own = self._own
            beat = LedgerBeat(
                router=self._router,
                life=self._life,
                seq=self._seq,
                leases=len(own),
                digest=own.digest,
                queued_tokens=own.queued_tokens,
                blocks=own.blocks,
            )
            effects.append(Outgoing(beat))
        for name, peer in list(self.peers.items()):
            if now_s - peer.received_at_s >= SILENT_S:
                self.counts["silence"] += 1
                effects += self._parted(name, now_s)
            elif now_s >= peer.request_due_s:
                self.counts["asked"] += 1
                effects.append(Outgoing(LedgerAsked(router=self._router, number=peer.new_request(now_s)), name))
        return effects

    def due_s(self) -> float:
        """Return the time at which `tick` has something to do, unless there is news before."""
        of_peers = (min(peer.request_due_s, peer.received_at_s + SILENT_S) for peer in self.peers.values())
        return min((self._beat_due_s, *of_peers))

    # ------------------------------------------------------------ theirs

    def on_message(self, message: ReplicaMessage, now_s: float) -> list[Effect]:
        """Return the effects of a message to all routers or to this one."""
        self.counts["heard"] += 1
        if message.router == self._router:
            self.counts["refused"] += not isinstance(message, LedgerAsked) and message.life != self._life  # a namesake
            return []
        if isinstance(message, LedgerAsked):
            return self._answer(message, now_s)
        effects: list[Effect] = []
        peer = self.peers.get(message.router)
        if peer is not None and message.life > peer.life:
            effects, peer = self._parted(message.router, now_s), None
        if peer is None:
            if len(self.peers) >= PEERS_MAX:
                self.counts["refused"] += 1
                return effects
            peer = self.peers[message.router] = Peer(message.life, now_s)
        if message.life < peer.life:
            self.counts["refused"] += 1
            return effects
        peer.received_at_s = max(now_s, peer.received_at_s)
        return effects + self._taken(message, peer, now_s)

    def _taken(self, message: LedgerTold | LedgerBeat | LedgerOpen, peer: Peer, now_s: float) -> list[Effect]:
        was_behind, differed = peer.is_behind, peer.differs
        news: list[LeaseEvent] = []
        if isinstance(message, LedgerTold):
            news = peer.on_events(message)
        elif isinstance(message, LedgerBeat):
            peer.beat(message)
        elif (replaced := peer.answered(message)) is not None:
            self.counts["taken"] += 1
            news = replaced
        self.counts["gap"] += peer.is_behind and not was_behind
        self.counts["difference"] += peer.differs and not differed
        return [LedgerApplied(now_s=now_s, event=event, router=message.router) for event in news]

    def _parted(self, name: str, now_s: float) -> list[Effect]:
        """Forget a router; return the endings of its leases."""
        ended = self.peers.pop(name).open
        return [LedgerApplied(now_s=now_s, event=Expired(lease_id=lease_id), router=name) for lease_id in ended]

    def _answer(self, message: LedgerAsked, now_s: float) -> list[Effect]:
        """Return pending events, then all own leases in parts; nothing if it, or too many, asked within `ANSWER_S`."""
        recent = {name: at_s for name, at_s in self._answered_at_s.items() if now_s - at_s < ANSWER_S}
        self._answered_at_s = recent
        if message.router in recent or len(recent) >= PEERS_MAX:
            self.counts["refused"] += 1
            return []
        recent[message.router] = now_s
        self.counts["given"] += 1
        effects: list[Effect] = [*self.flush()]
        parts = parts_of(self._own.values())
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
            effects.append(Outgoing(part, message.router))
        return effects
