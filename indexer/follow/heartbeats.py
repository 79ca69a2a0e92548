"""The claims of a stream's heartbeats, compared with its cursor.

claim.seq   than the cursor                           means
---------   ---------------------------------------   -----------------------------------------------
above       now                                       behind: *awaited*
equal       now, or when the cursor got there         the claim can be compared with the index
below       in some heartbeats                        they are late: nothing
below       as it was `late_s` ago                    the cursor is *beyond* its source: no heartbeat is that late
"""

from typing import NamedTuple

from kv_protocol.digest import TierDigest


class HeartbeatClaim(NamedTuple):
    """The seq that a heartbeat reported, when it was received, and the digests of the rank at that seq."""

    seq: int
    at_s: float
    tiers: tuple[TierDigest, ...] = ()


_NOTHING = HeartbeatClaim(-1, 0.0)


class HeartbeatTracker:
    """The heartbeats of one epoch of one stream."""

    __slots__ = ("_newest", "_passed", "awaited", "claim")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """No heartbeat was received."""
        self._newest = _NOTHING
        self._passed: HeartbeatClaim | None = None
        self.awaited: HeartbeatClaim | None = None
        """A claim that the cursor has not reached yet."""
        self.claim: HeartbeatClaim | None = None
        """A claim for the cursor, or for the cursor as it was when this was set."""

    def note(self, claim: HeartbeatClaim) -> None:
        """Note a claim that cannot be compared now."""
        if claim.seq >= self._newest.seq:
            self._newest = claim

    def compare(self, claim: HeartbeatClaim, cursor: int, late_s: float) -> bool:
        """Compare a claim with the cursor; return whether the cursor is beyond its source."""
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
        if self._passed is None or claim.seq >= self._passed.seq:
            self._passed = HeartbeatClaim(cursor, claim.at_s)
        return claim.at_s - self._passed.at_s >= late_s

    def reach(self, awaited: HeartbeatClaim, cursor: int) -> None:
        """The cursor reached the awaited claim, or passed it."""
        self.awaited = self._newest if cursor < self._newest.seq else None
        for claim in (awaited, self._newest):
            if claim.seq == cursor:
                self.claim = claim

    def settle(self, cursor: int, now_s: float) -> None:
        """The cursor was set anew: restart the timeouts."""
        self.awaited = self._passed = None
        if cursor < self._newest.seq:
            self.awaited = self._newest._replace(at_s=now_s)
        elif cursor == self._newest.seq:
            self.claim = self._newest

    def discard_beyond(self, answered_seq: int, sent_at_s: float) -> None:
        """Drop a claim that came before a question and lies beyond its answer: it was not true."""
        if self._newest.seq > answered_seq and self._newest.at_s < sent_at_s:
            self._newest = _NOTHING

    def restart_timeouts(self, now_s: float) -> None:
        """Nothing could be received until now: restart the timeouts."""
        self._passed = None
        if self.awaited is not None:
            self.awaited = self.awaited._replace(at_s=now_s)
