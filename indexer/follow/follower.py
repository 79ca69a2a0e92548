"""The state machine of one rank's stream: what each batch, heartbeat and answer means, in any order of delivery.

    NEW     nothing was received                      HOLE    batches are missing, the blocks are right: *tail* wanted
    LIVE    the next batch is applied on arrival      DOUBT   the blocks may be wrong: *repair* or *dump* wanted

    state        input                                 what happens
    ----------   -----------------------------------   -----------------------------------------------------------
    NEW          batch, heartbeat                      LIVE at seq 0 of its epoch, then as in LIVE
    NEW          bytes refused                         DOUBT: dump
    any          batch seq <= cursor                   duplicate: nothing
    any          batch or last_seq > cursor + 2^20     ignored; LIVE: HOLE, which only an answer ends
    LIVE         batch seq == cursor + 1               apply
    LIVE         batch seq > cursor + 1                gap: HOLE; a question `gap_s` later; the batch waits
    HOLE         batch seq == cursor + 1               apply, and the waiting ones that follow; no hole left:
                                                         LIVE; a gap left: a question `gap_s` from now
    HOLE         batch seq > cursor + 1                waits, at most `early_batches_max` and
                                                         `early_blocks_max` in them; the lowest seqs are dropped
    DOUBT        batch seq > cursor                    waits, as in HOLE; nothing is applied before the answer
    LIVE         heartbeat, last_seq > cursor          behind; HOLE if the batches do not come in `behind_s`
    LIVE         heartbeat's last_seq == cursor,       digests equal: proof; or a mismatch: DOUBT: repair, or dump
                   at once or later                      if nothing was proven since the last repair
    LIVE         heartbeat, last_seq < what the        the cursor is beyond the source's: DOUBT: dump
                   cursor was `behind_s` ago
    HOLE         replay                                each of its batches as above; at its last_seq: settle
    HOLE         dump complete, not before cursor      replace all; settle at its last_seq
    HOLE         dump complete, before cursor          the log was faster: settle at the cursor
    DOUBT        repair complete, repair wanted        replace the blocks of its buckets; settle at its last_seq
    DOUBT        dump complete                         replace all; settle at its last_seq
    LIVE, DOUBT  bytes refused                         DOUBT: repair
    HOLE         bytes refused                         nothing: their batches are in the tail, or leave another hole
    HOLE, DOUBT  an answer that cannot be right        DOUBT: dump
    any          heartbeat of another epoch            restart: forget all, LIVE at seq 0; if a batch outran it,
                                                         DOUBT: dump
    any          batch of another epoch                before the first heartbeat or answer: restart; else nothing
    any          anything of a retired epoch           nothing; a heartbeat: restart, after `silent_s` without proof
    overfull     a mismatch                            stale, no question: no answer would fit
    overfull     equal digests                         not overfull any more: the refused blocks are gone at the
                                                         source, too
    overfull     memory free again                     DOUBT: dump

*Settle*: waiting batches that follow are applied; if others remain, there is a new hole before them, else LIVE. Claims
of a place beyond the answer's last_seq are dropped if they were received before the question. A stream that wants more
than before sends a new question (`question.py`). A repair is right only while nothing else changes the rank's blocks,
so DOUBT applies nothing. `received.py` tracks heartbeats, and decides which epoch is followed.

In any state, a stream is *overfull* once the index had no memory for some of its blocks. It is still followed.
Memory counts as free again when the index's memory or nodes are a tenth below what they were when it last refused
blocks of the rank. Nodes count because an index may keep the memory of removed blocks for later ones. The tenth bounds
the number of dumps: after each useless dump, memory or nodes must fall by another tenth.
"""

from collections.abc import Iterator
from copy import copy
from typing import Literal

import msgspec

