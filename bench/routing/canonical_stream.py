"""The numbered canonical stream of a simulated engine whose block hashes are sequence hashes already.

    engine event                      published
    stored                            its full blocks; partial ones are not remembered either
    removed                           from the tier where each block is
    updated, to another cache level   stored on the one tier, then removed from the other

So do an agent's rules for TensorRT-LLM: `worker_agent/events/dialects/`.
"""

from collections.abc import Iterator
from typing import NamedTuple

from kv_protocol.events import Batch, Event, Removed, Stored, Tier
from worker_agent.engines.simulated.events import BlocksRemoved, BlocksStored, BlockUpdated, EngineEvent

EPOCH = 1


class _Held(NamedTuple):
    parent: int | None
    position: int
    tier: Tier


class CanonicalStream:
    """Turns the events of one rank into batches."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._held: dict[int, _Held] = {}
        self.seq = 0

    def of(self, engine_event: EngineEvent) -> Iterator[Batch]:
        """Yield the batches of an engine event, in order."""
        for event in self._events(engine_event.data):
            self.seq += 1
            yield Batch(EPOCH, self.seq, event)

    def _events(self, data: object) -> Iterator[Event]:
        if isinstance(data, BlocksStored):
            yield from self._stored(data)
        elif isinstance(data, BlocksRemoved):
            yield from self._removed(data)
        elif isinstance(data, BlockUpdated) and data.cache_level is not None:
            yield from self._moved(data.block_hash, Tier(data.cache_level.new_value))

    def _stored(self, data: BlocksStored) -> Iterator[Event]:
        hashes = tuple(block.block_hash for block in data.blocks if len(block.tokens) == self._block_size)
        if not hashes:
            return
        start = 0 if data.parent_hash is None else self._held[data.parent_hash].position + 1
        parent = data.parent_hash
        for position, each in enumerate(hashes, start):
            self._held[each] = _Held(parent, position, Tier.GPU)
            parent = each
        yield Stored(hashes, data.parent_hash, start)

    def _removed(self, data: BlocksRemoved) -> Iterator[Event]:
        known = [(each, self._held.pop(each).tier) for each in data.block_hashes if each in self._held]
        for tier in (Tier.GPU, Tier.HOST):
            gone = tuple(each for each, held_on in known if held_on is tier)
            if gone:
                yield Removed(gone, tier)

    def _moved(self, block_hash: int, tier: Tier) -> Iterator[Event]:
        held = self._held.get(block_hash)
        if held is None or held.tier is tier:
            return
        self._held[block_hash] = held._replace(tier=tier)
        yield Stored((block_hash,), held.parent, held.position, tier)
        yield Removed((block_hash,), held.tier)
