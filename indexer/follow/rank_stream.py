"""One rank of the fold: connects its stream's state machine with its slot in the index.

effects     applied to the index, in order
claims      compared with the index
questions   get the rank's place, and its digests in the index

Of ranks with blocks for which the index had no memory, the dump is requested again:

    found                                  the dump is requested when
    ------------------------------------   ----------------------------------------------------------------------
    overfull                               memory is at, or nodes are below 0.9 of those when it became overfull
    overfull still, after its dump         memory is at, or nodes are below 0.9 of those after the dump
    not overfull any more                  never: all of its blocks are in the index

Nodes count because an index may keep the memory of removed blocks for later ones. The second row bounds the number of
dumps: after each dump in vain, memory or nodes have to fall by another tenth, also if an index refuses blocks long
before its limit.
"""

from functools import partial
from typing import NamedTuple

from indexer.follow.checkpoint import RankCheckpoint, RankState
from indexer.follow.follower import StreamFollower
from indexer.follow.inputs import ApplyEvent, Effect, Question, RepairBuckets, ReplaceAll
from indexer.follow.status import FollowerStatistics
from indexer.index.prefix_index import PrefixIndex
from kv_protocol.digest import bucket_table
from kv_protocol.events import TIERS, Cleared, Event, Stored
from kv_protocol.ids import WorkerRank
from kv_protocol.recovery import RecoverRequest

HEALED_RATIO = 0.9


class _Fill(NamedTuple):
    memory_bytes: int
    nodes: int

    def is_fall_from(self, full: "_Fill") -> bool:
        return self.memory_bytes <= HEALED_RATIO * full.memory_bytes or self.nodes < HEALED_RATIO * full.nodes


class OverfullRanks:
    """The overfull ranks of one index, by slot."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._full_at: dict[int, _Fill] = {}

    def refresh(self) -> set[int]:
        """Update from the index; return all overfull ranks."""
        found = self._index.overfull()
        for slot in self._full_at.keys() - found:
            del self._full_at[slot]
        for slot in found - self._full_at.keys():
            self._full_at[slot] = self._fill()
        return found

    def known(self) -> set[int]:
        """Return the overfull ranks as of the last check of each."""
        return set(self._full_at)

    def is_overfull(self, slot: int) -> bool:
        """Return whether one rank is overfull; the index is not asked again for a known one."""
        if slot not in self._full_at and slot in self._index.overfull():
            self._full_at[slot] = self._fill()
        return slot in self._full_at

    def forget(self, slot: int) -> None:
        """The rank was dropped from the index, or its blocks replaced."""
        self._full_at.pop(slot, None)

    def due_for_dump(self) -> list[int]:
        """Return, in ascending order, the overfull ranks for which there may be memory again."""
        if not self._full_at:
            return []
        now = self._fill()
        return sorted(slot for slot, full in self._full_at.items() if now.is_fall_from(full))

    def _fill(self) -> _Fill:
        statistics = self._index.statistics()
        return _Fill(statistics.memory_bytes, statistics.nodes)


class FollowedRank:
    """One rank with a slot in the index."""

    __slots__ = ("_index", "_overfull", "alive_at_s", "follower", "instance", "rank", "slot")

    def __init__(
        self,
        rank: WorkerRank,
        slot: int,
        follower: StreamFollower,
        index: PrefixIndex,
        overfull: OverfullRanks,
        now_s: float,
    ) -> None:
        self.rank, self.slot, self.follower = rank, slot, follower
        self.alive_at_s = now_s
        """When the last heartbeat or answer proved it alive."""
        self.instance = ""
        """The worker's instance in that heartbeat; empty: not known yet."""
        self._index, self._overfull = index, overfull

    def begin_at(self, checkpoint: RankCheckpoint) -> None:
        """Continue from a checkpoint; without a place in it, nothing was received yet."""
        self.instance = checkpoint.instance
        if checkpoint.epoch or checkpoint.seq:
            self.follower.begin_at(checkpoint.epoch, checkpoint.seq, checkpoint.logged_seq)

    def checkpoint(self) -> RankCheckpoint:
        """Return the rank's entry of a checkpoint."""
        now = self.follower.statistics()
        return RankCheckpoint(*self.rank, self.slot, now.epoch, now.cursor, now.logged_seq, now.stale, self.instance)

    def state(self, status: FollowerStatistics) -> RankState:
        """Return the rank's blocks with the status of its stream."""
        return RankState(
            worker_id=self.rank.worker_id,
            dp_rank=self.rank.dp_rank,
            epoch=status.epoch,
            seq=status.cursor,
            logged_seq=status.logged_seq,
            stale=status.stale,
            digests=tuple(self._index.digest(self.slot, tier) for tier in TIERS),
            chunks=tuple(self._index.dump(self.slot)),
        )

    def perform(self, effects: list[Effect], now_s: float) -> None:
        """Apply the effects to the index, then compare the newest claim with it."""
        refused_blocks = self._refused_blocks()
        for effect in effects:
            match effect:
                case ApplyEvent(event):
                    self._change(event, now_s)
                case ReplaceAll(chunks):
                    self._index.load(self.slot, chunks, now_s)
                    self._overfull.forget(self.slot)
                case RepairBuckets(buckets, chunks):
                    self._index.repair(self.slot, buckets, chunks, now_s)
        self.follower.on_memory(is_overfull=self._overfull.is_overfull(self.slot))
        if self._refused_blocks() > refused_blocks:
            self.follower.on_no_memory()
        self.follower.prove(partial(self._index.digest, self.slot), now_s)

    def _refused_blocks(self) -> int:
        """Return the number of blocks that the index refused; 0 if another refusal would not matter for the rank."""
        return self._index.statistics().refused_blocks_total if self.follower.is_proven_complete else 0

    def _change(self, event: Event, now_s: float) -> None:
        if isinstance(event, Stored):
            self._index.store(self.slot, event.parent, event.sequence_hashes, event.tier, now_s)
        elif isinstance(event, Cleared):
            self._index.clear(self.slot, event.tier)
        else:
            self._index.remove(self.slot, event.sequence_hashes, event.tier)

    def next_question(self, now_s: float) -> Question:
        """Return the question that is due. Its digests stay right: a stream in doubt applies nothing."""
        place, question = self.follower.position, self.follower.question
        request_id = question.begin(place[1], now_s)
        if question.wants == "dump":
            return Question(self.rank, RecoverRequest(request_id))
        table = b""
        if question.wants == "repair":
            table = bucket_table(self._index.bucket_digests(self.slot, tier) for tier in TIERS)
        return Question(self.rank, RecoverRequest(request_id, *place, table))
