"""The index as a fold over the log: streams in, index changes inside, questions out.

    apply(fact, now) -> questions to send        tick(now) -> questions to send        overlap(...) -> what is held

Facts come in any order, late, twice or never; `follower.py` says what each means. A rank is forgotten when its worker
left, or when nothing proved it alive (heartbeat, dump) for `gone_s` while the log could be heard and this process was
awake: a tick that comes late has heard nobody, and says nothing of the workers.
"""

from collections.abc import Sequence
from functools import partial

import msgspec

from indexer.core.follower import (
    ApplyEvent,
    AskDump,
    Effect,
    FollowerLimits,
    FollowerStatistics,
    ReplaceAll,
    StreamFollower,
)
from indexer.core.tree import Depths, IndexStatistics, PrefixIndex
from kv_protocol.events import TIERS, Batch, Cleared, Event, Stored
from kv_protocol.fleet import HEARTBEAT_PERIOD_S, MISSED_HEARTBEATS_MAX, Heartbeat
from kv_protocol.ids import WorkerRank
from kv_protocol.recovery import DumpChunk, DumpRequest, HeldBlock

RANKS_MAX = 4096
"""More ranks than one index serves; what comes beyond is refused and counted."""
AWAKE_S = 1.0
"""Ticks come faster than that while the process is awake."""


class BatchArrived(msgspec.Struct, frozen=True):
    """A batch of a rank's stream."""

    rank: WorkerRank
    batch: Batch


class HeartbeatArrived(msgspec.Struct, frozen=True):
    """A rank's pulse."""

    rank: WorkerRank
    heartbeat: Heartbeat


class ChunkArrived(msgspec.Struct, frozen=True):
    """A part of a rank's dump."""

    rank: WorkerRank
    chunk: DumpChunk


class BytesRefused(msgspec.Struct, frozen=True):
    """Something of a rank's stream could not be read."""

    rank: WorkerRank


class WorkerGone(msgspec.Struct, frozen=True):
    """A worker left: this life of it, or whichever it is where none is named."""

    worker_id: str
    instance: str = ""


class LogLost(msgspec.Struct, frozen=True):
    """The log cannot be heard: silence says nothing of the workers."""


class LogFound(msgspec.Struct, frozen=True):
    """The log can be heard again."""


Fact = BatchArrived | HeartbeatArrived | ChunkArrived | BytesRefused | WorkerGone | LogLost | LogFound


class Question(msgspec.Struct, frozen=True):
    """A dump that the shell is to ask of a rank's consolidator."""

    rank: WorkerRank
    request: DumpRequest


class RankView(msgspec.Struct, frozen=True, gc=False):
    """What a decision reads of one rank: its overlap with the request, its place in the log, and what is wrong."""

    overlap_blocks: Depths
    epoch: int
    seq: int
    stale: str


class FoldStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The index, each rank's stream, and how many blocks each rank holds on each tier."""

    index: IndexStatistics
    streams: dict[WorkerRank, FollowerStatistics]
    blocks: dict[WorkerRank, tuple[int, ...]]
    refused_ranks_total: int
    refused_bytes_total: int


class _RankState:
    __slots__ = ("follower", "heard_at_s", "instance", "slot")

    def __init__(self, slot: int, follower: StreamFollower, heard_at_s: float) -> None:
        self.slot = slot
        self.follower = follower
        self.heard_at_s = heard_at_s
        self.instance = ""


_NOTHING: Depths = (0, 0, 0, 0)


