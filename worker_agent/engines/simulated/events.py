"""KV events of one rank, in TensorRT-LLM's format and numbering.

    event_id    from 0, incremented for each event of the rank, without holes; a hole at a reader is an event lost later
    created     the first event: how many blocks the pool has on GPU and on host
    stored      new blocks in chain order; `parent_hash` is the block before the first of them
    removed     removals in a row, up to another event or the end of the iteration, are one event
    updated     a block that stays in the tree has moved between GPU (0) and host (1)

Sequences are lists here, because the engine's JSON has lists and `msgspec.to_builtins` leaves a tuple a tuple.
Source: `docs/SOURCES.md` E1.3 to E1.5.
"""

import msgspec

from kv_protocol.events import Tier
from worker_agent.engines.simulated.identity import Block

_PRIORITY = 35
"""Of every block: the engine's default retention priority. Source: `docs/SOURCES.md` E1.3."""


class UniqueToken(msgspec.Struct, frozen=True, gc=False, tag_field="type", tag="unique_token"):
    """One token of a block."""

    token_id: int
    token_extra_id: int = 0


class StoredBlock(msgspec.Struct, frozen=True, tag_field="type", tag="stored_block"):
    """One block, full or partial."""

    block_hash: int
    tokens: list[UniqueToken]
    cache_level: int = 0
    priority: int = _PRIORITY
    mm_keys: list[str] = []
    cache_salt: str | None = None


class PoolCreated(msgspec.Struct, frozen=True, tag_field="type", tag="created"):
    """The pool exists, empty."""

    num_blocks_per_cache_level: list[int]


class BlocksStored(msgspec.Struct, frozen=True, tag_field="type", tag="stored"):
    """The blocks can be reused from now on, except a partial last one."""

    parent_hash: int | None
    blocks: list[StoredBlock]


class BlocksRemoved(msgspec.Struct, frozen=True, tag_field="type", tag="removed"):
    """The blocks are no longer held."""

    block_hashes: list[int]


class EventDiff(msgspec.Struct, frozen=True, tag_field="type", tag="event_diff"):
    """A number changed."""

    new_value: int
    old_value: int


class BlockUpdated(msgspec.Struct, frozen=True, tag_field="type", tag="updated"):
    """The block is still held, on another level."""

    block_hash: int
    cache_level: EventDiff
    priority: None = None


EventData = PoolCreated | BlocksStored | BlocksRemoved | BlockUpdated


class EngineEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event. An engine of one rank omits `attention_dp_rank`."""

    event_id: int
    data: EventData
    window_size: int
    attention_dp_rank: int | msgspec.UnsetType = msgspec.UNSET


def stored_block(block: Block) -> StoredBlock:
    """Return the event data of a block that is stored on the GPU."""
    return StoredBlock(block.engine_hash, list(map(UniqueToken, block.key.tokens)), cache_salt=block.key.cache_salt)


class RankEventLog:
    """Numbers the events of one rank's pool, and keeps them until they are taken, once per iteration."""

    def __init__(self, window_size: int, attention_dp_rank: int | msgspec.UnsetType = msgspec.UNSET) -> None:
        self._window_size, self._attention_dp_rank = window_size, attention_dp_rank
        self._next_id = 0
        self._events: list[EngineEvent] = []
        self._removed: list[int] = []

    def created(self, gpu_blocks: int, host_blocks: int = 0) -> None:
        """Record the new pool."""
        self._append(PoolCreated([gpu_blocks, host_blocks]))

    def stored(self, parent_hash: int | None, blocks: list[StoredBlock]) -> None:
        """Record new blocks."""
        self._close_removal()
        self._append(BlocksStored(parent_hash, blocks))

    def removed(self, block_hash: int) -> None:
        """Record a removal, in one event with those in a row with it."""
        self._removed.append(block_hash)

    def moved(self, block_hash: int, old: Tier, new: Tier) -> None:
        """Record that a block lies on another tier."""
        self._close_removal()
        self._append(BlockUpdated(block_hash, EventDiff(new.value, old.value)))

    def take(self) -> list[EngineEvent]:
        """Return the events since the last call."""
        self._close_removal()
        taken, self._events = self._events, []
        return taken

    def _append(self, data: EventData) -> None:
        rank = self._attention_dp_rank
        event = EngineEvent(event_id=self._next_id, data=data, window_size=self._window_size, attention_dp_rank=rank)
        self._next_id += 1
        self._events.append(event)

    def _close_removal(self) -> None:
        """Let the next removal begin a new event."""
        if self._removed:
            removed, self._removed = self._removed, []
            self._append(BlocksRemoved(removed))
