"""The index as a fold over the log: messages in, index changes inside, questions out.

    apply(fact, now) -> questions to send        tick(now) -> questions to send        columns(...) -> what is held
    checkpoint(...) -> all of it, at a place in the log        restore(checkpoint, now)

Facts come in any order, late, twice or never; `follower.py` says what each means. A rank is forgotten when its worker
left, or when nothing proved it alive (heartbeat, answer) for `gone_s` while the log could be heard and this process was
awake: a tick that comes late has heard nobody, and says nothing of the workers. While the log cannot be heard nobody
is asked anything, nobody falls behind, and who was current or behind is stale (log_away).

A message that continues its stream goes to the index as it is (`messages.py`), any other batch by batch; what is known
afterwards is the same. At most 16 ranks are asked at once, the others wait their turn (`question_turns.py`). A rank for
some of whose blocks the index had no memory is stale until it has (`overfull.py`). A new rank for which there is none
is refused, and admitted when it is heard again and there is; one that is not heard again for `gone_s` is forgotten.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from itertools import count

import numpy as np
from msgspec.structs import replace

from indexer.follow.checkpoint import Checkpoint
from indexer.follow.effects import Effect
from indexer.follow.fold_views import FoldStatistics, RankView
from indexer.follow.follower import FollowerLimits, StreamFollower
from indexer.follow.inputs import (
    AnswerArrived,
    BatchArrived,
    BytesRefused,
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
from indexer.follow.messages import Message
from indexer.follow.overfull import OverfullRanks
from indexer.follow.question_turns import RECOVERIES_MAX, QuestionTurns
from indexer.follow.rank_state import RankState
from indexer.follow.rank_stream import RankStream
from indexer.follow.status import FollowerStatistics, without_log
from indexer.index.overlap_columns import OverlapColumns, Seatings, StreamStanding
from indexer.index.prefix_index import Hashes, PrefixIndex, PrefixOrder
from indexer.index.prefix_views import PrefixView, StretchView, prefix_view, stretch_views
from indexer.index.slots import RankSlots
from kv_protocol import codec
from kv_protocol.errors import MalformedMessage
from kv_protocol.events import TIERS
from kv_protocol.fleet import HEARTBEAT_PERIOD_S, MISSED_HEARTBEATS_MAX
from kv_protocol.ids import WorkerRank
from kv_protocol.recovery import HeldBlock

__all__ = ["REFUSALS_KEPT_MAX", "FoldStatistics", "IndexFold", "OverlapColumns", "RankView"]

AWAKE_S = 1.0
"""Ticks come faster than that while the process is awake."""
REFUSALS_KEPT_MAX = 16
_COLUMNS_MIN = 64
_OF_A_RANK = (BatchArrived, MessageArrived, HeartbeatArrived, AnswerArrived, BytesRefused)


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
        self._places = RankSlots(index)
        self._room = OverfullRanks(index, memory_bytes_max)
        self._limits = limits or FollowerLimits()
        self._gone_s = gone_s
        self._ranks: dict[WorkerRank, RankStream] = {}
        self._turns = QuestionTurns(RECOVERIES_MAX)
        self._request_ids = count(1)
        self._seatings = Seatings(self._slot_of)
        self._make_room(_COLUMNS_MIN)
        self._log_heard = True
        self._ticked_at_s: float | None = None
        self._refused_messages = 0
        self._refusals: deque[tuple[WorkerRank, str]] = deque(maxlen=REFUSALS_KEPT_MAX)

    # ---------------------------------------------------------------------------------------------- facts

    def apply(self, fact: Fact, now_s: float) -> list[Question]:
        """Fold one fact in; return what is to be asked because of it."""
        if not isinstance(fact, _OF_A_RANK):
            self._seatings.touch_all()
        match fact:
            case WorkerCame(worker_id, capacity_blocks):
                self._places.set_capacity(worker_id, capacity_blocks)
            case WorkerGone(worker_id, instance):
                self._on_gone(worker_id, instance)
            case LogLost():
                self._log_heard = False
            case LogFound():
                self._log_heard = True
                self._hear_anew(now_s)
            case _:
                return self._apply_to_rank(fact, now_s)
        return self._ask_next(now_s)

    def _on_gone(self, worker_id: str, instance: str) -> None:
        for rank, stream in list(self._ranks.items()):
            if rank.worker_id == worker_id and (not instance or stream.instance in ("", instance)):
                self._forget(stream)
        self._places.forget_worker(worker_id)

    def _hear_anew(self, now_s: float) -> None:
        self._places.hear_refused(now_s)
        for stream in self._ranks.values():
            stream.heard_at_s = now_s
            stream.follower.wait_anew(now_s)

    def _apply_to_rank(self, fact: RankFact, now_s: float) -> list[Question]:
        self._refused_messages += isinstance(fact, BytesRefused)
        self._seatings.touch(fact.rank)
        stream = self._ranks.get(fact.rank)
        if stream is None and not isinstance(fact, AnswerArrived):
            stream = self._admit(fact.rank, now_s)
        if stream is None:
            return []
        if isinstance(fact, MessageArrived):
            return self._apply_message(stream, fact.message, now_s)
        effects: list[Effect] = []
        match fact:
            case BatchArrived(_, batch):
                effects = stream.follower.on_batch(batch, now_s)
            case HeartbeatArrived(_, heartbeat):
                effects = stream.follower.on_heartbeat(heartbeat, now_s)
                if stream.follower.position[0] == heartbeat.epoch:  # else it is the last word of a life that is over
                    stream.heard_at_s, stream.instance = now_s, heartbeat.instance
            case AnswerArrived(_, answer):
                stream.heard_at_s = now_s
                effects = stream.on_answer(answer, now_s)
            case BytesRefused():
                stream.follower.on_refused(now_s)
        return self._perform(stream, effects, now_s)

    def _apply_message(self, stream: RankStream, message: Message, now_s: float) -> list[Question]:
        follower, span, effects = stream.follower, message.span, list[Effect]()
        if span is None or not follower.continues(span):
            batches = codec.decode_message(message.data)
            effects = [effect for batch in batches for effect in follower.on_batch(batch, now_s)]
        elif self._is_refused(stream, message.data, now_s):
            follower.on_refused(now_s)
        elif not follower.on_applied(span):
            return []
        return self._perform(stream, effects, now_s)

    def _perform(self, stream: RankStream, effects: list[Effect], now_s: float) -> list[Question]:
        stream.perform(effects, now_s)
        self._take_turn(stream, now_s)
        return self._ask_next(now_s)

    def _is_refused(self, stream: RankStream, data: bytes, now_s: float) -> bool:
        """The index took the message as far as it had memory; return whether it found other fault with it."""
        reason = self._refusal(stream, data, now_s)
        if reason:
            self._refused_messages += 1
            self._refusals.append((stream.rank, reason))
        return bool(reason)

    def _refusal(self, stream: RankStream, data: bytes, now_s: float) -> str:
        try:
            refusals = self._index.apply_batch(stream.slot, data, now_s)
        except MalformedMessage as error:
            return str(error)
        others = [each for each in refusals if not each.refused_blocks]
        if len(refusals) > len(others):
            self._room.is_overfull(stream.slot)  # how full it was is noted now, not at the next tick
            stream.follower.on_no_memory()
        return f"event {others[0].event}, byte {others[0].offset}: {others[0].reason}" if others else ""

    def _admit(self, rank: WorkerRank, now_s: float) -> RankStream | None:
        slot = self._places.take(rank, now_s)
        return None if slot is None else self._follow(rank, slot, now_s)

    def _follow(self, rank: WorkerRank, slot: int, now_s: float) -> RankStream:
        while slot >= self._nobody:
            self._make_room(2 * (self._nobody + 1))
        self._seatings.clear()
        follower = StreamFollower(self._limits, self._request_ids)
        stream = self._ranks[rank] = RankStream(rank, slot, follower, self._index, self._room, now_s)
        return stream

    def _make_room(self, columns: int) -> None:
        """There is room for the depths of so many ranks, as `PrefixIndex.match` wants it; the last one is nobody."""
        self._matched = array("i", bytes(4 * len(TIERS) * columns))
        self._depths = np.frombuffer(self._matched, dtype=np.int32).reshape(len(TIERS), columns)
        self._nobody = columns - 1

    def _forget(self, stream: RankStream) -> None:
        del self._ranks[stream.rank]
        self._seatings.clear()
        self._places.give_back(stream.slot)
        self._room.forget(stream.slot)
        self._turns.leave(stream.slot)

    # ---------------------------------------------------------------------------------------------- time, questions

    def tick(self, now_s: float) -> list[Question]:
        """Let time pass: forget ranks that fell silent, ask again what was not answered, or what there is room for."""
        self._forgive_stall(now_s)
        self._seatings.touch_all()
        if self._log_heard:
            for stream in [each for each in self._ranks.values() if now_s - each.heard_at_s >= self._gone_s]:
                self._forget(stream)
            self._places.forget_silent(now_s - self._gone_s)
        overfull = self._room.look()
        for stream in self._ranks.values():
            stream.follower.on_memory(is_overfull=stream.slot in overfull)
        for slot in sorted(self._index.expire(now_s)):
            self._at(slot).follower.on_parked_lost(now_s)
        for slot in self._room.worth_asking():
            self._at(slot).follower.on_room(now_s)
        for stream in self._ranks.values():
            if self._log_heard:
                stream.follower.tick(now_s)
            if stream.follower.is_recovering:
                self._take_turn(stream, now_s)
        return self._ask_next(now_s)

    def _at(self, slot: int) -> RankStream:
        return self._ranks[self._places.rank_of(slot)]

    def _forgive_stall(self, now_s: float) -> None:
        stall_s = now_s - (self._ticked_at_s or now_s) - AWAKE_S
        self._ticked_at_s = now_s
        if stall_s > 0:
            self._places.hear_refused(now_s)
            for stream in self._ranks.values():
                stream.heard_at_s += stall_s
                stream.follower.wait_anew(now_s)

    def _take_turn(self, stream: RankStream, now_s: float) -> None:
        if stream.follower.is_in_flight(now_s):
            return
        self._turns.end(stream.slot)
        if stream.follower.is_due(now_s):
            self._turns.wait(stream.slot)
        else:
            self._turns.leave(stream.slot)

    def _ask_next(self, now_s: float) -> list[Question]:
        questions = []
        while self._log_heard and (slot := self._turns.next()) is not None:
            questions.append(self._at(slot).ask(now_s))
        return questions

    # ---------------------------------------------------------------------------------------------- checkpoints

    def checkpoint(self, stream_created: str, stream_seq: int, wall_ns: int) -> Checkpoint:
        """Return all that is known after message `stream_seq` of the log's stream that was created then."""
        places = tuple(stream.place() for stream in self._ranks.values())
        return Checkpoint(stream_created, stream_seq, wall_ns, places, self._index.snapshot())

    def restore(self, checkpoint: Checkpoint, now_s: float) -> None:
        """What the checkpoint says is known, and nothing else. Streams are at their places, of which nothing is proven.

        Raises:
            MalformedMessage: its index cannot be read; all is as before.
            IndexFull: there is no memory for it; all is as before.
        """
        self._index.restore(checkpoint.index, now_s)
        for stream in self._ranks.values():
            self._room.forget(stream.slot)
            self._turns.leave(stream.slot)
        self._ranks.clear()
        self._seatings.clear()
        self._places.sit({place.slot: place.rank for place in checkpoint.ranks})
        for place in checkpoint.ranks:
            self._follow(place.rank, place.slot, now_s).begin_at(place)

    def off_log(self) -> list[WorkerRank]:
        """Return the ranks whose place is not the log's: a fold of the log alone would have them elsewhere."""
        return [rank for rank, stream in self._ranks.items() if stream.follower.is_off_log]

    # ---------------------------------------------------------------------------------------------- what is known

    def columns(self, chain: Hashes, ranks: tuple[WorkerRank, ...]) -> OverlapColumns:
        """Return what each of `ranks` holds of the chain, and where its stream stands; who has no place holds nothing.

        Cheap for a tuple that was asked for before, the very same one.
        """
        seating = self._seatings.of(ranks)
        seating.refresh(self._standing)
        self._index.match(chain, self._matched)
        return OverlapColumns(self._depths.take(seating.slots, 1), seating.epochs, seating.seqs, seating.doubts)

    def overlap(self, sequence_hashes: Hashes, ranks: Sequence[WorkerRank]) -> list[RankView]:
        """Return the view of each of `ranks`, in their order; of one that has no place, a stale and empty one."""
        self._index.match(sequence_hashes, self._matched)
        return [self._view(rank) for rank in ranks]

    def _view(self, rank: WorkerRank) -> RankView:
        gpu, host, disk, external = self._depths[:, self._slot_of(rank)].tolist()
        return RankView((gpu, host, disk, external), *self._standing(rank))

    def _slot_of(self, rank: WorkerRank) -> int:
        stream = self._ranks.get(rank)
        return self._nobody if stream is None else stream.slot

    def _standing(self, rank: WorkerRank) -> StreamStanding:
        stream = self._ranks.get(rank)
        if stream is None:
            epoch, seq, stale = 0, 0, "refused" if self._places.is_refused(rank) else "never_heard"
        else:
            epoch, seq, stale = stream.follower.standing()
        return epoch, seq, stale if self._log_heard else without_log(stale)

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
        stream = self._ranks.get(rank)
        return [] if stream is None else [block for chunk in self._index.dump(stream.slot) for block in chunk.blocks()]

    def state(self, rank: WorkerRank) -> RankState | None:
        """Return all that is known of a rank at this moment; None for one that has no place."""
        stream = self._ranks.get(rank)
        return None if stream is None else stream.state(self._stream_statistics(stream))

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
            streams={rank: self._stream_statistics(stream) for rank, stream in self._ranks.items()},
            blocks={
                rank: tuple(self._index.digest(stream.slot, tier).block_count for tier in TIERS)
                for rank, stream in self._ranks.items()
            },
            overfull_ranks=len(self._index.overfull()),
            refused_ranks=len(self._places.refused()),
            refused_rank_facts_total=self._places.refused_total,
            refused_messages_total=self._refused_messages,
        )

    def _stream_statistics(self, stream: RankStream) -> FollowerStatistics:
        found = stream.follower.statistics()
        return found if self._log_heard else replace(found, stale=without_log(found.stale))
