"""The index as a fold over the log: streams in, index changes inside, questions out.

    apply(fact, now) -> questions to send        tick(now) -> questions to send        overlap(...) -> what is held

Facts come in any order, late, twice or never; `follower.py` says what each means. A rank is forgotten when its worker
left, or when nothing proved it alive (heartbeat, dump) for `gone_s` while the log could be heard and this process was
awake: a tick that comes late has heard nobody, and says nothing of the workers.

A message that continues its stream goes to the index as it is (`messages.py`), any other batch by batch; what is known
afterwards is the same. A rank for some of whose blocks the index had no memory is stale until it has (`room.py`). A new
rank for which there is none is refused, and admitted when it is heard again and there is; one that is not heard again
for `gone_s` is not spoken of any more.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from functools import partial

import msgspec

from indexer.core.facts import (
    BatchArrived,
    BytesRefused,
    ChunkArrived,
    Fact,
    HeartbeatArrived,
    LogFound,
    LogLost,
    MessageArrived,
    Question,
    RankFact,
    WorkerCame,
    WorkerGone,
)
from indexer.core.follower import (
    ApplyEvent,
    AskDump,
    Effect,
    FollowerLimits,
    FollowerStatistics,
    ReplaceAll,
    StreamFollower,
)
from indexer.core.messages import Message
from indexer.core.places import Places
from indexer.core.prefix_index import Depths, IndexStatistics, PrefixIndex, PrefixOrder
from indexer.core.prefix_views import PrefixView, StretchView, prefix_view, stretch_views
from indexer.core.room import Room
from kv_protocol import codec
from kv_protocol.errors import MalformedMessage
from kv_protocol.events import TIERS, Cleared, Event, Stored
from kv_protocol.fleet import HEARTBEAT_PERIOD_S, MISSED_HEARTBEATS_MAX
from kv_protocol.ids import WorkerRank
from kv_protocol.recovery import DumpRequest, HeldBlock

AWAKE_S = 1.0
"""Ticks come faster than that while the process is awake."""
REFUSALS_KEPT_MAX = 16
_COLUMNS_MIN = 64


class RankView(msgspec.Struct, frozen=True, gc=False):
    """What a decision reads of one rank: its overlap with the request, its place in the log, and what is wrong."""

    overlap_blocks: Depths
    epoch: int
    seq: int
    stale: str


class FoldStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The index, each rank's stream, and how many blocks each rank holds on each tier."""

    index: IndexStatistics
    memory_bytes: dict[str, int]
    structure: dict[str, int]
    streams: dict[WorkerRank, FollowerStatistics]
    blocks: dict[WorkerRank, tuple[int, ...]]
    overfull_ranks: int
    refused_ranks: int
    """Named ones that have no place in the index now."""
    refused_rank_facts_total: int
    """Facts of ranks that had none."""
    refused_messages_total: int
    """Messages of a rank's stream that could not be read, or that the index could not."""


class _RankState:
    __slots__ = ("follower", "heard_at_s", "instance", "slot")

    def __init__(self, slot: int, follower: StreamFollower, heard_at_s: float) -> None:
        self.slot = slot
        self.follower = follower
        self.heard_at_s = heard_at_s
        self.instance = ""


_NEVER_HEARD = RankView((0, 0, 0, 0), 0, 0, "never_heard")
_REFUSED = RankView((0, 0, 0, 0), 0, 0, "refused")