class IndexFold:
    """All ranks' streams and the one index that they feed."""

    def __init__(
        self,
        index: PrefixIndex,
        limits: FollowerLimits | None = None,
        *,
        gone_s: float = HEARTBEAT_PERIOD_S * MISSED_HEARTBEATS_MAX,
    ) -> None:
        self._index = index
        self._limits = limits or FollowerLimits()
        self._gone_s = gone_s
        self._ranks: dict[WorkerRank, _RankState] = {}
        self._rank_of_slot: dict[int, WorkerRank] = {}
        self._log_heard = True
        self._ticked_at_s: float | None = None
        self._refused_ranks = self._refused_bytes = 0

    def apply(self, fact: Fact, now_s: float) -> list[Question]:
        """Fold one fact in; return what is to be asked because of it."""
        match fact:
            case WorkerGone(worker_id, instance):
                for rank, state in list(self._ranks.items()):
                    if rank.worker_id == worker_id and (not instance or state.instance in ("", instance)):
                        self._forget(rank)
                return []
            case LogLost():
                self._log_heard = False
                return []
            case LogFound():
                self._log_heard = True
                for state in self._ranks.values():
                    state.heard_at_s = now_s
                return []
            case _:
                return self._apply_to_rank(fact, now_s)

    def _apply_to_rank(
        self, fact: BatchArrived | HeartbeatArrived | ChunkArrived | BytesRefused, now_s: float
    ) -> list[Question]:
        state = self._ranks.get(fact.rank)
        if state is None:
            if len(self._ranks) >= RANKS_MAX:
                self._refused_ranks += 1
                return []
            state = self._admit(fact.rank, now_s)
        follower = state.follower
        match fact:
            case BatchArrived(_, batch):
                effects = follower.on_batch(batch, now_s)
            case HeartbeatArrived(_, heartbeat):
                state.heard_at_s = now_s
                state.instance = heartbeat.instance
                effects = follower.on_heartbeat(heartbeat, partial(self._index.digest, state.slot), now_s)
            case ChunkArrived(_, chunk):
                state.heard_at_s = now_s
                effects = follower.on_chunk(chunk, now_s)
            case BytesRefused():
                self._refused_bytes += 1
                effects = follower.on_refused(now_s)
        return self._perform(fact.rank, state, effects, now_s)

    def tick(self, now_s: float) -> list[Question]:
        """Let time pass: forget ranks that fell silent, ask again what was not answered."""
        self._forgive_stall(now_s)
        if self._log_heard:
            for rank in [rank for rank, state in self._ranks.items() if now_s - state.heard_at_s >= self._gone_s]:
                self._forget(rank)
        questions: list[Question] = []
        for slot in sorted(self._index.expire(now_s)):
            rank = self._rank_of_slot[slot]
            state = self._ranks[rank]
            questions += self._perform(rank, state, state.follower.on_refused(now_s), now_s)
        for rank, state in self._ranks.items():
            questions += self._perform(rank, state, state.follower.tick(now_s), now_s)
        return questions

    def _forgive_stall(self, now_s: float) -> None:
        stall_s = now_s - (self._ticked_at_s or now_s) - AWAKE_S
        self._ticked_at_s = now_s
        if stall_s > 0:
            for state in self._ranks.values():
                state.heard_at_s += stall_s

    def _admit(self, rank: WorkerRank, now_s: float) -> _RankState:
        slot = next(slot for slot in range(len(self._ranks) + 1) if slot not in self._rank_of_slot)
        self._index.register(slot)
        self._rank_of_slot[slot] = rank
        state = self._ranks[rank] = _RankState(slot, StreamFollower(self._limits), now_s)
        return state

    def _forget(self, rank: WorkerRank) -> None:
        state = self._ranks.pop(rank)
        self._index.drop(state.slot)
        del self._rank_of_slot[state.slot]

    def _perform(self, rank: WorkerRank, state: _RankState, effects: list[Effect], now_s: float) -> list[Question]:
        questions = []
        for effect in effects:
            match effect:
                case ApplyEvent(event):
                    self._change(state.slot, event, now_s)
                case ReplaceAll(blocks):
                    self._index.load(state.slot, blocks)
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
        """Return the view of each of `ranks`, in their order; of one never heard of, a stale and empty one."""
        depths = self._index.match(sequence_hashes)
        return [self._view(rank, depths) for rank in ranks]

    def _view(self, rank: WorkerRank, depths: dict[int, Depths]) -> RankView:
        state = self._ranks.get(rank)
        if state is None:
            return RankView(_NOTHING, 0, 0, "never_heard")
        epoch, seq = state.follower.position
        return RankView(depths.get(state.slot, _NOTHING), epoch, seq, state.follower.stale)

    def ranks(self) -> list[WorkerRank]:
        """Return all ranks that have a stream."""
        return list(self._ranks)

    def held(self, rank: WorkerRank) -> list[HeldBlock]:
        """Return what `rank` holds, parents first; nothing for an unknown rank."""
        state = self._ranks.get(rank)
        return [] if state is None else list(self._index.dump(state.slot))

    def statistics(self) -> FoldStatistics:
        """Return the figures that metrics and people read."""
        return FoldStatistics(
            index=self._index.statistics(),
            streams={rank: state.follower.statistics() for rank, state in self._ranks.items()},
            blocks={
                rank: tuple(self._index.digest(state.slot, tier).block_count for tier in TIERS)
                for rank, state in self._ranks.items()
            },
            refused_ranks_total=self._refused_ranks,
            refused_bytes_total=self._refused_bytes,
        )
