"""The publisher's rules: TensorRT-LLM's polled KV events (JSON maps) become hop A events.

    every event    its `event_id` continues the rank's; after a jump nobody knows what the rank holds, and the engine
                   cannot say: the rank is published as cleared, and learned anew from there
    `created`      teaches the widest attention window; nothing is published
    window         events of narrower windows (sliding-window pools) are dropped: their blocks are no prefix
    `stored`       walks its blocks in order: an oversize block drops the event; a partial block is remembered, never
                   published, and ends the walk; a block under a remembered partial one is dropped
    `removed`      of a remembered partial block only forgets it; the rest is published
    others         counted and ignored

One event that cannot be read is counted and costs nothing else. Source: `event_plane.md` sections 1.3, 1.4, 2.2.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from kv_protocol.errors import LimitExceeded
from kv_protocol.hashing import to_u64
from kv_protocol.ids import TokenId
from worker_agent.core.engine_events import EngineCleared, EngineEvent, EngineRemoved, EngineStored, RankEvent


class _UniqueToken(msgspec.Struct):
    token_id: TokenId


class _StoredBlock(msgspec.Struct):
    block_hash: int
    tokens: list[_UniqueToken]
    cache_salt: str | None = None


class _CreatedData(msgspec.Struct, tag="created"):
    pass


class _StoredData(msgspec.Struct, tag="stored"):
    parent_hash: int | None
    blocks: list[_StoredBlock]
    lora_name: str | None = None


class _RemovedData(msgspec.Struct, tag="removed"):
    block_hashes: list[int]


class _UpdatedData(msgspec.Struct, tag="updated"):
    pass


class _Head(msgspec.Struct):
    event_id: int
    window_size: int | None = None
    attention_dp_rank: int = 0


class _Body(msgspec.Struct):
    data: _CreatedData | _StoredData | _RemovedData | _UpdatedData


class PublisherCounts(msgspec.Struct, kw_only=True):
    """What became of the engine's events so far."""

    created: int = 0
    stored: int = 0
    removed: int = 0
    updated: int = 0
    unreadable: int = 0
    partial_blocks_dropped: int = 0
    under_partial_dropped: int = 0
    oversize_dropped: int = 0
    window_filtered: int = 0
    event_id_gaps: int = 0


class TrtllmRules:
    """The rules' state: windows, partial blocks and event ids, per rank."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._window: int | None = None
        self._partial: dict[int, set[int]] = {}
        self._next_id: dict[int, int] = {}
        self.counts = PublisherCounts()
        self.last_unreadable = ""

    def translate(self, engine_events: Iterable[dict[str, Any]]) -> list[RankEvent]:
        """Return what is to be published for these events, in their order."""
        published: list[RankEvent] = []
        for engine_event in engine_events:
            try:
                head = msgspec.convert(engine_event, _Head)
                if not self._continues(head):
                    published.append(RankEvent(head.attention_dp_rank, EngineCleared()))
                translated = self._translate(head, msgspec.convert(engine_event, _Body))
            except (msgspec.ValidationError, LimitExceeded) as error:
                self.counts.unreadable += 1
                self.last_unreadable = str(error)
                continue
            if translated is not None:
                published.append(RankEvent(head.attention_dp_rank, translated))
        return published

    def _continues(self, head: _Head) -> bool:
        dp_rank = head.attention_dp_rank
        continues = head.event_id == self._next_id.get(dp_rank, head.event_id)
        self._next_id[dp_rank] = head.event_id + 1
        if not continues:
            self.counts.event_id_gaps += 1
            self._partial.pop(dp_rank, None)
        return continues

    def _translate(self, head: _Head, body: _Body) -> EngineEvent | None:
        if isinstance(body.data, _CreatedData):
            self.counts.created += 1
            self._window = max(self._window or 0, head.window_size or 0) or None
            return None
        if head.window_size is not None and self._window is not None and head.window_size < self._window:
            self.counts.window_filtered += 1
            return None
        match body.data:
            case _StoredData():
                self.counts.stored += 1
                return self._stored(head.attention_dp_rank, body.data)
            case _RemovedData():
                self.counts.removed += 1
                return self._removed(head.attention_dp_rank, body.data)
            case _:
                self.counts.updated += 1
                return None

    def _stored(self, dp_rank: int, data: _StoredData) -> EngineStored | None:
        partial = self._partial.setdefault(dp_rank, set())
        if data.parent_hash is not None and to_u64(data.parent_hash) in partial:
            self.counts.under_partial_dropped += 1
            return None
        if any(len(block.tokens) > self._block_size for block in data.blocks):
            self.counts.oversize_dropped += 1
            return None
        full: list[_StoredBlock] = []
        for block in data.blocks:
            if len(block.tokens) < self._block_size:
                partial.add(to_u64(block.block_hash))
                self.counts.partial_blocks_dropped += 1
                break
            full.append(block)
        if not full:
            return None
        return EngineStored(
            block_hashes=tuple(to_u64(block.block_hash) for block in full),
            parent_block_hash=None if data.parent_hash is None else to_u64(data.parent_hash),
            token_ids=tuple(token.token_id for block in full for token in block.tokens),
            block_size=self._block_size,
            lora_name=data.lora_name,
            cache_salt=_salt(data.blocks),
        )

    def _removed(self, dp_rank: int, data: _RemovedData) -> EngineRemoved | None:
        partial = self._partial.setdefault(dp_rank, set())
        full = []
        for block_hash in map(to_u64, data.block_hashes):
            if block_hash in partial:
                partial.discard(block_hash)
            else:
                full.append(block_hash)
        return EngineRemoved(block_hashes=tuple(full)) if full else None


def _salt(blocks: list[_StoredBlock]) -> str | None:
    salts = {block.cache_salt for block in blocks if block.cache_salt}
    if len(salts) > 1:
        raise LimitExceeded("cache_salt", sorted(salts), "one salt an event")
    return next(iter(salts), None)
