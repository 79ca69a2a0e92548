"""Compares the claims of a stream's heartbeats with its cursor, the seq of the last batch that was applied.

claim.seq is                               meaning
----------------------------------------   --------------------------------------------------------------------------
above the cursor                           the index is behind: the claim is *awaited*
equal to it, now or once it gets there     the claim's digests can be compared with the index
below it, for less than `late_s`           the heartbeats may be late: nothing happens
below it as it was `late_s` ago            no heartbeat is that late: the index is *beyond* what its source sent

Which epoch of a rank's stream is followed, and what may change it.

A log that is read from its beginning has batches of old epochs; heartbeats and answers prove which epoch is current.
After the first such proof, only proofs change the epoch. A replaced epoch is *retired*. Its heartbeats count again when
the current epoch was not proven for `silent_s`: otherwise a late heartbeat of the old epoch would look like a restart.
A batch of an epoch without a proof has *outrun* its heartbeat.
"""

from collections import deque
from typing import NamedTuple

from kv_protocol.digest import TierDigest

RETIRED_MAX = 16


class HeartbeatClaim(NamedTuple):
    """The seq that a heartbeat reported, when it was received, and the digests of the rank at that seq."""

    seq: int
    at_s: float
    tiers: tuple[TierDigest, ...] = ()


_NOTHING = HeartbeatClaim(-1, 0.0)


class HeartbeatTracker:
    """The heartbeats of one epoch of one stream."""

    __slots__ = ("_cursor_then", "_newest", "awaited", "claim")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin again, as if no heartbeat was received."""
        self._newest = _NOTHING
        self._cursor_then: HeartbeatClaim | None = None  # a cursor and its time; all claims since are below that seq
        self.awaited: HeartbeatClaim | None = None
        """A claim that the cursor has not reached yet."""
        self.claim: HeartbeatClaim | None = None
        """The newest claim that was equal to the cursor; the cursor may have moved on since."""

    def note(self, claim: HeartbeatClaim) -> None:
        """Remember the claim if no newer one is known, without a comparison."""
        if claim.seq >= self._newest.seq:
            self._newest = claim

    def compare(self, claim: HeartbeatClaim, cursor: int, late_s: float) -> bool:
        """Compare a claim with the cursor; return whether the cursor is beyond what the source sent."""
        self.note(claim)
        if claim.seq < cursor:
            return self._is_beyond(claim, cursor, late_s)
        self._cursor_then = None
        if claim.seq == cursor:
            self.claim = claim
        elif self.awaited is None:
            self.awaited = self._newest
        return False

    def _is_beyond(self, claim: HeartbeatClaim, cursor: int, late_s: float) -> bool:
        if self._cursor_then is None or claim.seq >= self._cursor_then.seq:
            self._cursor_then = HeartbeatClaim(cursor, claim.at_s)
        return claim.at_s - self._cursor_then.at_s >= late_s

    def reach(self, awaited: HeartbeatClaim, cursor: int) -> None:
        """The cursor reached the awaited claim, or passed it."""
        self.awaited = self._newest if cursor < self._newest.seq else None
        for claim in (awaited, self._newest):
            if claim.seq == cursor:
                self.claim = claim

    def settle(self, cursor: int, now_s: float) -> None:
        """An answer or a closed hole set the cursor: compare the newest claim again, and restart the timeouts."""
        self.awaited = self._cursor_then = None
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
        self._cursor_then = None
        if self.awaited is not None:
            self.awaited = self.awaited._replace(at_s=now_s)


class EpochTracker:
    """The epochs of one stream, except for the number of the current one."""

    def __init__(self, silent_s: float) -> None:
        self._silent_s = silent_s
        self._proven_at_s: float | None = None
        self._outran: int | None = None
        self._retired: deque[int] = deque(maxlen=RETIRED_MAX)

    def on_proof(self, now_s: float) -> None:
        """The current epoch was proven."""
        self._proven_at_s = now_s

    def may_begin_by_batch(self, epoch: int) -> bool:
        """Return whether a batch of `epoch`, which is not the current epoch, makes it the current one.

        If not, `epoch` is remembered: its batches may have outrun its first heartbeat.
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

    def was_outrun(self, epoch: int) -> bool:
        """Return whether batches of that epoch were lost because they came before its first proof."""
        return epoch == self._outran

    def begin(self, epoch: int, former: int | None) -> None:
        """Begin an epoch; the former one, if any, is retired."""
        if former is not None:
            self._retired.append(former)
        if epoch in self._retired:
            self._retired.remove(epoch)
