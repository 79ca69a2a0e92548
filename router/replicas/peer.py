"""The leases of one run of another router, as its messages state them, and whether they are reliable.

seq        messages up to this one are folded in; `latest_seq` is the highest that is known to exist
behind     seq < latest_seq: a message was missed. `differs`: a beat at `seq` states other sums
doubt      behind, or differs: the router's open leases are requested, and again every `ASK_AGAIN_S`
buffered   messages that came while in doubt, or that show a gap: those after the answer's `seq` are folded into it
answer     to the newest request; once all its parts have come, its leases replace the known ones at once

The log keeps the order of a router's messages, so that a message out of order shows a loss.
"""

from collections.abc import Callable, Collection, Iterable
from math import inf
from typing import NamedTuple, TypeVar

import msgspec

from kv_protocol.ledger import (
    BYTES_MAX,
    EVENTS_MAX,
    PARTS_MAX,
    Finished,
    FirstToken,
    LeaseEvent,
    LedgerBeat,
    LedgerOpen,
    LedgerTold,
    OpenLease,
    Renewed,
    Routed,
    lease_digest,
)
from kv_protocol.splitmix import U64_MASK
from router.prompt.chains import BLOCK_BYTES, block_count

_EVENT_BYTES = 384
"""Upper bound of an event's size without its blocks and its session."""

T = TypeVar("T")
ASK_AGAIN_S = 0.25
BUFFERED_MAX = 256
LEASES_MAX = 1 << 16
LEASE_BLOCKS_MAX = 1 << 26
"""Limits of one router's leases; beyond them the leases are not requested, as the answer could not be stored.

Blocks have 8 bytes each: 512 MiB.
"""


def cut(routed: Routed, blocks_max: int) -> Routed:
    """Return the event with `blocks_max` hashes at most: further blocks are only counted."""
    blocks = routed.blocks[: blocks_max * BLOCK_BYTES]
    hidden = block_count(routed.blocks) - block_count(blocks)
    return msgspec.structs.replace(routed, blocks=blocks, extra_blocks=routed.extra_blocks + hidden)


class OpenLeases(dict[str, OpenLease]):
    """Open leases by their ids, and their sums: a fold over `LeaseEvent`s. Only `put` and `fold` change it."""

    def __init__(self) -> None:
        super().__init__()
        self.digest = self.queued_tokens = self.blocks = 0

    def put(self, lease: OpenLease) -> None:
        """Add a lease that was not open before."""
        self[lease.routed.lease_id] = lease
        self._count(lease, 1)

    def fold(self, event: LeaseEvent) -> bool:
        """Fold the event in; return whether it was valid: `Routed` needs a new lease, any other event an open one."""
        known = self.get(event.lease_id)
        if isinstance(event, Routed):
            if known is None:
                self.put(OpenLease(event, is_prefilled=False))
            return known is None
        if known is None:
            return False
        if not isinstance(event, Renewed):
            del self[event.lease_id]
            self._count(known, -1)
        if isinstance(event, FirstToken):
            self.put(OpenLease(known.routed, is_prefilled=True))
        return True

    def _count(self, lease: OpenLease, times: int) -> None:
        routed = lease.routed
        digest = lease_digest(routed.lease_id, is_prefilled=lease.is_prefilled)
        self.digest = (self.digest + times * digest) & U64_MASK
        self.queued_tokens += times * (0 if lease.is_prefilled else routed.uncached_tokens)
        self.blocks += times * (block_count(routed.blocks) + routed.extra_blocks)


def split(events: Iterable[LeaseEvent]) -> list[tuple[LeaseEvent, ...]]:
    """Split the events into messages, each within `EVENTS_MAX` and, except for a single event, `BYTES_MAX`."""
    return _split(events, lambda event: _bytes_of(event) if isinstance(event, Routed) else 0)


def parts_of(leases: Collection[OpenLease]) -> list[tuple[OpenLease, ...]]:
    """Split the leases into parts of one answer, between 1 and `PARTS_MAX`; if necessary without hashes."""
    parts = _split(leases, lambda lease: _bytes_of(lease.routed))
    if len(parts) > PARTS_MAX:
        named = (OpenLease(cut(lease.routed, 0), lease.is_prefilled) for lease in leases)
        parts = _split(named, lambda lease: _bytes_of(lease.routed))[:PARTS_MAX]
    return parts or [()]


def _bytes_of(routed: Routed) -> int:
    return len(routed.blocks) + 4 * len(routed.session_id)


def _split(items: Iterable[T], bytes_of: Callable[[T], int]) -> list[tuple[T, ...]]:
    messages: list[list[T]] = []
    remaining_bytes = 0
    for item in items:
        needed = _EVENT_BYTES + bytes_of(item)
        if not messages or needed > remaining_bytes or len(messages[-1]) == EVENTS_MAX:
            messages.append([])
            remaining_bytes = BYTES_MAX
        messages[-1].append(item)
        remaining_bytes -= needed
    return [tuple(each) for each in messages]


class Skew(NamedTuple):
    """Difference between a router's stated sums and the sums known of it."""

    requests: int = 0
    blocks: int = 0
    queued_tokens: int = 0


