"""What an index holds, against what the rank's own mirror does, though both go on meanwhile. Pure.

    index    what it held at its place i, and what is wrong with the rank as far as it knows
    mirror   what the rank held at its place m, and the batches i + 1 .. m of its stream
    equal    i is in the mirror's epoch and not beyond m; the index has no doubt; every one of the batches was possible
             where the index was; and with them the index holds, block by block, what the mirror does

A batch is a change: what it stores was not held on that tier, and what it removes was.
"""

from collections.abc import Iterable
from typing import NamedTuple

from kv_protocol.events import Batch, Cleared, Event, Removed, Stored, Tier
from kv_protocol.recovery import HeldBlock

_SHOWN = 3


class Place(NamedTuple):
    """A place in a rank's stream."""

    epoch: int
    seq: int


class Held(NamedTuple):
    """What a rank held at a place, as its mirror or an index says; `stale` says why an index doubts that."""

    place: Place
    blocks: frozenset[HeldBlock]
    stale: str = ""


def difference(index: Held, mirror: Held, batches: Iterable[Batch]) -> str:
    """Return how the index differs from the mirror; empty when they are equal. `batches` may go beyond the mirror."""
    if index.place.epoch != mirror.place.epoch or index.place.seq > mirror.place.seq:
        return f"the index is at {index.place}, the mirror at {mirror.place}"
    if index.stale:
        return f"stale: {index.stale}"
    between = {batch.seq: batch.event for batch in batches if index.place.seq < batch.seq <= mirror.place.seq}
    if len(between) < mirror.place.seq - index.place.seq:
        return f"batches {index.place.seq + 1}..{mirror.place.seq}: found {sorted(between)}"
    return _block_difference(index.blocks, [between[seq] for seq in sorted(between)], mirror.blocks)


def _block_difference(index: Iterable[HeldBlock], events: Iterable[Event], mirror: frozenset[HeldBlock]) -> str:
    holding = _Holding(index)
    for event in events:
        if impossible := holding.apply(event):
            return impossible
    blocks = holding.blocks()
    sides = (("the index alone", blocks - mirror), ("the mirror alone", mirror - blocks))
    return "; ".join(f"{len(only)} held by {whose}: {sorted(only)[:_SHOWN]}" for whose, only in sides if only)


class _Holding:
    """Blocks, and what batches make of them."""

    def __init__(self, blocks: Iterable[HeldBlock]) -> None:
        self._blocks = {block.sequence_hash: block for block in blocks}

    def blocks(self) -> frozenset[HeldBlock]:
        return frozenset(self._blocks.values())

    def apply(self, event: Event) -> str:
        """Apply a change; return what was impossible about it."""
        match event:
            case Stored():
                parents = (event.parent, *event.sequence_hashes)
                return self._store(zip(event.sequence_hashes, parents, strict=False), event.tier)
            case Removed():
                return self._remove(event.sequence_hashes, event.tier)
            case Cleared():
                return self._remove([each for each in self._blocks if self._bits(each) >> event.tier & 1], event.tier)

    def _bits(self, sequence_hash: int) -> int:
        block = self._blocks.get(sequence_hash)
        return block.tier_bits if block else 0

    def _store(self, blocks: Iterable[tuple[int, int | None]], tier: Tier) -> str:
        for sequence_hash, parent in blocks:
            if self._bits(sequence_hash) >> tier & 1:
                return f"{sequence_hash} was stored, and the index had it already"
            present = self._blocks.get(sequence_hash, HeldBlock(sequence_hash, parent, 0))
            self._blocks[sequence_hash] = present._replace(tier_bits=present.tier_bits | 1 << tier)
        return ""

    def _remove(self, sequence_hashes: Iterable[int], tier: Tier) -> str:
        for sequence_hash in sequence_hashes:
            if not self._bits(sequence_hash) >> tier & 1:
                return f"{sequence_hash} was removed, and the index had it not"
            left = self._blocks[sequence_hash].tier_bits & ~(1 << tier)
            self._blocks[sequence_hash] = self._blocks[sequence_hash]._replace(tier_bits=left)
            if not left:
                del self._blocks[sequence_hash]
        return ""
