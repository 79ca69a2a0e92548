"""The state machine of one rank's stream: what each batch, heartbeat and answer means, however the network delivers it.

    NEW     nothing was heard of it                   HOLE    batches are missing, what is held is right: *tail* wanted
    LIVE    the next batch is applied when it comes   DOUBT   what is held may be wrong: *repair* wanted, or *dump*

    state        input                                 what happens
    ----------   -----------------------------------   -----------------------------------------------------------
    NEW          batch, heartbeat                      LIVE at seq 0 of its epoch, then as there
    NEW          bytes refused                         DOUBT: dump
    any          batch seq <= cursor                   duplicate: nothing
    any          batch or last_seq > cursor + 2^20     not believed, not kept; LIVE: HOLE, which only an answer ends
    LIVE         batch seq == cursor + 1               apply
    LIVE         batch seq > cursor + 1                gap: HOLE, requested `gap_s` later; the batch is kept
    HOLE         batch seq == cursor + 1               apply, and what was kept and follows; no hole left: LIVE;
                                                         a gap left: requested `gap_s` from now on
    HOLE         batch seq > cursor + 1                kept, at most `kept_max` and `kept_blocks_max`
                                                         in them, the oldest give way
    DOUBT        batch seq > cursor                    kept, as in HOLE; nothing is applied before the answer
    LIVE         heartbeat, last_seq > cursor          behind; HOLE when not there `behind_s` after it was told
    LIVE         heartbeat's last_seq == cursor,       digests equal: proof; or a mismatch: DOUBT: repair, or dump
                   at once or later                      where nothing was proven since the last repair
    LIVE         heartbeat, last_seq < what the        the place is beyond its source's: DOUBT: dump
                   cursor was `behind_s` ago
    HOLE         replay                                as its batches, each; at its last_seq: settle
    HOLE         dump complete, not before cursor      replace all; settle at its last_seq
    HOLE         dump complete, before cursor          the log was faster: settle at the cursor
    DOUBT        repair complete, repair wanted        replace the blocks of its buckets; settle at its last_seq
    DOUBT        dump complete                         replace all; settle at its last_seq
    LIVE, DOUBT  bytes refused, by whomever            DOUBT: repair
    HOLE         bytes refused                         nothing: the tail has them, or they are another hole
    not NEW      parked blocks lost                    DOUBT: repair
    not NEW      room again                            DOUBT: dump
    HOLE, DOUBT  an answer that cannot be right        DOUBT: dump
    any          heartbeat of another epoch            restart: forget all, LIVE at seq 0; where a batch outran it,
                                                         DOUBT: dump
    any          batch of another epoch                before the first proof of life: restart; after it: nothing
    any          anything of a retired epoch           nothing
    overfull     a mismatch, parked blocks lost        stale, and nothing else: no answer would fit
    overfull     equal digests                         not stale: what was refused is gone at the source, too,
                                                         until more is refused

*Settle*: what was kept and follows is applied; a new hole before the rest of it, or LIVE. What was told before the
question and lies beyond the answer's last_seq is not believed any more. Who wants more than before asks anew
(`question.py`); a repair is right only while nothing else changes the rank's blocks, so DOUBT applies nothing. Which
life of a source is followed, and who may say so: `epochs.py`. What heartbeats tell: `heartbeats.py`.

A stream is *overfull*, beside its state, once the index had no memory for some of its blocks: the index's owner says
so (`on_memory`). What is held goes on to be followed.
"""

from collections.abc import Callable, Iterator
from copy import copy
from enum import Enum
from itertools import count

import msgspec

from indexer.follow.answer_parts import RankState
from indexer.follow.effects import ApplyEvent, Effect, RepairBuckets, ReplaceAll
from indexer.follow.epochs import EpochTracker
from indexer.follow.heartbeats import ClaimedPlace, HeartbeatTracker
from indexer.follow.kept_batches import KeptBatches
from indexer.follow.messages import Span
from indexer.follow.question import Ask, RecoveryQuestion, Wants
from indexer.follow.status import FollowerCounts, FollowerStatistics, StaleReason
from kv_protocol import codec
from kv_protocol.digest import TierDigest
from kv_protocol.errors import MalformedMessage
from kv_protocol.events import TIERS, Batch, Tier
from kv_protocol.fleet import Heartbeat
from kv_protocol.recovery import Answer, ReplayChunk
from kv_protocol.splitmix import U64_MASK

