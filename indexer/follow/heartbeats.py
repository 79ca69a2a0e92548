"""What heartbeats say of a stream, beside its place (the cursor).

told.seq    beside the cursor                         means
---------   ---------------------------------------   -----------------------------------------------
above       at once                                   behind: *awaited*
equal       at once, or when the cursor came there    a *claim* that can be compared
below       of one or some heartbeats                 late, nothing
below       what it was `late_s` ago                  the cursor is *beyond* its source: no heartbeat is that late
"""

from typing import NamedTuple

from kv_protocol.digest import TierDigest


class ClaimedPlace(NamedTuple):
    """A seq that a heartbeat told of, when, and what the rank held there."""

    seq: int
    at_s: float
    tiers: tuple[TierDigest, ...] = ()


_NOTHING = ClaimedPlace(-1, 0.0)


class HeartbeatTracker:
    """The heartbeats of one epoch of one stream."""

    __slots__ = ("_newest", "_passed", "awaited", "claim")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Nothing was told."""
        self._newest = _NOTHING
        self._passed: ClaimedPlace | None = None
        self.awaited: ClaimedPlace | None = None
        """What was told of and did not come yet."""
        self.claim: ClaimedPlace | None = None
        """What was told of the place that the cursor has, or had when it was set."""

    def note(self, told: ClaimedPlace) -> None:
        """A heartbeat tells of a place, and nobody can compare now."""
        if told.seq >= self._newest.seq:
            self._newest = told

    def compare(self, told: ClaimedPlace, cursor: int, late_s: float) -> bool:
        """A heartbeat tells of a place; return whether the cursor is beyond its source."""
        self.note(told)
        if told.seq < cursor:
            return self._is_beyond(told, cursor, late_s)
        self._passed = None
        if told.seq == cursor:
            self.claim = told
        elif self.awaited is None:
            self.awaited = self._newest
        return False

    def _is_beyond(self, told: ClaimedPlace, cursor: int, late_s: float) -> bool:
        if self._passed is None or told.seq >= self._passed.seq:
            self._passed = ClaimedPlace(cursor, told.at_s)
        return told.at_s - self._passed.at_s >= late_s

    def reach(self, awaited: ClaimedPlace, cursor: int) -> None:
        """The cursor came to what was awaited, or passed it."""
        self.awaited = self._newest if cursor < self._newest.seq else None
        for told in (awaited, self._newest):
            if told.seq == cursor:
                self.claim = told

    def settle(self, cursor: int, now_s: float) -> None:
        """The cursor has its place anew: patience begins now."""
        self.awaited = self._passed = None
        if cursor < self._newest.seq:
            self.awaited = self._newest._replace(at_s=now_s)
        elif cursor == self._newest.seq:
            self.claim = self._newest

    def disbelieve(self, answered_seq: int, asked_at_s: float) -> None:
        """What was told before a question, of a place beyond its answer, was not true."""
        if self._newest.seq > answered_seq and self._newest.at_s < asked_at_s:
            self._newest = _NOTHING

    def wait_anew(self, now_s: float) -> None:
        """Nothing could be heard until now: what did not come is not late yet."""
        self._passed = None
        if self.awaited is not None:
            self.awaited = self.awaited._replace(at_s=now_s)