from indexer.follow.inputs import BatchSpan
from indexer.follow.question import AnsweredState, RecoveryQuestion, Wants
from indexer.follow.received import EpochTracker, HeartbeatClaim, HeartbeatTracker, ReorderBuffer
from indexer.follow.status import FollowerCounts, FollowerStatistics, StaleReason
from indexer.index.prefix_index import IndexStatistics, PrefixIndex
from kv_protocol import codec
from kv_protocol.digest import TierDigest
from kv_protocol.errors import MalformedMessage
from kv_protocol.events import TIERS, Batch, Cleared, Stored
from kv_protocol.fleet import NO_EVENTS, Heartbeat
from kv_protocol.ids import WorkerRank
from kv_protocol.recovery import Answer, ReplayChunk
from kv_protocol.splitmix import U64_MASK

AHEAD_MAX = 1 << 20
"""No stream runs this many batches ahead of its reader: with such a distance the seq or the cursor is wrong."""
_ONLY_AN_ANSWER = U64_MASK + 1  # as a hole's end: no batch reaches it
HEALED_RATIO = 0.9


StreamState = Literal["new", "live", "hole", "doubt"]


class FollowerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Timeouts (seconds) and capacity (batches, and blocks in them) of one stream.

    `gap_s` is how long the log has to close a gap by itself. Its default is longer than a publisher takes for its first
    two attempts to publish a refused message again (`worker_agent/events/rank_stream.py`: 0.1 s and 0.2 s later).
    """

    gap_s: float = 0.5
    behind_s: float = 2.0
    answer_s: float = 2.0
    backoff_max_s: float = 8.0
    silent_s: float = 3.0
    early_batches_max: int = 4096
    early_blocks_max: int = 1 << 18


class StreamFollower:
    """One rank's stream: changes the rank's blocks, those of `slot` in the index.

    The owner must call `prove` after each input. `request_ids` are unique among all questions of the owner.
    """

    def __init__(
        self, rank: WorkerRank, index: PrefixIndex, slot: int, limits: FollowerLimits, request_ids: Iterator[int]
    ) -> None:
        self.rank, self._index, self.slot, self._limits = rank, index, slot, limits
        self.alive_at_s = 0.0
        """When a heartbeat or an answer last proved the rank alive; the owner sets it."""
        self.instance = ""
        """The worker's instance in that heartbeat; empty: not known yet. The owner sets it."""
        self.question = RecoveryQuestion(limits.answer_s, limits.backoff_max_s, request_ids)
        """What the stream requests, if anything, and when; only the stream changes it."""
        self._reorder_buffer = ReorderBuffer(limits.early_batches_max, limits.early_blocks_max)
        self._heartbeats = HeartbeatTracker()
        self._epochs = EpochTracker(limits.silent_s)
        self.counts = FollowerCounts()
        """Counts of the stream so far; only the stream changes them."""
        self._phase: StreamState = "new"
        self._has_epoch = False
        self._epoch = self._cursor = self._logged_seq = 0
        self._source_stale = ""
        self.full_at: IndexStatistics | None = None
        """While the rank is overfull: the index as it was when it refused blocks of the rank."""
        self._hole_end = 0
        self._is_repaired = False
        self._lost_at_s: float | None = None

    def begin_at(self, epoch: int, seq: int, logged_seq: int) -> None:
        """Make a new stream LIVE at this place; nothing is proven."""
        self._phase, self._has_epoch = "live", True
        self._epoch, self._cursor, self._logged_seq = epoch, seq, logged_seq

    # ---------------------------------------------------------------------------------------------- place, status

    @property
    def position(self) -> tuple[int, int]:
        """The epoch and the last applied seq."""
        return self._epoch, self._cursor

    @property
    def is_off_log(self) -> bool:
        """Whether a fold of the log alone may differ: the place is not from the log, or the stream wants an answer."""
        differs = self._cursor != self._logged_seq or (self._logged_seq == 0 and self.counts.restarts > 0)
        return differs or self.question.wants is not None

    def status(self) -> tuple[int, int, StaleReason]:
        """Return the position, and why the rank's blocks are not known to be current; empty: they are.

        A decision calls it for each rank that received something since the last one: it must be fast.
        """
        if self._phase == "live" and not (self._source_stale or self._heartbeats.awaited or self.full_at):
            return self._epoch, self._cursor, ""
        return self._epoch, self._cursor, self._reason()

    def _reason(self) -> StaleReason:
        if self._phase == "new":
            return "never_heard"
        if self._phase != "live":
            return "resyncing"
        if self.full_at is not None:
            return "overfull"
        if self._source_stale:
            return "no_events" if self._source_stale.startswith(NO_EVENTS) else "source"
        return "behind" if self._heartbeats.awaited is not None else ""

    def statistics(self) -> FollowerStatistics:
        """Return the position, status and counts of the stream."""
        return FollowerStatistics(
            epoch=self._epoch,
            cursor=self._cursor,
            logged_seq=self._logged_seq,
            stale=self._reason(),
            counts=copy(self.counts),
        )

    def digests(self) -> tuple[TierDigest, ...]:
        """Return the digest of the rank's blocks on each tier, in order."""
        return tuple(self._index.digest(self.slot, tier) for tier in TIERS)

    # ---------------------------------------------------------------------------------------------- batches

    def continues(self, span: BatchSpan) -> bool:
        """Return whether the batches of `span` are the next ones, so that all can be applied."""
        return self._phase == "live" and span.epoch == self._epoch and span.first_seq == self._cursor + 1

    def on_next(self, span: BatchSpan, message: bytes, now_s: float) -> bool:
        """Apply a message of the next batches of the log; return whether `prove` may have a claim to compare."""
        self._note_refused(self._index.apply_batch(self.slot, message, now_s))
        self._advance(span.last_seq)
        self._logged_seq = span.last_seq
        return self._heartbeats.claim is not None

    def on_batch(self, batch: Batch, now_s: float) -> None:
        """Apply a batch from the log, or let it wait."""
        if batch.epoch != self._epoch or not self._has_epoch:
            if not self._epochs.on_other_batch(batch.epoch):
                self.counts.other_epoch += 1
                return
            self._adopt(batch.epoch, now_s)
        if batch.seq <= self._cursor + AHEAD_MAX:
            self._logged_seq = max(self._logged_seq, batch.seq)
        before = self._cursor
        self._take(batch, now_s)
        if self._phase == "hole" and not self._reorder_buffer and self._cursor >= self._hole_end:
            self.counts.holes_closed += 1
            self._settle(now_s)
        elif self._is_gap and self._cursor > before:
            self.question.not_before_s = now_s + self._limits.gap_s

    def _take(self, batch: Batch, now_s: float) -> None:
        if batch.seq <= self._cursor:
            self.counts.duplicates += 1
        elif batch.seq > self._cursor + AHEAD_MAX:
            self._disbelieve(now_s)
        elif batch.seq == self._cursor + 1 and self._phase != "doubt":
            self._step(batch, now_s)
            self._drain(now_s)
        else:
            self.counts.kept_lost += self._reorder_buffer.keep(batch, self.question.request_id)
            if self._phase == "live":
                self.counts.gaps += 1
                self._recover("tail", now_s)

    def _step(self, batch: Batch, now_s: float) -> None:
        event = batch.event
        if isinstance(event, Stored):
            stored = event.parent, event.sequence_hashes, event.tier
            self._note_refused(self._index.store(self.slot, *stored, now_s))
        elif isinstance(event, Cleared):
            self._index.clear(self.slot, event.tier)
        else:
            self._index.remove(self.slot, event.sequence_hashes, event.tier)
        self._advance(batch.seq)

    def _drain(self, now_s: float) -> None:
        for batch in self._reorder_buffer.following(self._cursor):
            self._step(batch, now_s)

    def _note_refused(self, refused_blocks: int) -> None:
        if refused_blocks and self.full_at is None:
            self.full_at = self._index.statistics()

    def _advance(self, seq: int) -> None:
        self.counts.applied += seq - self._cursor
        self._cursor = seq
        awaited = self._heartbeats.awaited
        if awaited is not None and seq >= awaited.seq:
            self._heartbeats.reach(awaited, seq)

    # ---------------------------------------------------------------------------------------------- heartbeats

    def on_heartbeat(self, heartbeat: Heartbeat, now_s: float) -> None:
        """Take the epoch and the claim of a heartbeat."""
        if self._epochs.is_over(heartbeat.epoch, now_s):
            return
        if heartbeat.epoch != self._epoch or not self._has_epoch:
            self._adopt(heartbeat.epoch, now_s)
            if self._epochs.has_lost_batches(heartbeat.epoch):
                self._recover("dump", now_s)
        self._epochs.on_proof(now_s)
        self._source_stale = heartbeat.stale
        claim = HeartbeatClaim(heartbeat.last_seq, now_s, heartbeat.tiers)
        if claim.seq > self._cursor + AHEAD_MAX:
            self._disbelieve(now_s)
        elif self._phase != "live":
            self._heartbeats.note(claim)
        elif self._heartbeats.compare(claim, self._cursor, self._limits.behind_s):
            self.counts.implausible += 1
            self._recover("dump", now_s)

    def _disbelieve(self, now_s: float) -> None:
        """Take a seq that is too far ahead; if nothing was applied yet, it only means a long hole."""
        self.counts.implausible += self._cursor > 0
        if self._phase == "live":
            self.counts.gaps += self._cursor == 0
            self._recover("tail", now_s, hole_end=_ONLY_AN_ANSWER)

    def prove(self, now_s: float) -> None:
        """Compare the claim for the present place, if any, with the digests of the index."""
        claim, self._heartbeats.claim = self._heartbeats.claim, None
        if claim is None or claim.seq != self._cursor or self._phase != "live":
            return
        if {each for each in claim.tiers if each.block_count} == {each for each in self.digests() if each.block_count}:
            self._is_repaired = False
            self.full_at = None
            self.question.on_proof()
        elif self.full_at is None:
            self.counts.digest_mismatches += 1
            self._recover("dump" if self._is_repaired else "repair", now_s)

    # ---------------------------------------------------------------------------------------------- doubts, time

    def on_refused(self, now_s: float) -> None:
        """Recover, unless in HOLE, from bytes of this stream that could not be read: the blocks may be wrong."""
        if self._phase != "hole":
            self._recover("repair" if self._has_epoch else "dump", now_s)

    def tick(self, now_s: float) -> None:
        """Request awaited batches that did not come within `behind_s`, and all blocks if there may be memory again."""
        if self.full_at is not None and has_room_again(self._index.statistics(), self.full_at):
            self._recover("dump", now_s)
        awaited = self._heartbeats.awaited
        if self._phase == "live" and awaited is not None and now_s - awaited.at_s >= self._limits.behind_s:
            self.counts.gaps += 1
            self._recover("tail", awaited.at_s, hole_end=awaited.seq)

    def restart_timeouts(self, now_s: float) -> None:
        """Nothing could be received until now: restart the timeouts of awaited batches."""
        self._heartbeats.restart_timeouts(now_s)
        if self._is_gap:
            self.question.not_before_s = now_s + self._limits.gap_s

    @property
    def _is_gap(self) -> bool:
        """Whether batches came early: the log continues after the hole."""
        return self._phase == "hole" and self._hole_end == 0

    def _recover(self, wants: Wants, since_s: float, *, hole_end: int = 0) -> None:
        """Want this from `since_s` on, unless the stream wants more already."""
        if not self.question.want(wants, since_s + self._limits.gap_s if wants == "tail" else since_s):
            return
        self._phase = "hole" if wants == "tail" else "doubt"
        self._hole_end = hole_end
        if self._lost_at_s is None:
            self._lost_at_s = since_s

    # ---------------------------------------------------------------------------------------------- answers

    def on_answer(self, answer: Answer, now_s: float) -> None:
        """Take a part of an answer."""
        if not self.question.expects(answer.request_id) or self._epochs.is_retired(answer.epoch):
            return
        if isinstance(answer, ReplayChunk):
            self._replay(answer, now_s)
            return
        if answer.buckets and (self.question.wants != "repair" or answer.epoch != self._epoch):
            return
        state = self.question.collect(answer, now_s)
        if state is None:
            return
        self._epochs.on_proof(now_s)
        if state.buckets:
            self._repair(state, now_s)
        else:
            self._replace(state, now_s)

    def _replay(self, answer: ReplayChunk, now_s: float) -> None:
        if self._phase != "hole" or answer.epoch != self._epoch:
            return
        try:
            batches = codec.decode_message(answer.message) if answer.message else []
        except MalformedMessage:
            self._recover("dump", now_s)
            return
        self._epochs.on_proof(now_s)
        if answer.last_seq < self.question.after_seq:
            self.counts.implausible += 1
            self._recover("dump", now_s)
            return
        before = self._cursor, len(self._reorder_buffer)
        for batch in batches:
            if batch.epoch == self._epoch:
                self._take(batch, now_s)
        if (self._cursor, len(self._reorder_buffer)) != before:
            self.question.progress_at_s = now_s
        if self._cursor >= answer.last_seq:
            self.counts.replays += 1
            self._settle(now_s, answer.last_seq)

    def _repair(self, state: AnsweredState, now_s: float) -> None:
        if not state.keeps_to_its_buckets:
            self._recover("dump", now_s)
            return
        self.counts.repairs += 1
        self._is_repaired = True
        self._cursor = state.last_seq
        self._note_refused(self._index.repair(self.slot, state.buckets, state.chunks, now_s))
        self._settle(now_s, state.last_seq)

    def _replace(self, state: AnsweredState, now_s: float) -> None:
        epoch, last_seq = state.epoch, state.last_seq
        if epoch != self._epoch or not self._has_epoch:
            self._adopt(epoch, now_s)
        elif self._phase == "hole" and self.question.after_seq <= last_seq < self._cursor:
            self._settle(now_s, last_seq)
            return
        self.counts.resyncs += 1
        self._is_repaired = False
        self._cursor = last_seq
        self.full_at = None
        self._note_refused(self._index.load(self.slot, state.chunks, now_s))
        self._settle(now_s, last_seq)

    def _settle(self, now_s: float, answered_seq: int | None = None) -> None:
        """Close the question and apply waiting batches that follow; then LIVE, or in a HOLE if others still wait."""
        if answered_seq is not None:
            self._heartbeats.discard_beyond(answered_seq, self.question.sent_at_s)
            self.counts.implausible += self._reorder_buffer.drop_untrue(answered_seq, self.question.request_id)
            self.question.on_answered()
        else:
            self.question.end()
        self._phase = "live"
        self.counts.duplicates += self._reorder_buffer.drop_up_to(self._cursor)
        self._drain(now_s)
        self._heartbeats.settle(self._cursor, now_s)
        if self._reorder_buffer:
            self.counts.gaps += 1
            self._recover("tail", now_s)
        else:
            self._end_recovery(now_s)

    def _end_recovery(self, now_s: float) -> None:
        if self._lost_at_s is not None:
            self.counts.heals += 1
            self.counts.last_healing_s = now_s - self._lost_at_s
            self.counts.healing_s_total += self.counts.last_healing_s
            self._lost_at_s = None

    def _adopt(self, epoch: int, now_s: float) -> None:
        self._epochs.begin(epoch, self._epoch if self._has_epoch else None)
        if self._has_epoch:
            self.counts.restarts += 1
            self.full_at = None
            self._index.clear(self.slot)
        self._phase, self._has_epoch = "live", True
        self._epoch, self._cursor, self._logged_seq = epoch, 0, 0
        self._source_stale, self._is_repaired = "", False
        self._heartbeats.forget()
        self._reorder_buffer.clear()
        self.question.end()
        self.question.on_proof()
        self._end_recovery(now_s)


def has_room_again(now: IndexStatistics, full: IndexStatistics) -> bool:
    """Return whether there may be memory again for blocks that were refused at `full`."""
    return now.memory_bytes <= HEALED_RATIO * full.memory_bytes or now.nodes < HEALED_RATIO * full.nodes
