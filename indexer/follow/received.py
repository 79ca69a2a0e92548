"""What a stream's follower keeps of what it received: claims of heartbeats, epochs, and batches that came early.

Claims of heartbeats are compared with the stream's cursor, the seq of the last batch that was applied.

claim.seq is                               meaning
----------------------------------------   --------------------------------------------------------------------------
above the cursor                           the index is behind: the claim is *awaited*
equal to it, now or once it gets there     the claim's digests can be compared with the index
below it, for less than `late_s`           the heartbeats may be late: nothing happens
below what the cursor was `late_s` ago     no heartbeat is that late: the index is *beyond* what its source sent

A log that is read from its beginning has batches of old epochs; heartbeats and answers prove which epoch is current.
After the first such proof, only proofs change the epoch. A replaced epoch is *retired*. Its heartbeats are ignored as
long as the current epoch was proven within `silent_s`: a late heartbeat of the old epoch must not look like a restart.
A batch of an epoch without a proof has *outrun* its heartbeat.

Early batches are kept by seq; beyond the bounds the lowest seqs are dropped first. The batch with the highest seq
always stays: it proves that a batch before it is missing. Each is kept with the id of the newest question at its
arrival: an answer covers all batches that came before its question. So a batch that came before the question, but has
a higher seq than the answer, was never published.
"""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from sortedcontainers import SortedDict

from kv_protocol.digest import TierDigest
from kv_protocol.events import Batch, Cleared

RETIRED_MAX = 16


class HeartbeatClaim(NamedTuple):
    """The seq that a heartbeat reported, when it was received, and the digests of the rank at that seq."""

    seq: int
    at_s: float
    tiers: tuple[TierDigest, ...] = ()


class _PassedCursor(NamedTuple):
    cursor: int
    at_s: float


_NOTHING = HeartbeatClaim(-1, 0.0)


class HeartbeatTracker:
    """The heartbeats of one epoch of one stream."""

    __slots__ = ("_newest", "_passed", "awaited", "claim")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin again, as if no heartbeat was received."""
        self._newest = _NOTHING
        self._passed: _PassedCursor | None = None
        """The earliest known cursor that is above all claims that came after it."""
        self.awaited: HeartbeatClaim | None = None
        """A claim that the cursor has not reached yet."""
        self.claim: HeartbeatClaim | None = None
        """The newest claim that was equal to the cursor; the cursor may have moved on since."""

    def note(self, claim: HeartbeatClaim) -> None:
        """Remember the claim, unless one of a higher seq is known; it is not compared with the cursor."""
        if claim.seq >= self._newest.seq:
            self._newest = claim

    def compare(self, claim: HeartbeatClaim, cursor: int, late_s: float) -> bool:
        """Compare a claim with the cursor; return whether the cursor is beyond what the source sent."""
        self.note(claim)
        if claim.seq < cursor:
            return self._is_beyond(claim, cursor, late_s)
        self._passed = None
        if claim.seq == cursor:
            self.claim = claim
        elif self.awaited is None:
            self.awaited = self._newest
        return False

    def _is_beyond(self, claim: HeartbeatClaim, cursor: int, late_s: float) -> bool:
        if self._passed is None or claim.seq >= self._passed.cursor:
            self._passed = _PassedCursor(cursor, claim.at_s)
        return claim.at_s - self._passed.at_s >= late_s

    def reach(self, awaited: HeartbeatClaim, cursor: int) -> None:
        """Note that the cursor reached `awaited`, or passed it: a claim equal to the cursor can now be compared."""
        self.awaited = self._newest if cursor < self._newest.seq else None
        for claim in (awaited, self._newest):
            if claim.seq == cursor:
                self.claim = claim

    def settle(self, cursor: int, now_s: float) -> None:
        """An answer or a closed hole set the cursor: compare the newest claim again, and restart the timeouts."""
        self.awaited = self._passed = None
        if cursor < self._newest.seq:
            self.awaited = self._newest._replace(at_s=now_s)
        elif cursor == self._newest.seq:
            self.claim = self._newest

    def discard_beyond(self, answered_seq: int, sent_at_s: float) -> None:
        """Forget a claim that came before the question was sent and is above the answer's last seq: it was wrong."""
        if self._newest.seq > answered_seq and self._newest.at_s < sent_at_s:
            self._newest = _NOTHING

    def restart_timeouts(self, now_s: float) -> None:
        """Nothing could be received until now: restart the timeouts."""
        self._passed = None
        if self.awaited is not None:
            self.awaited = self.awaited._replace(at_s=now_s)