class IndexFold:
    """All ranks' streams and the one index that they feed.

    `memory_bytes_max` is the index's limit (0: none); by it is known when an overfull rank is worth asking again.
    """

    def __init__(
        self,
        index: PrefixIndex,
        limits: FollowerLimits | None = None,
        *,
        gone_s: float = HEARTBEAT_PERIOD_S * MISSED_HEARTBEATS_MAX,
        memory_bytes_max: int = 0,
    ) -> None:
        self._index = index
        self._places = Places(index)
        self._room = Room(index, memory_bytes_max)
        self._limits = limits or FollowerLimits()
        self._gone_s = gone_s
        self._ranks: dict[WorkerRank, _RankState] = {}
        self._columns = _COLUMNS_MIN
        self._depths = _depth_table(_COLUMNS_MIN)
        self._log_heard = True
        self._ticked_at_s: float | None = None
        self._refused_messages = 0
        self._refusals: deque[tuple[WorkerRank, str]] = deque(maxlen=REFUSALS_KEPT_MAX)

    def apply(self, fact: Fact, now_s: float) -> list[Question]:
        """Fold one fact in; return what is to be asked because of it."""
        match fact:
            case WorkerCame(worker_id, capacity_blocks):
                self._places.set_capacity(worker_id, capacity_blocks)
            case WorkerGone(worker_id, instance):
                self._on_gone(worker_id, instance)
            case LogLost():
                self._log_heard = False
            case LogFound():
                self._log_heard = True
                self._places.hear_refused(now_s)
                for state in self._ranks.values():
                    state.heard_at_s = now_s
            case _:
                return self._apply_to_rank(fact, now_s)
        return []

    def _on_gone(self, worker_id: str, instance: str) -> None:
        for rank, state in list(self._ranks.items()):
            if rank.worker_id == worker_id and (not instance or state.instance in ("", instance)):
                self._forget(rank)
        self._places.forget_worker(worker_id)

    def _apply_to_rank(self, fact: RankFact, now_s: float) -> list[Question]:
        self._refused_messages += isinstance(fact, BytesRefused)
        state = self._ranks.get(fact.rank) or self._admit(fact.rank, now_s)
        if state is None:
            return []
        follower = state.follower
        match fact:
            case MessageArrived(_, message):
                effects = self._on_message(fact.rank, state, message, now_s)
            case BatchArrived(_, batch):
                effects = follower.on_batch(batch, now_s)
            case HeartbeatArrived(_, heartbeat):
                state.heard_at_s = now_s
                state.instance = heartbeat.instance
                follower.on_memory(is_overfull=self._room.is_overfull(state.slot))
                effects = follower.on_heartbeat(heartbeat, partial(self._index.digest, state.slot), now_s)
            case ChunkArrived(_, chunk):
                state.heard_at_s = now_s
                effects = follower.on_chunk(chunk, now_s)
            case BytesRefused():
                effects = follower.on_refused(now_s)
        return self._perform(fact.rank, state, effects, now_s)

    def _on_message(self, rank: WorkerRank, state: _RankState, message: Message, now_s: float) -> list[Effect]:
        follower, span = state.follower, message.span
        if span is None or not follower.continues(span):
            batches = codec.decode_message(message.data)
            return [effect for batch in batches for effect in follower.on_batch(batch, now_s)]
        reason = self._refusal(state.slot, message.data, now_s)
        if not reason:
            follower.on_applied(span)
            return []
        self._refused_messages += 1
        self._refusals.append((rank, reason))
        return follower.on_refused(now_s)

    def _refusal(self, slot: int, data: bytes, now_s: float) -> str:
        """The index took the message as far as it had memory; return why it did not: empty where it did."""
        try:
            refusals = self._index.apply_batch(slot, data, now_s)
        except MalformedMessage as error:
            return str(error)
        if refusals:
            self._room.is_overfull(slot)  # how full it was is noted now, not at the next tick
        others = [each for each in refusals if not each.refused_blocks]
        return f"event {others[0].event}, byte {others[0].offset}: {others[0].reason}" if others else ""

    def tick(self, now_s: float) -> list[Question]:
        """Let time pass: forget ranks that fell silent, ask again what was not answered, or what there is room for."""
        self._forgive_stall(now_s)
        if self._log_heard:
            for rank in [rank for rank, state in self._ranks.items() if now_s - state.heard_at_s >= self._gone_s]:
                self._forget(rank)
            self._places.forget_silent(now_s - self._gone_s)
        overfull = self._room.look()
        for state in self._ranks.values():
            state.follower.on_memory(is_overfull=state.slot in overfull)
        questions: list[Question] = []
        for slot in sorted(self._index.expire(now_s)):
            rank, state = self._at(slot)
            questions += self._perform(rank, state, state.follower.on_parked_lost(now_s), now_s)
        for slot in self._room.worth_asking():
            rank, state = self._at(slot)
            questions += self._perform(rank, state, state.follower.on_room(now_s), now_s)
        for rank, state in self._ranks.items():
            questions += self._perform(rank, state, state.follower.tick(now_s), now_s)
        return questions

    def _at(self, slot: int) -> tuple[WorkerRank, _RankState]:
        rank = self._places.rank_of(slot)
        return rank, self._ranks[rank]

    def _forgive_stall(self, now_s: float) -> None:
        stall_s = now_s - (self._ticked_at_s or now_s) - AWAKE_S
        self._ticked_at_s = now_s
        if stall_s > 0:
            self._places.hear_refused(now_s)
            for state in self._ranks.values():
                state.heard_at_s += stall_s

    def _admit(self, rank: WorkerRank, now_s: float) -> _RankState | None:
        slot = self._places.take(rank, now_s)
        if slot is None:
            return None
        while slot >= self._columns:
            self._columns *= 2
            self._depths = _depth_table(self._columns)
        state = self._ranks[rank] = _RankState(slot, StreamFollower(self._limits), now_s)
        return state

    def _forget(self, rank: WorkerRank) -> None:
        state = self._ranks.pop(rank)
        self._places.give_back(state.slot)
        self._room.forget(state.slot)

    def _perform(self, rank: WorkerRank, state: _RankState, effects: list[Effect], now_s: float) -> list[Question]:
        questions = []
        for effect in effects:
            match effect:
                case ApplyEvent(event):
                    self._change(state.slot, event, now_s)
                case ReplaceAll(chunks):
                    self._index.load(state.slot, chunks, now_s)
                    state.follower.on_memory(is_overfull=self._room.is_overfull_after_dump(state.slot))
                case AskDump(request_id):
                    questions.append(Question(rank, DumpRequest(request_id)))
        return questions

    def _change(self, slot: int, event: Event, now_s: float) -> None:
        if isinstance(event, Stored):
            self._index.store(slot, event.parent, event.sequence_hashes, event.tier, now_s)
        elif isinstance(event, Cleared):
            self._index.clear(slot, event.tier)
        else:
            self._index.remove(slot, event.sequence_hashes, event.tier)

    def overlap(self, sequence_hashes: Sequence[int], ranks: Sequence[WorkerRank]) -> list[RankView]:
        """Return the view of each of `ranks`, in their order; of one that has no place, a stale and empty one."""
        depths, columns, views = self._depths, self._columns, []
        self._index.match(sequence_hashes, depths)
        for rank in ranks:
            state = self._ranks.get(rank)
            if state is None:
                views.append(_REFUSED if self._places.is_refused(rank) else _NEVER_HEARD)
                continue
            at = state.slot
            overlap = depths[at], depths[at + columns], depths[at + 2 * columns], depths[at + 3 * columns]
            views.append(RankView(overlap, *state.follower.standing()))
        return views

    def ranks(self) -> list[WorkerRank]:
        """Return all ranks that have a stream."""
        return list(self._ranks)

    def refused_ranks(self) -> dict[WorkerRank, str]:
        """Return the ranks that were refused and not admitted since, as far as they are named, and why."""
        return self._places.refused()

    def overfull_ranks(self) -> set[WorkerRank]:
        """Return the ranks that were found to be overfull and have not been found not to be since."""
        return {self._places.rank_of(slot) for slot in self._room.noted()}

    def take_refusals(self) -> list[tuple[WorkerRank, str]]:
        """Return the newest messages that the index itself refused since this was last asked: whose, and why."""
        taken = list(self._refusals)
        self._refusals.clear()
        return taken

    def held(self, rank: WorkerRank) -> list[HeldBlock]:
        """Return what `rank` holds, parents first; nothing for an unknown rank."""
        state = self._ranks.get(rank)
        return [] if state is None else [block for chunk in self._index.dump(state.slot) for block in chunk.blocks()]

    def prefixes(self, limit: int, order_by: PrefixOrder, now_s: float) -> list[StretchView]:
        """Return the first `limit` stretches of prefixes by what is asked, most first."""
        return stretch_views(self._index, self._places, limit, order_by, now_s)

    def prefix(self, sequence_hash: int, limit: int) -> PrefixView | None:
        """Return who holds one block, and at most `limit` of those behind it; None where nobody knows it."""
        return prefix_view(self._index, self._places, sequence_hash, limit)

    def statistics(self) -> FoldStatistics:
        """Return the figures that metrics and people read."""
        return FoldStatistics(
            index=self._index.statistics(),
            memory_bytes=self._index.memory(),
            structure=self._index.structure(),
            streams={rank: state.follower.statistics() for rank, state in self._ranks.items()},
            blocks={
                rank: tuple(self._index.digest(state.slot, tier).block_count for tier in TIERS)
                for rank, state in self._ranks.items()
            },
            overfull_ranks=len(self._index.overfull()),
            refused_ranks=len(self._places.refused()),
            refused_rank_facts_total=self._places.refused_total,
            refused_messages_total=self._refused_messages,
        )


def _depth_table(columns: int) -> "array[int]":
    """Return room for the depths of `columns` ranks, as `PrefixIndex.match` wants it."""
    return array("i", bytes(4 * 4 * columns))
