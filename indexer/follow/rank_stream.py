"""One rank of the fold: connects its stream's state machine with its slot in the index.

effects     applied to the index, in order       questions   contain the rank's place, and its digests in the index
claims      compared with the index              answers     dropped if the digests in the question changed since
"""

from functools import partial

from indexer.follow.checkpoint import RankCheckpoint
from indexer.follow.follower import StreamFollower
from indexer.follow.inputs import ApplyEvent, Effect, Question, RepairBuckets, ReplaceAll
from indexer.follow.overfull import OverfullRanks
from indexer.follow.question import OpenQuestion
from indexer.follow.rank_state import RankState
from indexer.follow.status import FollowerStatistics
from indexer.index.prefix_index import PrefixIndex
from kv_protocol.digest import bucket_table
from kv_protocol.events import TIERS, Cleared, Event, Stored
from kv_protocol.ids import WorkerRank
from kv_protocol.recovery import Answer, DumpChunk, RecoverRequest


class FollowedRank:
    """One rank with a slot in the index."""

    __slots__ = ("_index", "_overfull", "_requested_table", "alive_at_s", "follower", "instance", "rank", "slot")

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
        self._requested_table = b""

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
                    self.follower.on_memory(is_overfull=self._overfull.is_overfull_after_dump(self.slot))
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
        """Return the question that is due; its digests are right until the stream applies something."""
        return Question(self.rank, self._request(self.follower.begin_question(now_s)))

    def _request(self, question: OpenQuestion) -> RecoverRequest:
        self._requested_table = self._table() if question.wants == "repair" else b""
        if question.wants == "dump":
            return RecoverRequest(question.request_id)
        return RecoverRequest(question.request_id, *self.follower.position, self._requested_table)

    def on_answer(self, answer: Answer, now_s: float) -> list[Effect]:
        """Take a part of an answer. A parked block may have found its parent since a repair was requested."""
        is_repair = isinstance(answer, DumpChunk) and bool(answer.buckets)
        if is_repair and self.follower.question.expects(answer.request_id) and self._requested_table != self._table():
            self.follower.want_dump(now_s)
            return []
        return self.follower.on_answer(answer, now_s)

    def _table(self) -> bytes:
        return bucket_table(self._index.bucket_digests(self.slot, tier) for tier in TIERS)
