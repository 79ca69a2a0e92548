"""Turns TensorRT-LLM's polled KV events (JSON maps) into engine events. All state is per rank.

    reading     what is read, what is refused: `trtllm_wire.py`. A refused or unreadable event is counted and kept for
                operators (`events/quarantine.py`); the others are processed. The rank of the refused event is in doubt
                until it is cleared, and so known to be empty.
                If even the rank is unreadable, all ranks are in doubt, each until its next event: a consecutive id
                shows that the rank lost nothing, any other clears it
    event_id    consecutive for a rank. After a jump the rank's set is unknown, and the engine cannot report it: the
                rank is published as cleared, its state is forgotten, and learned anew from there. Ids that go back
                mean that the engine restarted: its windows are learned again, too. The first event of a start has id 0:
                a higher first id shows how many were missed, which are counted
    window      only events of the widest window are applied; if the widest turns out to be another, the rank is
                cleared: `_Rank`

The blocks of the window that counts become published events by attention group:

    `stored`    is walked in order, until a block that cannot be published:
                  oversize     (more tokens than `block_size`) the whole event is dropped
                  partial      (fewer tokens) never published; what follows it in the event is dropped, and shows that
                               `block_size` is not the engine's: a partial block ends its chain
                  nameless     (null hash) what follows it is dropped: its parent has no name
                the blocks before that go out in runs of one tier, each run under the block before it. An event under
                a block that was not published is dropped
    withheld    a block that was dropped, by its hash; its removal and its moves are not published either
    `removed`   goes out on the tier where the block is; blocks are on the GPU unless an event said otherwise
    `updated`   a move goes out: a store by name on the new tier, then a removal on the old; priorities are only counted

A withheld block is forgotten with its removal. Beyond `WITHHELD_MAX` in a group the oldest is forgotten: its removal
then goes out, and the mirror counts it as unknown. `on_host` is bounded by the engine's host pool.
Source: `docs/SOURCES.md` E1.3 to E1.5, E2.2, E7 (rows 1, 2, 20).
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, groupby
from operator import attrgetter

import msgspec

from kv_protocol.errors import UNDECODABLE, LimitExceeded
from kv_protocol.events import Tier
from kv_protocol.ids import checked_block_size
from worker_agent.events.dialects.trtllm_wire import (
    UNBOUNDED,
    BlockChange,
    TrtllmBlock,
    TrtllmEvent,
    TrtllmHead,
    TrtllmRemoved,
    TrtllmStored,
    TrtllmUpdated,
    read_event,
    read_head,
)
from worker_agent.events.engine_events import EngineCleared, EngineEvent, EngineRemoved, EngineStored, RankEvent
from worker_agent.events.quarantine import Quarantine

WITHHELD_MAX = 65_536


class _Group(msgspec.Struct):
    """The state of one attention group that later events depend on."""

    withheld: dict[int, None] = {}
    on_host: set[int] = set()


class _Rank:
    """The rules' state of one rank. `doubt` is why the rank may hold more than is published; empty: no doubt.

    Only events of the widest attention window (in tokens) count: blocks of sliding windows are no prefix.

    known by                     the widest window is
    configuration                the configured one; the first `created` takes its place, unless an event confirmed it
    `created`                    the widest of those created
    an event without a window    unbounded: the engine is older than windows, or this pool has none
    an event of a wider window,  its window: the earlier value was wrong, or `created` was lost before the first poll.
      or of any if none is known   Every window stores what a request computed, so events of the widest come soon

    If the window that counts changes after events of the former one were published, these events were not of prefixes:
    the rank is cleared. So a wrong value lasts until the next event of the widest window.
    Source: `docs/SOURCES.md` E1.3, E2.2.
    """

    def __init__(self, block_size: int, attention_window: int | None, counts: Counter[str]) -> None:
        self._block_size = block_size
        self._configured = attention_window
        self._counts = counts
        self.next_id: int | None = None
        self.unplaced_seen = 0
        """How many events of unknown ranks had come before this rank's newest event."""
        self.restart()

    def restart(self) -> None:
        """Forget the rank's state and windows: the engine restarted."""
        self._widest, self._is_confirmed = self._configured, False
        self.forget()

    def forget(self) -> None:
        """Forget the rank's state."""
        self._groups: dict[int, _Group] = {}
        self._has_published = False
        self.doubt = ""

    def apply(self, event: TrtllmEvent) -> Iterator[EngineEvent]:
        """Yield the events to publish for the event, in order."""
        if self._changes_window(event) and self._has_published:
            self._counts["window_changes"] += 1
            self.forget()
            yield EngineCleared()
        if event.change is None:
            self._counts["created"] += 1
        elif event.window == self._widest:
            self._has_published = True
            yield from self._changed(event.group_idx, event.change)
        else:
            self._counts["window_filtered"] += 1

    def _changes_window(self, event: TrtllmEvent) -> bool:
        before, is_created = self._widest, event.change is None
        if is_created and self._is_confirmed:
            self._widest = max(event.window, before or 0)
        elif is_created or event.window >= (before or 0):
            self._widest, self._is_confirmed = event.window, True
            self._counts["windows_assumed"] += before is None and not is_created and event.window != UNBOUNDED
        return self._widest != before

    def _changed(self, group_idx: int, change: BlockChange) -> list[EngineEvent]:
        group = self._groups.setdefault(group_idx, _Group())
        match change:
            case TrtllmStored():
                self._counts["stored"] += 1
                self._counts["named_items"] += sum(block.named_items for block in change.blocks)
                return self._stored(group, change, group_idx)
            case TrtllmRemoved():
                self._counts["removed"] += 1
                return self._removed(group, change, group_idx)
            case TrtllmUpdated():
                self._counts["updated"] += 1
                return self._updated(group, change, group_idx)

    def _stored(self, group: _Group, data: TrtllmStored, group_idx: int) -> list[EngineEvent]:
        largest = max((len(block.token_ids) for block in data.blocks), default=0)
        if largest > self._block_size:
            self._counts["oversize_dropped"] += 1
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
            has_items = any(block.mm_hashes for block in blocks)
            published.append(
                EngineStored(
                    block_hashes=hashes,
                    parent_block_hash=above,
                    token_ids=tuple(chain.from_iterable(block.token_ids for block in blocks)),
                    block_size=self._block_size,
                    tier=tier,
                    namespace=data.namespace,
                    mm_hashes=tuple(block.mm_hashes for block in blocks) if has_items else (),
                    group_idx=group_idx,
                )
            )
            published += _placed(group, hashes, tier, group_idx)
            above = hashes[-1]
        return published

    def _walked(self, group: _Group, blocks: tuple[TrtllmBlock, ...]) -> Iterator[TrtllmBlock]:
        for at, block in enumerate(blocks):
            if block.block_hash is None:
                self._counts["nameless_blocks_dropped"] += 1
                self._drop_under(group, blocks[at + 1 :])
                return
            if len(block.token_ids) < self._block_size:
                self._counts["partial_blocks_dropped"] += 1
                self._withhold(group, (block,))
                if blocks[at + 1 :]:
                    self._doubt_size(f"block of {len(block.token_ids)} tokens within a chain")
                self._drop_under(group, blocks[at + 1 :])
                return
            group.withheld.pop(block.block_hash, None)
            yield block

    def _doubt_size(self, found: str) -> None:
        self.doubt = f"{found}, engine.block_size is {self._block_size}: is it the engine's tokens_per_block?"

    def _drop_under(self, group: _Group, blocks: tuple[TrtllmBlock, ...]) -> None:
        self._counts["under_withheld_dropped"] += len(blocks)
        self._withhold(group, blocks)

    def _withhold(self, group: _Group, blocks: Iterable[TrtllmBlock]) -> None:
        for block in blocks:
            if block.block_hash is not None:
                group.withheld[block.block_hash] = None
        while len(group.withheld) > WITHHELD_MAX:
            del group.withheld[next(iter(group.withheld))]
            self._counts["withheld_forgotten"] += 1

    def _removed(self, group: _Group, data: TrtllmRemoved, group_idx: int) -> list[EngineEvent]:
        gone: dict[Tier, list[int]] = {Tier.GPU: [], Tier.HOST: []}
        for block_hash in data.block_hashes:
            if block_hash is None:
                self._counts["nameless_blocks_dropped"] += 1
            elif block_hash in group.withheld:
                del group.withheld[block_hash]
            elif block_hash in group.on_host:
                group.on_host.discard(block_hash)
                gone[Tier.HOST].append(block_hash)
            else:
                gone[Tier.GPU].append(block_hash)
        return [_gone(hashes, tier, group_idx) for tier, hashes in gone.items() if hashes]

    def _updated(self, group: _Group, data: TrtllmUpdated, group_idx: int) -> list[EngineEvent]:
        self._counts["priority_changes"] += data.priority_changed
        block_hash, tier = data.block_hash, data.tier
        if tier is None or block_hash is None or block_hash in group.withheld:
            return []
        was = Tier.HOST if block_hash in group.on_host else Tier.GPU
        if tier == was:
            return []
        self._counts["tier_moves"] += 1
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
    """Remember that the blocks are on `tier`; return the removal of those that were on the host and are not now."""
    if tier == Tier.HOST:
        group.on_host.update(hashes)
        return []
    left = [block_hash for block_hash in hashes if block_hash in group.on_host]
    group.on_host.difference_update(left)
    return [_gone(left, Tier.HOST, group_idx)] if left else []