AHEAD_MAX = 1 << 20
"""No stream runs so many batches ahead of its reader that is not asked: who says so is wrong, or the place is."""
_ONLY_AN_ANSWER = U64_MASK + 1


class StreamState(Enum):
    """Where a stream stands."""

    NEW = "new"
    LIVE = "live"
    HOLE = "hole"
    DOUBT = "doubt"


_LIVE = StreamState.LIVE
"""For what every decision and message asks: finding a member of an `Enum` takes longer than all the rest there."""


class FollowerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Patience (seconds) and room (batches, and blocks in them) of one stream.

    `gap_s` is how long the log has to close a gap by itself. Its default is longer than a publisher takes for its first
    two attempts to publish a refused message again (`worker_agent/events/rank_stream.py`: 0.1 s and 0.2 s later).
    """

    gap_s: float = 0.5
    behind_s: float = 2.0
    answer_s: float = 2.0
    backoff_max_s: float = 8.0
    silent_s: float = 3.0
    kept_max: int = 4096
    kept_blocks_max: int = 1 << 18


class StreamFollower:
    """One rank's stream. What is to be done to the index is returned, in order; what is to be asked, `ask` says.

    Whoever owns it calls `prove` after everything that was done to the index. `request_ids` are numbers that no other
    question of the owner has.
    """

    def __init__(self, limits: FollowerLimits | None = None, request_ids: Iterator[int] | None = None) -> None:
        self._limits = limits or FollowerLimits()
        self._asking = RecoveryQuestion(self._limits.answer_s, self._limits.backoff_max_s, request_ids or count(1))
        self._kept = KeptBatches(self._limits.kept_max, self._limits.kept_blocks_max)
        self._pulse = HeartbeatTracker()
        self._lives = EpochTracker(self._limits.silent_s)
        self._counts = FollowerCounts()
        self._phase = StreamState.NEW
        self._has_epoch = False
        self._epoch = self._cursor = self._logged_seq = 0
        self._source_stale = ""
        self._is_overfull = self._is_whole = False
        self._hole_end = 0
        self._is_repaired = False
        self._lost_at_s: float | None = None

    def begin_at(self, epoch: int, seq: int, logged_seq: int) -> None:
        """A new stream is LIVE at this place, of which nothing is proven."""
        self._phase, self._has_epoch = StreamState.LIVE, True
        self._epoch, self._cursor, self._logged_seq = epoch, seq, logged_seq

    # ---------------------------------------------------------------------------------------------- where it stands

    @property
    def position(self) -> tuple[int, int]:
        """The epoch and the last applied seq."""
        return self._epoch, self._cursor

    @property
    def is_off_log(self) -> bool:
        """Whether a fold of the log alone may have it elsewhere: more or less was told, or what is held is doubted."""
        is_elsewhere = self._cursor != self._logged_seq or (self._logged_seq == 0 and self._counts.restarts > 0)
        return is_elsewhere or self.is_recovering

    @property
    def stale(self) -> StaleReason:
        """Why the rank's blocks are not known to be current; empty when they are."""
        return self.standing()[2]

    def standing(self) -> tuple[int, int, StaleReason]:
        """Return position and staleness, which every decision reads of every rank, at once."""
        if self._phase is _LIVE and not self._source_stale and self._pulse.awaited is None and not self._is_overfull:
            return self._epoch, self._cursor, ""
        return self._epoch, self._cursor, self._reason()

    def _reason(self) -> StaleReason:
        if self._phase is StreamState.NEW:
            return "never_heard"
        if self._phase is not StreamState.LIVE:
            return "resyncing"
        if self._is_overfull and not self._is_whole:
            return "overfull"
        if self._source_stale:
            return "source"
        return "behind" if self._pulse.awaited is not None else ""

    def statistics(self) -> FollowerStatistics:
        """Return where the stream stands, and what has befallen it."""
        return FollowerStatistics(
            epoch=self._epoch,
            cursor=self._cursor,
            logged_seq=self._logged_seq,
            stale=self.stale,
            counts=copy(self._counts),
        )

    # ---------------------------------------------------------------------------------------------- batches

    def continues(self, span: Span) -> bool:
        """Return whether the batches of `span` are the next ones, so that each would be applied."""
        return self._phase is _LIVE and span.epoch == self._epoch and span.first_seq == self._cursor + 1

    def on_applied(self, span: Span) -> bool:
        """The next batches came by the log, and were applied; return whether `prove` may have something to compare."""
        seq, awaited = span.last_seq, self._pulse.awaited
        self._counts.applied += seq - self._cursor
        self._cursor = self._logged_seq = seq
        if awaited is None or seq < awaited.seq:
            return False
        self._pulse.reach(awaited, seq)
        return True

    def on_batch(self, batch: Batch, now_s: float) -> list[Effect]:
        """A batch came by the log."""
        effects: list[Effect] = []
        if batch.epoch != self._epoch or not self._has_epoch:
            if not self._lives.may_begin_by_batch(batch.epoch):
                self._counts.other_epoch += 1
                return []
            effects += self._adopt(batch.epoch, now_s)
        if batch.seq <= self._cursor + AHEAD_MAX:
            self._logged_seq = max(self._logged_seq, batch.seq)
        before = self._cursor
        effects += self._take(batch, now_s)
        if self._phase is StreamState.HOLE and not self._kept and self._cursor >= self._hole_end:
            self._counts.holes_closed += 1
            effects += self._settle(now_s)
        elif self._is_gap and self._cursor > before:
            self._asking.wait_until(now_s + self._limits.gap_s)
        return effects

    def _take(self, batch: Batch, now_s: float) -> list[Effect]:
        if batch.seq <= self._cursor:
            self._counts.duplicates += 1
        elif batch.seq > self._cursor + AHEAD_MAX:
            self._disbelieve(now_s)
        elif batch.seq == self._cursor + 1 and self._phase is not StreamState.DOUBT:
            return [self._step(batch), *self._drain()]
        else:
            self._counts.kept_lost += self._kept.keep(batch, self._asking.request_id)
            if self._phase is StreamState.LIVE:
                self._counts.gaps += 1
                self._recover("tail", now_s)
        return []

    def _step(self, batch: Batch) -> Effect:
        self._advance(batch.seq)
        return ApplyEvent(batch.event)

    def _drain(self) -> list[Effect]:
        return [self._step(batch) for batch in self._kept.following(self._cursor)]

    def _advance(self, seq: int) -> None:
        self._counts.applied += seq - self._cursor
        self._cursor = seq
        awaited = self._pulse.awaited
        if awaited is not None and seq >= awaited.seq:
            self._pulse.reach(awaited, seq)

    # ---------------------------------------------------------------------------------------------- heartbeats

    def on_heartbeat(self, heartbeat: Heartbeat, now_s: float) -> list[Effect]:
        """A heartbeat came."""
        if self._lives.is_over(heartbeat.epoch, now_s):
            return []
        effects: list[Effect] = []
        if heartbeat.epoch != self._epoch or not self._has_epoch:
            effects += self._adopt(heartbeat.epoch, now_s)
            if self._lives.was_outrun(heartbeat.epoch):
                self._recover("dump", now_s)
        self._lives.on_proof(now_s)
        self._source_stale = heartbeat.stale
        told = ClaimedPlace(heartbeat.last_seq, now_s, heartbeat.tiers)
        if told.seq > self._cursor + AHEAD_MAX:
            self._disbelieve(now_s)
        elif self._phase is not StreamState.LIVE:
            self._pulse.note(told)
        elif self._pulse.compare(told, self._cursor, self._limits.behind_s):
            self._counts.implausible += 1
            self._recover("dump", now_s)
        return effects

    def _disbelieve(self, now_s: float) -> None:
        """Something was told of a place too far away; where nothing was applied yet, that is but a long hole."""
        self._counts.implausible += self._cursor > 0
        if self._phase is StreamState.LIVE:
            self._counts.gaps += self._cursor == 0
            self._recover("tail", now_s, hole_end=_ONLY_AN_ANSWER)

    def prove(self, digest_of: Callable[[Tier], TierDigest], now_s: float) -> None:
        """What was told of the present place, and not compared yet, is, with what the index holds by `digest_of`."""
        claim, self._pulse.claim = self._pulse.claim, None
        if claim is None or claim.seq != self._cursor or self._phase is not StreamState.LIVE:
            return
        told = {digest.tier: digest for digest in claim.tiers}
        differs = any(digest_of(tier) != told.get(tier, TierDigest(tier, 0, 0)) for tier in TIERS)
        self._is_whole = self._is_overfull and not differs
        if not differs:
            self._is_repaired = False
            self._asking.on_proof()
        elif not self._is_overfull:
            self._counts.digest_mismatches += 1
            self._recover("dump" if self._is_repaired else "repair", now_s)

    # ---------------------------------------------------------------------------------------------- doubts, time

    def on_memory(self, *, is_overfull: bool) -> None:
        """The index has refused blocks of this rank for want of memory, or has all of them."""
        self._is_overfull, self._is_whole = is_overfull, is_overfull and self._is_whole

    @property
    def is_proven_whole(self) -> bool:
        """Whether the rank is overfull, and holds all that its source does nevertheless."""
        return self._is_whole

    def on_no_memory(self) -> None:
        """The index has refused blocks of this rank just now: what was proven before does not speak of them."""
        self._is_overfull, self._is_whole = True, False

    def on_refused(self, now_s: float) -> None:
        """Bytes of this stream could not be read, or not be applied: what is known may be wrong."""
        if self._phase is not StreamState.HOLE:
            self._recover("repair" if self._has_epoch else "dump", now_s)

    def on_parked_lost(self, now_s: float) -> None:
        """Parked blocks were lost; of an overfull rank because their parents were refused."""
        if not self._is_overfull:
            self._recover("repair", now_s)

    def on_room(self, now_s: float) -> None:
        """There is room again for what the index had refused."""
        self._recover("dump", now_s)

    def tick(self, now_s: float) -> None:
        """Time has passed."""
        awaited = self._pulse.awaited
        if self._phase is _LIVE and awaited is not None and now_s - awaited.at_s >= self._limits.behind_s:
            self._counts.gaps += 1
            self._recover("tail", awaited.at_s, hole_end=awaited.seq)

    def wait_anew(self, now_s: float) -> None:
        """Nothing could be heard until now: what did not come is not late yet."""
        self._pulse.wait_anew(now_s)
        if self._is_gap:
            self._asking.wait_until(now_s + self._limits.gap_s)

    # ---------------------------------------------------------------------------------------------- questions

    @property
    def is_recovering(self) -> bool:
        """Whether something is lacking that is to be asked for."""
        return self._asking.wants is not None

    def is_due(self, now_s: float) -> bool:
        """Return whether it is to be asked for now."""
        return self._asking.is_due(now_s)

    def is_in_flight(self, now_s: float) -> bool:
        """Return whether an answer is waited for."""
        return self._asking.is_in_flight(now_s)

    def expects(self, answer: Answer) -> bool:
        """Return whether this is a part of an answer to the newest question, while it is open."""
        return self._asking.expects(answer.request_id)

    def ask(self, now_s: float) -> Ask:
        """The question is on its way, and is of the present place; it was due."""
        return self._asking.ask(self._cursor, now_s)

    @property
    def _is_gap(self) -> bool:
        """Whether batches came early, so that the log is known to have gone on behind the hole."""
        return self._phase is StreamState.HOLE and self._hole_end == 0

    def _recover(self, wants: Wants, since_s: float, *, hole_end: int = 0) -> None:
        """The stream lacks something since then, and no less than before."""
        if not self._asking.want(wants, since_s + self._limits.gap_s if wants == "tail" else since_s):
            return
        self._phase = StreamState.HOLE if wants == "tail" else StreamState.DOUBT
        self._hole_end = hole_end
        if self._lost_at_s is None:
            self._lost_at_s = since_s

    # ---------------------------------------------------------------------------------------------- answers

    def on_answer(self, answer: Answer, now_s: float) -> list[Effect]:
        """A part of an answer came."""
        if not self.expects(answer) or self._lives.is_retired(answer.epoch):
            return []
        if isinstance(answer, ReplayChunk):
            return self._replay(answer, now_s)
        if answer.buckets and (self._asking.wants != "repair" or answer.epoch != self._epoch):
            return []
        state = self._asking.collect(answer, now_s)
        if state is None:
            return []
        self._lives.on_proof(now_s)
        return self._repair(state, now_s) if state.buckets else self._replace(state, now_s)

    def on_untrue_question(self, now_s: float) -> None:
        """What the rank holds changed since a repair was asked for: its answer would be wrong."""
        self._recover("dump", now_s)

    def _replay(self, answer: ReplayChunk, now_s: float) -> list[Effect]:
        if self._phase is not StreamState.HOLE or answer.epoch != self._epoch:
            return []
        try:
            batches = codec.decode_message(answer.message) if answer.message else []
        except MalformedMessage:
            self._recover("dump", now_s)
            return []
        self._lives.on_proof(now_s)
        if answer.last_seq < self._asking.after_seq:
            self._counts.implausible += 1
            self._recover("dump", now_s)
            return []
        before, effects = (self._cursor, len(self._kept)), list[Effect]()
        for batch in batches:
            if batch.epoch == self._epoch:
                effects += self._take(batch, now_s)
        if (self._cursor, len(self._kept)) != before:
            self._asking.hear(now_s)
        if self._cursor >= answer.last_seq:
            self._counts.replays += 1
            effects += self._settle(now_s, answer.last_seq)
        return effects

    def _repair(self, state: RankState, now_s: float) -> list[Effect]:
        if not state.keeps_to_its_buckets:
            self._recover("dump", now_s)
            return []
        self._counts.repairs += 1
        self._is_repaired = True
        self._cursor = state.last_seq
        return [RepairBuckets(state.buckets, state.chunks), *self._settle(now_s, state.last_seq)]

    def _replace(self, state: RankState, now_s: float) -> list[Effect]:
        epoch, last_seq = state.epoch, state.last_seq
        if epoch != self._epoch or not self._has_epoch:
            self._adopt(epoch, now_s)
        elif self._phase is StreamState.HOLE and self._asking.after_seq <= last_seq < self._cursor:
            return self._settle(now_s, last_seq)
        self._counts.resyncs += 1
        self._is_repaired = False
        self._cursor = last_seq
        return [ReplaceAll(state.chunks), *self._settle(now_s, last_seq)]

    def _settle(self, now_s: float, answered_seq: int | None = None) -> list[Effect]:
        """No question is open any more: what was kept and follows is applied; LIVE, or a hole before the rest."""
        if answered_seq is not None:
            self._pulse.disbelieve(answered_seq, self._asking.asked_at_s)
            self._counts.implausible += self._kept.drop_untrue(answered_seq, self._asking.request_id)
            self._asking.on_answered()
        else:
            self._asking.end()
        self._phase = StreamState.LIVE
        self._counts.duplicates += self._kept.drop_up_to(self._cursor)
        effects = self._drain()
        self._pulse.settle(self._cursor, now_s)
        if self._kept:
            self._counts.gaps += 1
            self._recover("tail", now_s)
        else:
            self._follow_on(now_s)
        return effects

    def _follow_on(self, now_s: float) -> None:
        if self._lost_at_s is not None:
            self._counts.on_heal(now_s - self._lost_at_s)
            self._lost_at_s = None

    def _adopt(self, epoch: int, now_s: float) -> list[Effect]:
        restarted = self._has_epoch
        self._counts.restarts += restarted
        self._lives.begin(epoch, self._epoch if restarted else None)
        self._phase, self._has_epoch = StreamState.LIVE, True
        self._epoch, self._cursor, self._logged_seq = epoch, 0, 0
        self._source_stale, self._is_repaired = "", False
        self._pulse.forget()
        self._kept.clear()
        self._asking.begin_anew()
        self._follow_on(now_s)
        return [ReplaceAll()] if restarted else []
