"""Translates one rank's blocks of the window that counts into published events, by attention group.

    `stored`    is walked in order, until a block that cannot be published:
                  oversize     (more tokens than `block_size`) the whole event is dropped
                  partial      (fewer) never published; what follows it in the event is dropped, and shows that
                               `block_size` is not the engine's: a partial block ends its chain
                  nameless     (null hash) what follows it is dropped: its parent has no name
                the rest goes out in runs of one tier, each under the block before it
                under a block that was not published: dropped whole
    withheld    a block that was dropped, by its hash; its removal and its moves are not published either
    `removed`   goes out on the tier where the block is; blocks are on the GPU unless it was said otherwise
    `updated`   to another tier: stored there by name, then removed where it was; a new priority is counted only

Withheld blocks are forgotten with their removal, and beyond `withheld_max` a group the oldest first: its removal then
goes out, and means nothing to the reader. Blocks on the host are as many as the engine's host pool has.
Source: `docs/SOURCES.md` E1.3, E1.4, E2.2, E7 (rows 1, 2, 20).
"""

from collections.abc import Iterable, Iterator
from itertools import chain, groupby
from operator import attrgetter

import msgspec

from kv_protocol.events import Tier
from worker_agent.events.dialects.trtllm_wire import (
    BlockChange,
    TrtllmBlock,
    TrtllmRemoved,
    TrtllmStored,
    TrtllmUpdated,
)
from worker_agent.events.engine_events import EngineEvent, EngineRemoved, EngineStored

WITHHELD_MAX = 65_536


class PublisherCounts(msgspec.Struct, kw_only=True):
    """Counts of the engine's events so far. Each event counts once, by its kind or by the reason why it was ignored."""

    created: int = 0
    stored: int = 0
    removed: int = 0
    updated: int = 0
    window_filtered: int = 0
    held_back_dropped: int = 0
    refused: int = 0
    unreadable: int = 0
    event_id_gaps: int = 0
    event_ids_back: int = 0
    window_changes: int = 0
    windows_assumed: int = 0
    oversize_dropped: int = 0
    partial_blocks_dropped: int = 0
    nameless_blocks_dropped: int = 0
    under_withheld_dropped: int = 0
    withheld_forgotten: int = 0
    tier_moves: int = 0
    priority_changes: int = 0
    named_items: int = 0


class _Group:
    """The state of one attention group that later events depend on."""

    def __init__(self) -> None:
        self.withheld: dict[int, None] = {}
        self.on_host: set[int] = set()