class EpochTracker:
    """The epochs of one stream; the owner keeps the number of the current one."""

    def __init__(self, silent_s: float) -> None:
        self._silent_s = silent_s
        self._proven_at_s: float | None = None
        self._outran: int | None = None
        self._retired: deque[int] = deque(maxlen=RETIRED_MAX)

    def on_proof(self, now_s: float) -> None:
        """Note that the current epoch was proven."""
        self._proven_at_s = now_s

    def on_other_batch(self, epoch: int) -> bool:
        """A batch of `epoch` came, which is not the current epoch; return whether it becomes the current one.

        If not, the batch is lost. The loss is noted: the batch may have come before its epoch's first heartbeat.
        """
        if self._proven_at_s is None and epoch not in self._retired:
            return True
        self._outran = epoch
        return False

    def is_retired(self, epoch: int) -> bool:
        """Return whether the epoch is retired, so that its answers are ignored."""
        return epoch in self._retired

    def is_over(self, epoch: int, now_s: float) -> bool:
        """Return whether the epoch is retired and the current one was proven lately: its heartbeats are ignored."""
        is_current_proven = self._proven_at_s is not None and now_s - self._proven_at_s < self._silent_s
        return is_current_proven and epoch in self._retired

    def has_lost_batches(self, epoch: int) -> bool:
        """Return whether batches of that epoch were lost because they came before its first proof."""
        return epoch == self._outran

    def begin(self, epoch: int, former: int | None) -> None:
        """Begin an epoch; the former one, if any, is retired."""
        if former is not None:
            self._retired.append(former)
        if epoch in self._retired:
            self._retired.remove(epoch)


class _EarlyBatch(NamedTuple):
    batch: Batch
    request_id: int

    @property
    def blocks(self) -> int:
        event = self.batch.event
        return 0 if isinstance(event, Cleared) else len(event.sequence_hashes)


class ReorderBuffer:
    """The early batches of one epoch: at most `batches_max`, with at most `blocks_max` blocks in all."""

    def __init__(self, batches_max: int, blocks_max: int) -> None:
        self._batches_max, self._blocks_max = batches_max, blocks_max
        self._blocks = 0
        self._batches: SortedDict[int, _EarlyBatch] = SortedDict()

    def __len__(self) -> int:
        return len(self._batches)

    def keep(self, batch: Batch, request_id: int) -> int:
        """Add a batch; return how many were dropped, the lowest seqs first."""
        self._take(batch.seq)
        early = self._batches[batch.seq] = _EarlyBatch(batch, request_id)
        self._blocks += early.blocks
        lost = 0
        while len(self._batches) > 1 and (len(self._batches) > self._batches_max or self._blocks > self._blocks_max):
            self._take(self._batches.peekitem(0)[0])
            lost += 1
        return lost

    def _take(self, seq: int) -> _EarlyBatch | None:
        early: _EarlyBatch | None = self._batches.pop(seq, None)
        self._blocks -= 0 if early is None else early.blocks
        return early

    def following(self, seq: int) -> Iterator[Batch]:
        """Remove and yield the batches that follow each other from `seq + 1` on."""
        while (early := self._take(seq := seq + 1)) is not None:
            yield early.batch

    def drop_up_to(self, seq: int) -> int:
        """Drop the batches up to `seq`; return how many there were."""
        return self._drop(list(self._batches.irange(maximum=seq)))

    def drop_untrue(self, answered_seq: int, request_id: int) -> int:
        """Drop batches that came before a question, but are above its answer's last seq; return how many there were."""
        above = self._batches.irange(minimum=answered_seq + 1)
        return self._drop([each for each in above if self._batches[each].request_id < request_id])

    def _drop(self, seqs: list[int]) -> int:
        for seq in seqs:
            self._take(seq)
        return len(seqs)

    def clear(self) -> None:
        """Drop all batches."""
        self._batches.clear()
        self._blocks = 0
