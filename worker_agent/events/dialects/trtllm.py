"""Turns TensorRT-LLM's polled KV events (JSON maps) into engine events. All state is per rank.

    reading     fields and refusals of an event: `trtllm_wire.py`. A refused or unreadable event is counted and kept for
                operators (`events/quarantine.py`); the others are processed. Its rank's set is in doubt until the rank
                is known to be empty: cleared.
                If even the rank is unreadable, all ranks are in doubt, each until its next event: a consecutive id
                shows that the rank lost nothing, any other clears it
    event_id    consecutive for a rank. After a jump the rank's set is unknown, the engine cannot report it: the rank
                is published as cleared, its state is forgotten, and it is learned again from there. Ids that go back
                mean that the engine restarted: its windows are learned again, too. A restart begins with id 0; missed
                events are counted
    window      events of narrower windows than the widest are dropped; until it is known they are held back; if it
                turns out to be another, the rank is cleared: `WidestWindow`
    blocks      partial blocks, tiers, attention groups: `trtllm_blocks.py`

Source: `docs/SOURCES.md` E1.3 to E1.5, E2.2.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kv_protocol.errors import UNDECODABLE, LimitExceeded
from kv_protocol.ids import checked_block_size
from worker_agent.events.dialects.trtllm_blocks import WITHHELD_MAX, PublisherCounts, RankBlocks
from worker_agent.events.dialects.trtllm_wire import (
    UNBOUNDED,
    BlockChange,
    TrtllmEvent,
    TrtllmHead,
    read_event,
    read_head,
)
from worker_agent.events.engine_events import EngineCleared, EngineEvent, RankEvent
from worker_agent.events.quarantine import Quarantine


class _HeldBack(NamedTuple):
    window: int
    group_idx: int
    change: BlockChange


class WidestWindow:
    """Which attention window of a rank counts: the widest, in tokens; blocks of sliding windows are no prefix.

    known by                    the widest window is
    nothing yet                 not known: events are held back, their order kept
    configuration               the configured one; the first `created` takes its place, unless an event confirmed it
    `created`                   the widest of those created
    an event without a window   unbounded: the engine is older than windows, or this pool has none
    `HELD_BACK_MAX` events      the widest among them: `created` was lost before the first poll, and every window stores
                                what a request computed
    an event of a wider window  that one: the earlier value was wrong

    If the window that counts changes after events of the former one were published, these events were not of prefixes:
    the rank is cleared. So a wrong guess lasts until the next event of the widest window. The first event has no
    special rule. Source: `docs/SOURCES.md` E1.3, E2.2, E8 item 9.
    """

    def __init__(self, configured: int | None) -> None:
        self.widest = configured
        """The window that counts; None if unknown."""
        self._is_seen = False

    def on_created(self, window: int) -> None:
        """Note that a pool of this window exists."""
        self.widest = max(window, self.widest or 0) if self._is_seen else window
        self._is_seen = True

    def on_event(self, window: int) -> None:
        """Note an event of this window."""
        if window == UNBOUNDED or (self.widest is not None and window >= self.widest):
            self.widest = window
            self._is_seen = True

    def assume(self, windows: Iterable[int]) -> None:
        """Assume the widest of these windows."""
        self.widest = max(windows)
        self._is_seen = True


class _RankRules:
    def __init__(self, window: WidestWindow, blocks: RankBlocks) -> None:
        self.window = window
        self.blocks = blocks
        self.next_id: int | None = None
        self.held_back: list[_HeldBack] = []
        self.has_passed = False
        self.unplaced_seen = 0


class TrtllmRules:
    """The rules, and their state of each rank. `attention_window`, in tokens, is for lost `created` events.

    `translate` belongs to one thread; `stale`, `counts`, `quarantine` and `events_lost` may be read from others.
    """

    def __init__(
        self, block_size: int, *, attention_window: int | None = None, withheld_max: int = WITHHELD_MAX
    ) -> None:
        self._block_size = checked_block_size(block_size)
        self._attention_window = attention_window
        self._withheld_max = withheld_max
        self._ranks: dict[int, _RankRules] = {}
        self._unplaced = 0
        self._unplaced_reason = ""
        self.counts = PublisherCounts()
        self.quarantine = Quarantine()
        self.events_lost: dict[int, int] = {}
        """For each rank, how many events were lost, by their ids; the counts never decrease."""

    def translate(self, engine_events: object) -> list[RankEvent]:
        """Return the events to publish for these events, in their order; raise nothing for any input."""
        published: list[RankEvent] = []
        for engine_event in engine_events if isinstance(engine_events, Iterable) else (engine_events,):
            try:
                head = read_head(engine_event)
            except UNDECODABLE as error:
                self.counts.unreadable += 1
                self._unplaced_reason = self.quarantine.add(engine_event, error)
                self._unplaced += 1
                continue
            published += (RankEvent(head.dp_rank, event) for event in self._translate(head, engine_event))
        return published

    def stale(self, dp_rank: int) -> str:
        """Return why the published events of the rank may be wrong; empty if no reason is known."""
        rank = self._ranks.get(dp_rank)
        if rank is not None and rank.blocks.doubt:
            return f"engine event not read: {rank.blocks.doubt}"
        if self._unplaced > (rank.unplaced_seen if rank else 0):
            return f"engine event of an unknown rank not read: {self._unplaced_reason}"
        if rank is not None and rank.held_back:
            return f"{len(rank.held_back)} engine events wait for the widest attention window: no `created` was seen"
        return ""

    def _translate(self, head: TrtllmHead, engine_event: object) -> list[EngineEvent]:
        published: list[EngineEvent] = [] if self._continues(head) else [EngineCleared()]
        rank = self._ranks[head.dp_rank]
        rank.unplaced_seen = self._unplaced
        try:
            event = read_event(engine_event)
        except LimitExceeded as error:
            self.counts.refused += 1
            rank.blocks.doubt = self.quarantine.add(engine_event, error, head.dp_rank)
        except UNDECODABLE as error:
            self.counts.unreadable += 1
            rank.blocks.doubt = self.quarantine.add(engine_event, error, head.dp_rank)
        else:
            published += self._judged(rank, event)
        return published

    def _continues(self, head: TrtllmHead) -> bool:
        rank = self._ranks.get(head.dp_rank) or self._new_rank(head.dp_rank)
        expected, rank.next_id = rank.next_id, head.event_id + 1
        if head.event_id == expected:
            return True
        is_new_life = expected is None or head.event_id < expected
        missed = head.event_id if expected is None or is_new_life else head.event_id - expected
        self.events_lost[head.dp_rank] = self.events_lost.get(head.dp_rank, 0) + max(0, missed)
        if expected is None:
            return True
        self.counts.event_id_gaps += 1
        self.counts.event_ids_back += is_new_life
        if is_new_life:
            rank.window = WidestWindow(self._attention_window)
        self._forget(rank)
        return False

    def _new_rank(self, dp_rank: int) -> _RankRules:
        blocks = RankBlocks(self._block_size, self.counts, self._withheld_max)
        rank = self._ranks[dp_rank] = _RankRules(WidestWindow(self._attention_window), blocks)
        return rank

    def _forget(self, rank: _RankRules) -> None:
        self.counts.held_back_dropped += len(rank.held_back)
        rank.held_back.clear()
        rank.blocks.forget()
        rank.has_passed = False

    def _judged(self, rank: _RankRules, event: TrtllmEvent) -> Iterator[EngineEvent]:
        before = rank.window.widest
        if event.change is None:
            self.counts.created += 1
            rank.window.on_created(event.window)
        else:
            rank.window.on_event(event.window)
        if rank.has_passed and rank.window.widest != before:
            self.counts.window_changes += 1
            self._forget(rank)
            yield EngineCleared()
        if event.change is not None:
            rank.held_back.append(_HeldBack(event.window, event.group_idx, event.change))
        if rank.window.widest is None and len(rank.held_back) == HELD_BACK_MAX:
            self.counts.windows_assumed += 1
            rank.window.assume(held.window for held in rank.held_back)
        if rank.window.widest is not None:
            yield from self._released(rank)

    def _released(self, rank: _RankRules) -> Iterator[EngineEvent]:
        held_back, rank.held_back = rank.held_back, []
        for window, group_idx, change in held_back:
            if window == rank.window.widest:
                rank.has_passed = True
                yield from rank.blocks.apply(change, group_idx)
            else:
                self.counts.window_filtered += 1


HELD_BACK_MAX = 64