class RankBlocks:
    """The rules' state of one rank. `doubt` is why the rank may hold more than is published; empty: no doubt."""

    def __init__(self, block_size: int, counts: PublisherCounts, withheld_max: int) -> None:
        self._block_size = block_size
        self._counts = counts
        self._withheld_max = withheld_max
        self._groups: dict[int, _Group] = {}
        self.doubt = ""

    def forget(self) -> None:
        """Forget the rank's state."""
        self._groups.clear()
        self.doubt = ""

    def apply(self, change: BlockChange, group_idx: int) -> list[EngineEvent]:
        """Return the events to publish for the change, in order."""
        group = self._groups.setdefault(group_idx, _Group())
        match change:
            case TrtllmStored():
                self._counts.stored += 1
                self._counts.named_items += sum(block.named_items for block in change.blocks)
                return self._stored(group, change, group_idx)
            case TrtllmRemoved():
                self._counts.removed += 1
                return self._removed(group, change, group_idx)
            case TrtllmUpdated():
                self._counts.updated += 1
                return self._updated(group, change, group_idx)

    def _stored(self, group: _Group, data: TrtllmStored, group_idx: int) -> list[EngineEvent]:
        largest = max((len(block.token_ids) for block in data.blocks), default=0)
        if largest > self._block_size:
            self._counts.oversize_dropped += 1
            self._doubt_size(f"block of {largest} tokens")
            self._withhold(group, data.blocks)
            return []
        if data.parent_hash in group.withheld:
            self._drop_under(group, data.blocks)
            return []
        published: list[EngineEvent] = []
        above = data.parent_hash
        for tier, run in groupby(self._walked(group, data.blocks), attrgetter("tier")):
            blocks = list(run)
            hashes = tuple(block.block_hash for block in blocks if block.block_hash is not None)
            published.append(self._run(blocks, hashes, above, data, tier=tier, group_idx=group_idx))
            published += _placed(group, hashes, tier, group_idx)
            above = hashes[-1]
        return published

    def _walked(self, group: _Group, blocks: tuple[TrtllmBlock, ...]) -> Iterator[TrtllmBlock]:
        for at, block in enumerate(blocks):
            if block.block_hash is None:
                self._counts.nameless_blocks_dropped += 1
                self._drop_under(group, blocks[at + 1 :])
                return
            if len(block.token_ids) < self._block_size:
                self._counts.partial_blocks_dropped += 1
                self._withhold(group, (block,))
                if blocks[at + 1 :]:
                    self._doubt_size(f"block of {len(block.token_ids)} tokens within a chain")
                self._drop_under(group, blocks[at + 1 :])
                return
            group.withheld.pop(block.block_hash, None)
            yield block

    def _run(
        self,
        blocks: list[TrtllmBlock],
        hashes: tuple[int, ...],
        above: int | None,
        data: TrtllmStored,
        *,
        tier: Tier,
        group_idx: int,
    ) -> EngineStored:
        has_items = any(block.mm_hashes for block in blocks)
        return EngineStored(
            block_hashes=hashes,
            parent_block_hash=above,
            token_ids=tuple(chain.from_iterable(block.token_ids for block in blocks)),
            block_size=self._block_size,
            tier=tier,
            lora_name=data.lora_name,
            cache_salt=data.cache_salt,
            mm_hashes=tuple(block.mm_hashes for block in blocks) if has_items else (),
            group_idx=group_idx,
        )

    def _doubt_size(self, found: str) -> None:
        self.doubt = f"{found}, engine.block_size is {self._block_size}: is it the engine's tokens_per_block?"

    def _drop_under(self, group: _Group, blocks: tuple[TrtllmBlock, ...]) -> None:
        self._counts.under_withheld_dropped += len(blocks)
        self._withhold(group, blocks)

    def _withhold(self, group: _Group, blocks: Iterable[TrtllmBlock]) -> None:
        for block in blocks:
            if block.block_hash is not None:
                group.withheld[block.block_hash] = None
        while len(group.withheld) > self._withheld_max:
            del group.withheld[next(iter(group.withheld))]
            self._counts.withheld_forgotten += 1

    def _removed(self, group: _Group, data: TrtllmRemoved, group_idx: int) -> list[EngineEvent]:
        gone: dict[Tier, list[int]] = {Tier.GPU: [], Tier.HOST: []}
        for block_hash in data.block_hashes:
            if block_hash is None:
                self._counts.nameless_blocks_dropped += 1
            elif block_hash in group.withheld:
                del group.withheld[block_hash]
            elif block_hash in group.on_host:
                group.on_host.discard(block_hash)
                gone[Tier.HOST].append(block_hash)
            else:
                gone[Tier.GPU].append(block_hash)
        return [_gone(hashes, tier, group_idx) for tier, hashes in gone.items() if hashes]

    def _updated(self, group: _Group, data: TrtllmUpdated, group_idx: int) -> list[EngineEvent]:
        self._counts.priority_changes += data.priority_changed
        block_hash, tier = data.block_hash, data.tier
        if tier is None or block_hash is None or block_hash in group.withheld:
            return []
        was = Tier.HOST if block_hash in group.on_host else Tier.GPU
        if tier == was:
            return []
        self._counts.tier_moves += 1
        (group.on_host.add if tier == Tier.HOST else group.on_host.discard)(block_hash)
        there = EngineStored(
            block_hashes=(block_hash,),
            parent_block_hash=None,
            token_ids=(),
            block_size=0,
            tier=tier,
            group_idx=group_idx,
        )
        return [there, _gone([block_hash], was, group_idx)]


def _placed(group: _Group, hashes: tuple[int, ...], tier: Tier, group_idx: int) -> list[EngineEvent]:
    """Remember where the blocks are; return their removal from the host, where they were there."""
    if tier == Tier.HOST:
        group.on_host.update(hashes)
        return []
    left = [block_hash for block_hash in hashes if block_hash in group.on_host]
    group.on_host.difference_update(left)
    return [_gone(left, Tier.HOST, group_idx)] if left else []


def _gone(hashes: list[int], tier: Tier, group_idx: int) -> EngineRemoved:
    return EngineRemoved(block_hashes=tuple(hashes), tier=tier, group_idx=group_idx)