class Peer:
    """One run of another router. Its methods return the changes to apply to this router's ledger."""

    def __init__(self, life: int, now_s: float) -> None:
        self.life = life
        self.received_at_s = now_s
        self.seq = self.latest_seq = 0
        self.differs = self.is_overfull = False
        self.open = OpenLeases()
        self.skew = Skew()
        self.number = 0
        """Number of the newest request: only its answer counts."""
        self._ask_from_s = -inf
        self._buffered: dict[int, tuple[LeaseEvent, ...]] = {}
        self._parts: dict[int, LedgerOpen] = {}

    @property
    def is_behind(self) -> bool:
        """Whether a message was missed."""
        return self.seq < self.latest_seq

    @property
    def is_in_doubt(self) -> bool:
        """Whether the known leases may be wrong."""
        return self.is_behind or self.differs

    def on_events(self, message: LedgerTold) -> list[LeaseEvent]:
        """Fold the events in if they are the next ones; return those that change something."""
        if message.seq <= self.seq:
            return []
        is_next = message.seq == self.seq + 1
        if is_next and not self.is_in_doubt:
            self._buffered.clear()
        else:
            self._buffered[message.seq] = message.events
            if len(self._buffered) > BUFFERED_MAX:
                del self._buffered[next(iter(self._buffered))]
        self.latest_seq = max(self.latest_seq, message.seq)
        if not is_next:
            return []
        self.seq = message.seq
        return [event for event in message.events if self._fold(self.open, event)]

    def _fold(self, leases: OpenLeases, event: LeaseEvent) -> bool:
        if _is_full(leases) and event.lease_id not in leases:
            self.is_overfull = True
            return False
        return leases.fold(event)

    def beat(self, message: LedgerBeat) -> None:
        """Compare the stated sums with the known ones."""
        if message.seq < self.seq:
            return
        self.latest_seq = max(self.latest_seq, message.seq)
        self.is_overfull = message.leases > LEASES_MAX or message.blocks > LEASE_BLOCKS_MAX
        self.skew = Skew(
            abs(message.leases - len(self.open)),
            abs(message.blocks - self.open.blocks),
            abs(message.queued_tokens - self.open.queued_tokens),
        )
        if message.seq == self.seq:
            self.differs = (message.leases, message.digest) != (len(self.open), self.open.digest)

    @property
    def request_due_s(self) -> float:
        """The time at which the router's leases should be requested; inf: they need not be."""
        return self._ask_from_s if self.is_in_doubt and not self.is_overfull else inf

    def new_request(self, now_s: float) -> int:
        """Return the number of a new request; answers to former ones are ignored."""
        self._ask_from_s = now_s + ASK_AGAIN_S
        self.number += 1
        self._parts.clear()
        return self.number

    def answered(self, message: LedgerOpen) -> list[LeaseEvent] | None:
        """Return the changes once the answer is complete; None before, and for an unexpected answer."""
        if message.number != self.number or not self.is_in_doubt:
            return None
        if any((each.seq, each.parts) != (message.seq, message.parts) for each in self._parts.values()):
            self._parts.clear()
        self._parts[message.part] = message
        if len(self._parts) < message.parts:
            return None
        leases = OpenLeases()
        for part in self._parts.values():
            for lease in part.leases:
                if lease.routed.lease_id not in leases and not _is_full(leases):
                    leases.put(lease)
        return self._replaced(leases, message.seq)

    def _replaced(self, leases: OpenLeases, seq: int) -> list[LeaseEvent] | None:
        """Replace the leases by the answer's, which were open at `seq`, and fold in the buffered messages after it."""
        while (events := self._buffered.get(seq + 1)) is not None:
            seq += 1
            for event in events:
                self._fold(leases, event)
        if seq < self.seq:  # the answer was delayed: newer messages were applied
            return None
        news = difference(self.open, leases)
        self._buffered = {
            number: events for number, events in self._buffered.items() if seq < number <= seq + BUFFERED_MAX
        }
        self.open, self.seq, self.latest_seq = leases, seq, max(self._buffered, default=seq)
        self.differs = False
        self.number += 1  # a second copy of the answer does not count
        self._parts.clear()
        return news


def _is_full(leases: OpenLeases) -> bool:
    return len(leases) >= LEASES_MAX or leases.blocks >= LEASE_BLOCKS_MAX


def difference(known: OpenLeases, current: OpenLeases) -> list[LeaseEvent]:
    """Return the events that turn `known` into `current`; ends come first."""
    kept = {
        lease_id: before
        for lease_id, before in known.items()
        if (lease := current.get(lease_id)) is not None
        and lease.routed == before.routed
        and lease.is_prefilled >= before.is_prefilled
    }
    events: list[LeaseEvent] = [Finished(lease_id=lease_id) for lease_id in known if lease_id not in kept]
    for lease_id, lease in current.items():
        before = kept.get(lease_id)
        if before is None:
            events.append(lease.routed)
        if lease.is_prefilled and not (before is not None and before.is_prefilled):
            events.append(FirstToken(lease_id=lease_id))
    return events
