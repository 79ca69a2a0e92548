"""KV events of one rank, in TensorRT-LLM's words and numbering.

    event_id    from 0, one more for each event of the rank, no holes; a hole that a reader sees is an event lost later
    created     the first event: how many blocks the pool has on GPU and on host
    stored      new blocks in chain order; `parent_hash` is the block before the first of them
    removed     all removals between two stores, or to the end of the iteration, are one event

Sequences are lists here, because the engine's JSON has lists and `msgspec.to_builtins` leaves a tuple a tuple.
Source: `event_plane.md` sections 1.3 to 1.5.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

DEFAULT_PRIORITY = 35


class UniqueToken(msgspec.Struct, frozen=True, gc=False, tag_field="type", tag="unique_token"):
    """One token of a block."""

    token_id: int
    token_extra_id: int = 0


class StoredBlock(msgspec.Struct, frozen=True, tag_field="type", tag="stored_block"):
    """One block, full or partial."""

    block_hash: int
    tokens: list[UniqueToken]
    cache_level: int = 0
    priority: int = DEFAULT_PRIORITY
    mm_keys: list[str] = []
    cache_salt: str | None = None


class PoolCreated(msgspec.Struct, frozen=True, tag_field="type", tag="created"):
    """The pool exists, empty."""

    num_blocks_per_cache_level: list[int]


class BlocksStored(msgspec.Struct, frozen=True, tag_field="type", tag="stored"):
    """The blocks can be reused from now on, but for a partial last one."""

    parent_hash: int | None
    blocks: list[StoredBlock]


class BlocksRemoved(msgspec.Struct, frozen=True, tag_field="type", tag="removed"):
    """The blocks are no longer held."""

    block_hashes: list[int]


class EngineEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event. `attention_dp_rank` is left out by an engine of one rank."""

    event_id: int
    data: PoolCreated | BlocksStored | BlocksRemoved
    window_size: int
    attention_dp_rank: int | msgspec.UnsetType = msgspec.UNSET


def render(event: EngineEvent) -> dict[str, Any]:
    """Return the event as the engine's JSON shape."""
    rendered: dict[str, Any] = msgspec.to_builtins(event)
    return rendered


def stored_block(block_hash: int, tokens: Iterable[int], cache_salt: str | None) -> StoredBlock:
    """Return a block on the GPU with default priority."""
    return StoredBlock(block_hash, list(map(UniqueToken, tokens)), cache_salt=cache_salt)


class EventLog:
    """Numbers the events of one rank and keeps them until they are taken, once per iteration."""

    def __init__(self, *, window_size: int, attention_dp_rank: int | msgspec.UnsetType, total_blocks: int) -> None:
        self._window_size = window_size
        self._attention_dp_rank = attention_dp_rank
        self._next_id = 0
        self._events: list[EngineEvent] = []
        self._removed: list[int] = []
        self._append(PoolCreated([total_blocks, 0]))

    def stored(self, parent_hash: int | None, blocks: list[StoredBlock]) -> None:
        """Tell of new blocks, after all removals told so far."""
        self._close_removal()
        self._append(BlocksStored(parent_hash, blocks))

    def removed(self, block_hash: int) -> None:
        """Tell of a removal, together with those since the last store."""
        self._removed.append(block_hash)

    def take(self) -> list[EngineEvent]:
        """Return what was told since the last call."""
        self._close_removal()
        taken, self._events = self._events, []
        return taken

    def _close_removal(self) -> None:
        if self._removed:
            self._append(BlocksRemoved(self._removed))
            self._removed = []

    def _append(self, data: PoolCreated | BlocksStored | BlocksRemoved) -> None:
        event = EngineEvent(
            event_id=self._next_id,
            data=data,
            window_size=self._window_size,
            attention_dp_rank=self._attention_dp_rank,
        )
        self._next_id += 1
        self._events.append(event)
