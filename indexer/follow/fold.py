"""The index as a fold over the log: messages in, index changes inside, questions out.

    apply(fact, now), tick(now) -> questions to send        columns(chain, ranks) -> what each rank holds of a chain
    checkpoint(...) -> the whole state, at a place in the log        restore(checkpoint, now)

Facts (`inputs.py`) arrive in any order, late, twice or never; `follower.py` says what each means. A rank is forgotten
when its worker left, or when no heartbeat or answer came for `gone_s` while the log was connected and this process was
awake: silence while this process slept is ignored. While the log is disconnected no question is sent, no rank falls
behind, and ranks that were current or behind are stale (log_away).

A message that continues its stream is passed to the index undecoded (`inputs.py`), any other batch by batch, with the
same result. At most 16 questions are in flight, the others wait. A rank is stale while the index lacks memory for some
of its blocks. A new rank is refused if there is no memory or no slot for it, and admitted with its first message once
there is room. A refused rank from which no message comes for `gone_s` is forgotten.
"""

from array import array
from collections.abc import Sequence
from itertools import count
from math import inf

import msgspec
from msgspec.structs import replace

from indexer.follow.checkpoint import Checkpoint, RankCheckpoint, RankState
from indexer.follow.follower import FollowerLimits, StreamFollower
from indexer.follow.inputs import Fact, LogConnected, Message, Question, Received, WorkerCame, WorkerGone
from indexer.follow.status import FollowerStatistics, without_log
from indexer.index.overlap_columns import OverlapColumns, StatusColumnsCache, StreamStatus
from indexer.index.prefix_index import Depths, Hashes, IndexStatistics, PrefixIndex
from indexer.index.slots import RankSlots
from kv_protocol import codec
from kv_protocol.digest import bucket_table
from kv_protocol.events import TIERS
from kv_protocol.fleet import HEARTBEAT_PERIOD_S, MISSED_HEARTBEATS_MAX, Heartbeat
from kv_protocol.ids import WorkerRank
from kv_protocol.recovery import Answer, HeldBlock, RecoverRequest

__all__ = ["TICK_S", "FoldStatistics", "IndexFold", "OverlapColumns", "RankView"]

TICK_S = 1.0
AWAKE_S = 1.5 * TICK_S
"""A longer pause between two ticks means that the process did not run meanwhile. Every tick is a little late."""
RECOVERIES_MAX = 16
"""The most questions in flight: more at once would only share the same network and the same event loop."""
_NO_SLOT = 2**32 - 1


class RankView(msgspec.Struct, frozen=True, gc=False):
    """One rank for a decision: its overlap with the request, its place in its stream, and why it is stale."""

    overlap_blocks: Depths
    epoch: int
    seq: int
    stale: str


class FoldStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of the index and of each rank's stream, and how many blocks each rank holds on each tier."""

    index: IndexStatistics
    memory_bytes: dict[str, int]
    structure: dict[str, int]
    streams: dict[WorkerRank, FollowerStatistics]
    blocks: dict[WorkerRank, tuple[int, ...]]
    overfull_ranks: int
    refused_ranks: int
    """Ranks refused now; `slots.py` bounds their list."""
    refused_rank_facts_total: int
    """Facts of ranks that were refused."""
    refused_messages_total: int
    """Messages of ranks' streams that were malformed."""


