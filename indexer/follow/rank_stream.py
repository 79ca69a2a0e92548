"""One rank of the fold: its stream's state machine, its slot, and what passes between the two.

effects     done to the index, in order          questions   of the rank's place, and of what the index holds of it
claims      compared with the index              answers     checked: is what was asked still true?
"""

from functools import partial

from indexer.follow.checkpoint import RankPlace
from indexer.follow.effects import ApplyEvent, Effect, RepairBuckets, ReplaceAll
from indexer.follow.follower import StreamFollower
from indexer.follow.inputs import Question
from indexer.follow.overfull import OverfullRanks
from indexer.follow.question import Ask
from indexer.follow.rank_state import RankState
from indexer.follow.status import FollowerStatistics
from indexer.index.prefix_index import PrefixIndex
from kv_protocol.digest import bucket_table
from kv_protocol.events import TIERS, Cleared, Event, Stored
from kv_protocol.ids import WorkerRank
from kv_protocol.recovery import Answer, DumpChunk, RecoverRequest


class RankStream:
    """What the fold knows of one rank that has a place (slot) in the index."""

    __slots__ = ("_asked_table", "_index", "_room", "follower", "heard_at_s", "instance", "rank", "slot")

    def __init__(
        self,
        rank: WorkerRank,
        slot: int,
        follower: StreamFollower,
        index: PrefixIndex,
        room: OverfullRanks,
        now_s: float,
    ) -> None:
        self.rank, self.slot, self.follower = rank, slot, follower
        self.heard_at_s = now_s
        """When something last proved it alive."""
        self.instance = ""
        """Which life of its worker that was; empty: not known yet."""
        self._index, self._room = index, room
        self._asked_table = b""

    def begin_at(self, place: RankPlace) -> None:
        """The stream is where it was then; where it had no place, nothing was heard of it yet."""
        self.instance = place.instance
        if place.epoch or place.seq:
            self.follower.begin_at(place.epoch, place.seq, place.logged_seq)

    def place(self) -> RankPlace:
        """Return where the stream is."""
        now = self.follower.statistics()
        return RankPlace(*self.rank, self.slot, now.epoch, now.cursor, now.logged_seq, now.stale, self.instance)

    def state(self, standing: FollowerStatistics) -> RankState:
        """Return what is held, with where the stream stands."""
        return RankState(
            worker_id=self.rank.worker_id,
            dp_rank=self.rank.dp_rank,
            epoch=standing.epoch,
            seq=standing.cursor,
            logged_seq=standing.logged_seq,
            stale=standing.stale,
            digests=tuple(self._index.digest(self.slot, tier) for tier in TIERS),
            chunks=tuple(self._index.dump(self.slot)),
        )

    def perform(self, effects: list[Effect], now_s: float) -> None:
        """The index holds what the stream wants it to hold, and what was claimed of that is compared."""
        refused_blocks = self._refused_blocks()
        for effect in effects:
            match effect:
                case ApplyEvent(event):
                    self._change(event, now_s)
                case ReplaceAll(chunks):
                    self._index.load(self.slot, chunks, now_s)
                    self.follower.on_memory(is_overfull=self._room.is_overfull_after_dump(self.slot))
                case RepairBuckets(buckets, chunks):
                    self._index.repair(self.slot, buckets, chunks, now_s)
        self.follower.on_memory(is_overfull=self._room.is_overfull(self.slot))
        if self._refused_blocks() > refused_blocks:
            self.follower.on_no_memory()
        self.follower.prove(partial(self._index.digest, self.slot), now_s)

    def _refused_blocks(self) -> int:
        """Return how many blocks the index has refused, where a refusal would say something new of the rank."""
        return self._index.statistics().refused_blocks_total if self.follower.is_proven_whole else 0

    def _change(self, event: Event, now_s: float) -> None:
        if isinstance(event, Stored):
            self._index.store(self.slot, event.parent, event.sequence_hashes, event.tier, now_s)
        elif isinstance(event, Cleared):
            self._index.clear(self.slot, event.tier)
        else:
            self._index.remove(self.slot, event.sequence_hashes, event.tier)

    def ask(self, now_s: float) -> Question:
        """Return the question that is due; what it says of the index is true until the stream applies something."""
        return Question(self.rank, self._request(self.follower.ask(now_s)))

    def _request(self, ask: Ask) -> RecoverRequest:
        self._asked_table = self._table() if ask.wants == "repair" else b""
        if ask.wants == "dump":
            return RecoverRequest(ask.request_id)
        return RecoverRequest(ask.request_id, *self.follower.position, self._asked_table)

    def on_answer(self, answer: Answer, now_s: float) -> list[Effect]:
        """A part of an answer came. A block that was parked may have found its parent since a repair was asked for."""
        is_repair = isinstance(answer, DumpChunk) and bool(answer.buckets)
        if is_repair and self.follower.expects(answer) and self._asked_table != self._table():
            self.follower.on_untrue_question(now_s)
            return []
        return self.follower.on_answer(answer, now_s)

    def _table(self) -> bytes:
        return bucket_table(self._index.bucket_digests(self.slot, tier) for tier in TIERS)