def _gone(hashes: list[int], tier: Tier, group_idx: int) -> EngineRemoved:
    return EngineRemoved(block_hashes=tuple(hashes), tier=tier, group_idx=group_idx)


class TrtllmRules:
    """The rules, and their state of each rank. `attention_window`: the configured widest one, in tokens (`_Rank`).

    `translate` may be called in any thread, one call at a time; meanwhile `stale`, `counts`, `quarantine` and
    `events_lost` may be read in another.
    """

    def __init__(self, block_size: int, *, attention_window: int | None = None) -> None:
        self._block_size = checked_block_size(block_size)
        self._attention_window = attention_window
        self._ranks: dict[int, _Rank] = {}
        self._unplaced = 0
        self._unplaced_reason = ""
        self.counts = Counter[str]()
        """The engine's events so far, each under its kind or why it was not applied; and all of `PUBLISHER_COUNTS`."""
        self.quarantine = Quarantine()
        self.events_lost: dict[int, int] = {}
        """For each rank, how many events were lost, by their ids; the counts never decrease."""

    def translate(self, engine_events: Iterable[object]) -> list[RankEvent]:
        """Return the events to publish for these events, in their order; raise nothing, whatever an event is."""
        published: list[RankEvent] = []
        for engine_event in engine_events:
            try:
                head = read_head(engine_event)
            except UNDECODABLE as error:
                self.counts["unreadable"] += 1
                self._unplaced_reason = self.quarantine.add(engine_event, error)
                self._unplaced += 1
                continue
            published += (RankEvent(head.dp_rank, event) for event in self._translate(head, engine_event))
        return published

    def stale(self, dp_rank: int) -> str:
        """Return why the published events of the rank may be wrong; empty if no reason is known."""
        rank = self._ranks.get(dp_rank)
        if rank is not None and rank.doubt:
            return f"engine event not read: {rank.doubt}"
        if self._unplaced > (rank.unplaced_seen if rank else 0):
            return f"engine event of an unknown rank not read: {self._unplaced_reason}"
        return ""

    def _translate(self, head: TrtllmHead, engine_event: object) -> Iterator[EngineEvent]:
        if (rank := self._ranks.get(head.dp_rank)) is None:
            rank = self._ranks[head.dp_rank] = _Rank(self._block_size, self._attention_window, self.counts)
        if not self._continues(rank, head):
            yield EngineCleared()
        rank.unplaced_seen = self._unplaced
        try:
            event = read_event(engine_event)
        except UNDECODABLE as error:
            self.counts["refused" if isinstance(error, LimitExceeded) else "unreadable"] += 1
            rank.doubt = self.quarantine.add(engine_event, error, head.dp_rank)
        else:
            yield from rank.apply(event)

    def _continues(self, rank: _Rank, head: TrtllmHead) -> bool:
        expected, rank.next_id = rank.next_id, head.event_id + 1
        if head.event_id == expected:
            return True
        is_restart = expected is not None and head.event_id < expected
        missed = head.event_id - (0 if expected is None or is_restart else expected)
        self.events_lost[head.dp_rank] = self.events_lost.get(head.dp_rank, 0) + max(0, missed)
        if expected is None:
            return True
        self.counts["event_id_gaps"] += 1
        self.counts["event_ids_back"] += is_restart
        (rank.restart if is_restart else rank.forget)()
        return False
