"""The state machine of one rank's stream: what each batch, heartbeat and dump means, whatever the way did to it.

    state       input                                   what happens
    ---------   -------------------------------------   -----------------------------------------------------------
    NEW         batch                                   LIVE at seq 0 of its epoch, then as there
    NEW         heartbeat                               LIVE at seq 0 of its epoch, then as there
    LIVE        batch seq <= cursor                     duplicate: nothing
    LIVE        batch seq == cursor + 1                 apply
    LIVE        batch seq > cursor + 1                  gap: RESYNCING, ask; the batch is kept for later
    LIVE        heartbeat, last_seq > cursor            behind; RESYNCING when not there `behind_s` after it was told
    LIVE        heartbeat, last_seq == cursor           digests equal, or a mismatch: RESYNCING, ask
    RESYNCING   batch                                   kept for later, at most `kept_max`, the oldest give way
    RESYNCING   dump complete                           replace all; apply what was kept and follows; LIVE, or a new gap
    RESYNCING   chunk of another answer than the first  nothing: answers are not mixed
    RESYNCING   no new chunk within `answer_s`          ask again
    any         heartbeat of another epoch              restart: forget all, LIVE at seq 0
    any         batch of another epoch                  before the first proof of life: restart; after it: nothing
    any         batch, heartbeat, dump of a retired one nothing
    any         parked blocks lost, bytes refused       RESYNCING, ask
    overfull    a mismatch, parked blocks lost          stale, and nothing else: no dump would fit
    overfull    equal digests                           not stale: what was refused is gone at the source, too
    overfull    room again                              RESYNCING, ask

A log read from its beginning tells of epochs long gone; heartbeats and dumps prove which one lives. So after the first
proof, proofs alone change the epoch. A batch that outran its epoch's first heartbeat is had by a dump.
An epoch that gave way is *retired*. A heartbeat of it counts again when the present one was not proven for `silent_s`:
else the last word of a dying epoch, come late and taken for a restart, would end the living one.
At most one question is in flight, and only an answer to the newest one counts. Any gap means a full dump here.
A stream is *overfull*, beside its state, once the index had no memory for some of its blocks: the index's owner says
so (`on_memory`). What is held goes on to be followed.
"""

from collections import deque
from collections.abc import Callable
from copy import copy
from enum import Enum
from typing import Literal, NamedTuple

import msgspec

from indexer.core.messages import Span
from kv_protocol.digest import TierDigest
from kv_protocol.events import Batch, Event, Tier
from kv_protocol.fleet import Heartbeat
from kv_protocol.recovery import BlockColumns, DumpChunk

RETIRED_EPOCHS_MAX = 16

StaleReason = Literal["never_heard", "refused", "resyncing", "overfull", "source", "behind", ""]
"""Of a rank without a stream it is `refused`, where the index had no place for it, or `never_heard`."""


def is_blind(stale: str) -> bool:
    """Return whether a rank so stale is routed to blindly; of an overfull one, what fitted is known."""
    return stale not in ("", "overfull")


class Phase(Enum):
    """Where a stream stands."""

    NEW = "new"
    LIVE = "live"
    RESYNCING = "resyncing"


_LIVE = Phase.LIVE
"""For what every decision and message asks: finding a member of an `Enum` takes longer than all the rest there."""


class FollowerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Patience (seconds) and room (batches) of one stream."""

    behind_s: float = 2.0
    answer_s: float = 2.0
    silent_s: float = 3.0
    kept_max: int = 4096


class ApplyEvent(msgspec.Struct, frozen=True):
    """To be done to the index: fold one event in."""

    event: Event


class ReplaceAll(msgspec.Struct, frozen=True):
    """To be done to the index: the rank holds exactly the blocks of these chunks (parents first)."""

    chunks: tuple[BlockColumns, ...] = ()


class AskDump(msgspec.Struct, frozen=True):
    """To be sent to the rank's consolidator."""

    request_id: int


Effect = ApplyEvent | ReplaceAll | AskDump


class FollowerCounts(msgspec.Struct, kw_only=True):
    """What has befallen one stream so far."""

    applied: int = 0
    duplicates: int = 0
    gaps: int = 0
    resyncs: int = 0
    restarts: int = 0
    digest_mismatches: int = 0
    other_epoch: int = 0
    kept_lost: int = 0


class FollowerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Where one stream stands, and a copy of what has befallen it."""

    epoch: int
    cursor: int
    stale: StaleReason
    counts: FollowerCounts


class _Told(NamedTuple):
    """A seq that a heartbeat told of, and when."""

    seq: int
    at_s: float


_NOTHING_TOLD = _Told(0, 0.0)


class StreamFollower:
    """One rank's stream. Every method that changes it returns the effects to perform, in order; none performs any."""

    def __init__(self, limits: FollowerLimits | None = None) -> None:
        self._limits = limits or FollowerLimits()
        self._phase = Phase.NEW
        self._epoch = 0
        self._cursor = 0
        self._told = _NOTHING_TOLD
        self._awaited: _Told | None = None
        self._source_stale = ""
        self._proven_at_s: float | None = None
        self._outran_epoch: int | None = None
        self._retired: deque[int] = deque(maxlen=RETIRED_EPOCHS_MAX)
        self._kept: dict[int, Batch] = {}
        self._request_id = 0
        self._waits_since_s = 0.0
        self._chunks: dict[int, DumpChunk] = {}
        self._counts = FollowerCounts()
        self._is_overfull = self._is_whole = False

    @property
    def position(self) -> tuple[int, int]:
        """The epoch and the last applied seq."""
        return self._epoch, self._cursor

    @property
    def stale(self) -> StaleReason:
        """Why the rank's blocks are not known to be current; empty when they are."""
        return self.standing()[2]

    def standing(self) -> tuple[int, int, StaleReason]:
        """Return position and staleness, which every decision reads of every rank, at once."""
        if self._phase is _LIVE and not self._source_stale and self._awaited is None and not self._is_overfull:
            return self._epoch, self._cursor, ""
        return self._epoch, self._cursor, self._doubt()

    def _doubt(self) -> StaleReason:
        if self._phase is Phase.NEW:
            return "never_heard"
        if self._phase is Phase.RESYNCING:
            return "resyncing"
        if self._is_overfull and not self._is_whole:
            return "overfull"
        if self._source_stale:
            return "source"
        return "behind" if self._awaited is not None else ""

    def on_batch(self, batch: Batch, now_s: float) -> list[Effect]:
        """A batch came."""
        effects: list[Effect] = []
        if batch.epoch != self._epoch or self._phase is Phase.NEW:
            if self._proven_at_s is not None or batch.epoch in self._retired:
                self._outran_epoch = batch.epoch
                self._counts.other_epoch += 1
                return []
            effects += self._adopt(batch.epoch)
        if batch.seq <= self._cursor:
            self._counts.duplicates += 1
        elif self._phase is Phase.RESYNCING:
            self._keep(batch)
        elif batch.seq == self._cursor + 1:
            effects.append(self._step(batch))
        else:
            self._counts.gaps += 1
            self._keep(batch)
            effects += self._ask(now_s)
        return effects

    def continues(self, span: Span) -> bool:
        """Return whether the batches of `span` are the next ones, so that each would be applied."""
        return self._phase is _LIVE and span.epoch == self._epoch and span.first_seq == self._cursor + 1

    def on_applied(self, span: Span) -> None:
        """The next batches were applied, as `ApplyEvent` for each of them would have been."""
        self._advance(span.last_seq)

    def on_heartbeat(self, heartbeat: Heartbeat, digest_of: Callable[[Tier], TierDigest], now_s: float) -> list[Effect]:
        """A heartbeat came; `digest_of` says what the index holds of this rank."""
        is_proven = self._proven_at_s is not None and now_s - self._proven_at_s < self._limits.silent_s
        if is_proven and heartbeat.epoch in self._retired:
            return []
        effects: list[Effect] = []
        restarted = heartbeat.epoch != self._epoch or self._phase is Phase.NEW
        if restarted:
            effects += self._adopt(heartbeat.epoch)
        self._proven_at_s = now_s
        self._source_stale = heartbeat.stale
        if heartbeat.last_seq > self._told.seq:
            self._told = _Told(heartbeat.last_seq, now_s)
        if self._phase is Phase.RESYNCING:
            return effects
        if restarted and self._outran_epoch == heartbeat.epoch:
            effects += self._ask(now_s)
        elif heartbeat.last_seq > self._cursor and self._awaited is None:
            self._awaited = self._told
        elif heartbeat.last_seq == self._cursor and not restarted:
            effects += self._prove(self._differs(heartbeat, digest_of), now_s)
        return effects

    def on_memory(self, *, is_overfull: bool) -> None:
        """The index has refused blocks of this rank for want of memory, or has all of them."""
        self._is_overfull, self._is_whole = is_overfull, is_overfull and self._is_whole

    def on_chunk(self, chunk: DumpChunk, now_s: float) -> list[Effect]:
        """A part of an answer came."""
        if self._phase is not Phase.RESYNCING or chunk.request_id != self._request_id or chunk.epoch in self._retired:
            return []
        first = next(iter(self._chunks.values()), chunk)
        is_of_first = (chunk.epoch, chunk.last_seq, chunk.of) == (first.epoch, first.last_seq, first.of)
        if not is_of_first or chunk.chunk in self._chunks:
            return []
        self._chunks[chunk.chunk] = chunk
        self._waits_since_s = now_s
        return self._replace(now_s) if len(self._chunks) == chunk.of else []

    def on_refused(self, now_s: float) -> list[Effect]:
        """Bytes of this stream could not be read: what is known may be wrong."""
        return [] if self._phase is Phase.RESYNCING else self._ask(now_s)

    def on_parked_lost(self, now_s: float) -> list[Effect]:
        """Parked blocks were lost; of an overfull rank because their parents were refused."""
        return [] if self._is_overfull else self.on_refused(now_s)

    def on_room(self, now_s: float) -> list[Effect]:
        """There is room again for what the index had refused."""
        return self.on_refused(now_s)

    def tick(self, now_s: float) -> list[Effect]:
        """Time has passed."""
        if self._phase is Phase.RESYNCING:
            return self._ask(now_s) if now_s - self._waits_since_s >= self._limits.answer_s else []
        if self._awaited is not None and now_s - self._awaited.at_s >= self._limits.behind_s:
            self._counts.gaps += 1
            return self._ask(now_s)
        return []

    def _adopt(self, epoch: int) -> list[Effect]:
        restarted = self._phase is not Phase.NEW
        if restarted:
            self._retired.append(self._epoch)
            self._counts.restarts += 1
        if epoch in self._retired:
            self._retired.remove(epoch)
        self._phase = Phase.LIVE
        self._epoch, self._cursor, self._told = epoch, 0, _NOTHING_TOLD
        self._awaited, self._source_stale = None, ""
        self._kept.clear()
        self._chunks.clear()
        return [ReplaceAll()] if restarted else []

    def _prove(self, differs: bool, now_s: float) -> list[Effect]:  # noqa: FBT001
        self._is_whole = self._is_overfull and not differs
        if not differs or self._is_overfull:
            return []
        self._counts.digest_mismatches += 1
        return self._ask(now_s)

    def _step(self, batch: Batch) -> Effect:
        self._advance(batch.seq)
        return ApplyEvent(batch.event)

    def _advance(self, seq: int) -> None:
        self._counts.applied += seq - self._cursor
        self._cursor = seq
        if self._awaited is not None and self._cursor >= self._awaited.seq:
            self._awaited = self._told if self._cursor < self._told.seq else None

    def _keep(self, batch: Batch) -> None:
        self._kept[batch.seq] = batch
        if len(self._kept) > self._limits.kept_max:
            del self._kept[min(self._kept)]
            self._counts.kept_lost += 1

    def _ask(self, now_s: float) -> list[Effect]:
        self._phase = Phase.RESYNCING
        self._request_id += 1
        self._waits_since_s = now_s
        self._awaited = None
        self._chunks.clear()
        return [AskDump(self._request_id)]

    def _replace(self, now_s: float) -> list[Effect]:
        chunks = [self._chunks[index] for index in sorted(self._chunks)]
        if chunks[0].epoch != self._epoch:
            self._adopt(chunks[0].epoch)
        kept, self._kept, self._chunks = self._kept, {}, {}
        self._phase, self._cursor = Phase.LIVE, chunks[0].last_seq
        self._proven_at_s = now_s
        self._counts.resyncs += 1
        effects: list[Effect] = [ReplaceAll(tuple(chunk.columns for chunk in chunks if chunk.tiers))]
        for seq in sorted(kept):
            effects += self.on_batch(kept[seq], now_s)
        if self._phase is Phase.LIVE and self._cursor < self._told.seq:
            self._awaited = _Told(self._told.seq, now_s)
        return effects

    @staticmethod
    def _differs(heartbeat: Heartbeat, digest_of: Callable[[Tier], TierDigest]) -> bool:
        told = {digest.tier: digest for digest in heartbeat.tiers}
        return any(digest_of(tier) != told.get(tier, TierDigest(tier, 0, 0)) for tier in Tier)

    def statistics(self) -> FollowerStatistics:
        """Return where the stream stands, and what has befallen it."""
        return FollowerStatistics(epoch=self._epoch, cursor=self._cursor, stale=self.stale, counts=copy(self._counts))