class IndexFold:
    """All ranks' streams, and the index that they feed."""

    def __init__(
        self,
        index: PrefixIndex,
        limits: FollowerLimits | None = None,
        *,
        gone_s: float = HEARTBEAT_PERIOD_S * MISSED_HEARTBEATS_MAX,
    ) -> None:
        self._index = index
        self._slots = RankSlots(index)
        self.outline, self.chain, self.match = index.outline, index.chain, index.match
        """Any thread may call these if the index is thread-safe."""
        self.children = index.children
        self.rank_at, self.refused_ranks = self._slots.rank_of.get, self._slots.refused
        self._limits = limits or FollowerLimits()
        self._gone_s = gone_s
        self._ranks: dict[WorkerRank, StreamFollower] = {}
        self._waiting: dict[int, None] = {}
        self._in_flight: set[int] = set()
        """Slots of ranks: in `_waiting` their questions are to be sent, in this order; in `_in_flight` they were."""
        self._request_ids = count(1)
        self._status_columns = StatusColumnsCache(self._slot_of, self._status)
        self._is_log_connected = True
        self._ticked_at_s = inf
        self._refused_messages = 0

    # ---------------------------------------------------------------------------------------------- facts

    def apply(self, fact: Fact, now_s: float) -> list[Question]:
        """Fold one fact in; return the questions to send."""
        if isinstance(fact, Received):
            return self._apply_to_rank(fact, now_s)
        self._status_columns.touch_all()
        match fact:
            case WorkerCame(worker_id, capacity_blocks, instance):
                self._slots.set_capacity(worker_id, capacity_blocks, instance)
            case WorkerGone(worker_id, instance):
                for rank, stream in list(self._ranks.items()):
                    if rank.worker_id == worker_id and (not instance or stream.instance in ("", instance)):
                        self._forget(stream)
                self._slots.forget_worker(worker_id, instance)
            case LogConnected(is_connected):
                self._is_log_connected = is_connected
                if is_connected:
                    self._restart_timeouts(inf, now_s)
        return self._next_questions(now_s)

    def _restart_timeouts(self, silent_s: float, now_s: float) -> None:
        """Nothing could be received for `silent_s` (inf: unknown how long), which proves nothing: restart timeouts."""
        self._slots.restart_refused_timeouts(now_s)
        for stream in self._ranks.values():
            stream.alive_at_s = min(stream.alive_at_s + silent_s, now_s)
            stream.restart_timeouts(now_s)

    def _apply_to_rank(self, fact: Received, now_s: float) -> list[Question]:
        content = fact.content
        self._refused_messages += content is None
        self._status_columns.touch(fact.rank)
        stream = self._ranks.get(fact.rank)
        if stream is None and not isinstance(content, Answer):
            stream = self._admit(fact.rank, now_s)
        if stream is None:
            return []
        match content:
            case Message():
                if not _take_message(stream, content, now_s):
                    return []
            case Heartbeat():
                stream.on_heartbeat(content, now_s)
                if stream.position[0] == content.epoch:  # else it is of a retired epoch
                    stream.alive_at_s, stream.instance = now_s, content.instance
            case None:
                stream.on_refused(now_s)
            case _:
                stream.alive_at_s = now_s
                stream.on_answer(content, now_s)
        stream.prove(now_s)
        self._queue_question(stream, now_s)
        return self._next_questions(now_s)

    def _admit(self, rank: WorkerRank, now_s: float) -> StreamFollower | None:
        slot = self._slots.take(rank, now_s)
        return None if slot is None else self._follow(rank, slot, now_s)

    def _follow(self, rank: WorkerRank, slot: int, now_s: float) -> StreamFollower:
        self._status_columns.clear()
        stream = self._ranks[rank] = StreamFollower(rank, self._index, slot, self._limits, self._request_ids)
        stream.alive_at_s = now_s
        return stream

    def _forget(self, stream: StreamFollower) -> None:
        del self._ranks[stream.rank]
        self._status_columns.clear()
        self._slots.give_back(stream.slot)
        self._leave_queue(stream)

    def _leave_queue(self, stream: StreamFollower) -> None:
        self._waiting.pop(stream.slot, None)
        self._in_flight.discard(stream.slot)

    # ---------------------------------------------------------------------------------------------- time, questions

    def tick(self, now_s: float) -> list[Question]:
        """Forget silent ranks, repeat unanswered questions, and request the dumps for which there may be memory now.

        To be called every `TICK_S`.
        """
        stall_s, self._ticked_at_s = now_s - self._ticked_at_s - AWAKE_S, now_s
        if stall_s > 0:
            self._restart_timeouts(stall_s, now_s)
        self._status_columns.touch_all()
        if self._is_log_connected:
            for stream in [each for each in self._ranks.values() if now_s - each.alive_at_s >= self._gone_s]:
                self._forget(stream)
            self._slots.forget_silent(now_s - self._gone_s)
        for stream in self._ranks.values():
            if self._is_log_connected:
                stream.tick(now_s)
            if stream.question.wants is not None:
                self._queue_question(stream, now_s)
        return self._next_questions(now_s)

    def _queue_question(self, stream: StreamFollower, now_s: float) -> None:
        if stream.question.is_in_flight(now_s):
            return
        self._in_flight.discard(stream.slot)
        if stream.question.is_due(now_s):
            self._waiting.setdefault(stream.slot)  # at the end: silent consolidators do not block others
        else:
            self._waiting.pop(stream.slot, None)

    def _next_questions(self, now_s: float) -> list[Question]:
        questions = []
        while self._is_log_connected and self._waiting and len(self._in_flight) < RECOVERIES_MAX:
            slot = next(iter(self._waiting))
            del self._waiting[slot]
            self._in_flight.add(slot)
            questions.append(self._question_of(self._ranks[self._slots.rank_of[slot]], now_s))
        return questions

    def _question_of(self, stream: StreamFollower, now_s: float) -> Question:
        """Return the due question. A repair's digests stay right until the answer: nothing is applied in DOUBT."""
        place, question = stream.position, stream.question
        request_id = question.begin(place[1], now_s)
        if question.wants == "dump":
            return Question(stream.rank, RecoverRequest(request_id))
        is_repair, index = question.wants == "repair", self._index
        table = bucket_table(index.bucket_digests(stream.slot, tier) for tier in TIERS) if is_repair else b""
        return Question(stream.rank, RecoverRequest(request_id, *place, table))

    # ---------------------------------------------------------------------------------------------- checkpoints

    def checkpoint(self, stream_created: str, stream_seq: int, wall_ns: int) -> Checkpoint:
        """Return the state after message `stream_seq` of the stream that was created at `stream_created`."""
        ranks = [
            RankCheckpoint(*rank, each.slot, now.epoch, now.cursor, now.logged_seq, now.stale, each.instance)
            for rank, each in self._ranks.items()
            for now in [each.statistics()]
        ]
        return Checkpoint(stream_created, stream_seq, wall_ns, tuple(ranks), self._index.snapshot())

    def restore(self, checkpoint: Checkpoint, now_s: float) -> None:
        """Replace the state by the checkpoint's. Streams continue at the checkpoint's places, and are unconfirmed.

        Raises:
            MalformedMessage: its index cannot be read; nothing changed.
            IndexFull: there is no memory for it; nothing changed.
        """
        self._index.restore(checkpoint.index)
        for stream in self._ranks.values():
            self._leave_queue(stream)
        self._ranks.clear()
        self._status_columns.clear()
        self._slots.assign({rank.slot: rank.rank for rank in checkpoint.ranks})
        for rank in checkpoint.ranks:
            stream = self._follow(rank.rank, rank.slot, now_s)
            stream.instance = rank.instance
            if rank.epoch or rank.seq:  # both are 0 if nothing was received
                stream.begin_at(rank.epoch, rank.seq, rank.logged_seq)

    def off_log(self) -> list[WorkerRank]:
        """Return the ranks that may differ from a fold of the log alone."""
        return [rank for rank, stream in self._ranks.items() if stream.is_off_log]

    # ---------------------------------------------------------------------------------------------- what is known

    def columns(self, chain: Hashes, ranks: tuple[WorkerRank, ...]) -> OverlapColumns:
        """Return each rank's overlap with the chain and the status of its stream; a rank without a slot has no overlap.

        Cheap if the same tuple object was passed before.
        """
        columns = self._status_columns.of(ranks)
        self._index.match(chain, columns.depths, columns.slots)
        return columns.answer

    def overlap(self, sequence_hashes: Hashes, ranks: Sequence[WorkerRank]) -> list[RankView]:
        """Return the view of each of `ranks`, in order; the view of a rank without a slot is stale and empty."""
        depths = array("i", bytes(4 * len(TIERS) * len(ranks)))
        self._index.match(sequence_hashes, depths, array("I", map(self._slot_of, ranks)).tobytes())
        rows = zip(*(depths[tier * len(ranks) : (tier + 1) * len(ranks)] for tier in TIERS), strict=True)
        return [RankView(row, *self._status(rank)) for row, rank in zip(rows, ranks, strict=True)]

    def _slot_of(self, rank: WorkerRank) -> int:
        stream = self._ranks.get(rank)
        return _NO_SLOT if stream is None else stream.slot

    def _status(self, rank: WorkerRank) -> StreamStatus:
        stream = self._ranks.get(rank)
        if stream is None:
            epoch, seq, stale = 0, 0, "refused" if self._slots.is_refused(rank) else "never_heard"
        else:
            epoch, seq, stale = stream.status()
        return epoch, seq, stale if self._is_log_connected else without_log(stale)

    def ranks(self) -> list[WorkerRank]:
        """Return all ranks that have a stream."""
        return list(self._ranks)

    def overfull_ranks(self) -> set[WorkerRank]:
        """Return the ranks that lack blocks because the index had no memory."""
        return {rank for rank, stream in self._ranks.items() if stream.full_at is not None}

    def held(self, rank: WorkerRank) -> list[HeldBlock]:
        """Return what `rank` holds, parents first; nothing for an unknown rank."""
        stream = self._ranks.get(rank)
        return [] if stream is None else [block for chunk in self._index.dump(stream.slot) for block in chunk.blocks()]

    def state(self, rank: WorkerRank) -> RankState | None:
        """Return the present state of a rank; None if it has no slot."""
        stream = self._ranks.get(rank)
        if stream is None:
            return None
        status = self._stream_statistics(stream)
        return RankState(
            worker_id=rank.worker_id,
            dp_rank=rank.dp_rank,
            epoch=status.epoch,
            seq=status.cursor,
            logged_seq=status.logged_seq,
            stale=status.stale,
            digests=stream.digests(),
            chunks=tuple(self._index.dump(stream.slot)),
        )

    def holders(self, sequence_hash: int) -> dict[WorkerRank, int]:
        """Return which ranks hold a block, each with the bits of its tiers; empty for an unknown block."""
        holders = self._index.holders(sequence_hash)
        return dict(sorted((self._slots.rank_of[slot], bits) for slot, bits in holders.items()))

    def block_counts(self) -> dict[WorkerRank, tuple[int, ...]]:
        """Return how many blocks each rank holds, by tier."""
        return {rank: tuple(digest.block_count for digest in stream.digests()) for rank, stream in self._ranks.items()}

    def resyncs(self) -> dict[WorkerRank, int]:
        """Return how many complete dumps each rank's stream took."""
        return {rank: stream.counts.resyncs for rank, stream in self._ranks.items()}

    def statistics(self) -> FoldStatistics:
        """Return the figures for metrics and views."""
        return FoldStatistics(
            index=self._index.statistics(),
            memory_bytes=self._index.memory(),
            structure=self._index.structure(),
            streams={rank: self._stream_statistics(stream) for rank, stream in self._ranks.items()},
            blocks=self.block_counts(),
            overfull_ranks=len(self.overfull_ranks()),
            refused_ranks=len(self._slots.refused()),
            refused_rank_facts_total=self._slots.refused_total,
            refused_messages_total=self._refused_messages,
        )

    def _stream_statistics(self, stream: StreamFollower) -> FollowerStatistics:
        found = stream.statistics()
        return found if self._is_log_connected else replace(found, stale=without_log(found.stale))


def _take_message(follower: StreamFollower, message: Message, now_s: float) -> bool:
    """Take a message of the stream; return whether there may be a claim to compare, or a question to send."""
    if message.span is not None and follower.continues(message.span):
        return follower.on_next(message.span, message.data, now_s)
    for batch in codec.decode_message(message.data):
        follower.on_batch(batch, now_s)
    return True
