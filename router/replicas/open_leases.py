"""The open leases of one router, as its replicas know them, and their sums."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import msgspec

from kv_protocol.ledger import FirstToken, LeaseEvent, Renewed, Routed
from kv_protocol.replicas import BLOCKS_MAX, BYTES_MAX, EVENTS_MAX, PARTS_MAX, OpenLease, lease_digest
from kv_protocol.splitmix import U64_MASK
from router.prompt.chains import BLOCK_BYTES, block_count

_EVENT_BYTES = 384
"""Upper bound of an event's size without its blocks and its session."""

T = TypeVar("T")


def announced_event(event: LeaseEvent) -> LeaseEvent:
    """Return the event as it is sent to replicas: a prompt that is too long for a message is cut."""
    if not isinstance(event, Routed) or block_count(event.blocks) <= BLOCKS_MAX:
        return event
    hidden = block_count(event.blocks) - BLOCKS_MAX
    blocks = event.blocks[: BLOCKS_MAX * BLOCK_BYTES]
    return msgspec.structs.replace(event, blocks=blocks, extra_blocks=event.extra_blocks + hidden)


class OpenLeases:
    """Open leases and their sums: a fold over `LeaseEvent`s."""

    def __init__(self) -> None:
        self._leases: dict[str, OpenLease] = {}
        self.digest = self.queued_tokens = self.blocks = 0

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[OpenLease]:
        return iter(self._leases.values())

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._leases

    def get(self, lease_id: str) -> OpenLease | None:
        """Return the lease if it is open, else None."""
        return self._leases.get(lease_id)

    def put(self, lease: OpenLease) -> None:
        """Add a lease that was not open before."""
        self._leases[lease.routed.lease_id] = lease
        self._count(lease, 1)

    def fold(self, event: LeaseEvent) -> bool:
        """Fold the event in; return whether it was valid: of a new lease, or of an open one."""
        known = self._leases.get(event.lease_id)
        if isinstance(event, Routed):
            if known is None:
                self.put(OpenLease(event, is_prefilled=False))
            return known is None
        if known is None:
            return False
        if not isinstance(event, Renewed):
            del self._leases[event.lease_id]
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


def parts_of(leases: Iterable[OpenLease]) -> list[tuple[OpenLease, ...]]:
    """Split the leases into parts of one answer, between 1 and `PARTS_MAX`; if necessary without hashes."""
    parts = _split(leases, lambda lease: _bytes_of(lease.routed))
    if len(parts) > PARTS_MAX:
        parts = _split(map(_without_hashes, leases), lambda lease: _bytes_of(lease.routed))[:PARTS_MAX]
    return parts or [()]


def _bytes_of(routed: Routed) -> int:
    return len(routed.blocks) + 4 * len(routed.session_id)


def _without_hashes(lease: OpenLease) -> OpenLease:
    routed = lease.routed
    blocks = block_count(routed.blocks) + routed.extra_blocks
    return OpenLease(msgspec.structs.replace(routed, blocks=b"", extra_blocks=blocks), lease.is_prefilled)


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
