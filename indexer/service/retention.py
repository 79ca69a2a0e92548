"""Decides about snapshots and the log's retention: what to write, what to purge, what to delete. Pure.

A snapshot covers the log up to its place. If its place is beyond the end of the log, it belongs to a former log that
was lost. The newest snapshot is the one that covers most of this log.

    write     if the log has messages that the newest snapshot does not cover, and one of these holds: there is no
              snapshot; the newest is at least `period_s` old, or as far in the future (the clock was set back); the
              messages after it take more than a quarter of the log's byte limit
    purge     if the log takes more than three quarters of its byte limit: the messages up to the place of a snapshot
              that was read back. It is the oldest one after which the log takes at most half of the limit, or the
              newest one if there is none
    delete    snapshots of another log, and those after which messages are missing from this log; the newest two stay
    give up   snapshots, if a new one does not fit: those of another log first, then the oldest; the newest stays

The size of a part of the log is estimated by the mean size of a message.
"""

import re
from collections.abc import Collection, Iterable
from typing import NamedTuple, Self

PURGE_RATIO, PURGED_RATIO, GROWN_RATIO = 0.75, 0.5, 0.25
KEPT_MIN = 2
_DIGITS = 20
_NAME = re.compile(rf"([0-9]{{{_DIGITS}}})-([0-9]{{{_DIGITS}}})")


class SnapshotName(NamedTuple):
    """The place up to which a snapshot covers the log, and the time it was taken, in nanoseconds since 1970."""

    stream_seq: int
    wall_ns: int

    def __str__(self) -> str:
        return f"{self.stream_seq:0{_DIGITS}}-{self.wall_ns:0{_DIGITS}}"

    @classmethod
    def read(cls, name: str) -> Self | None:
        """Parse a name; return None for one that is not ours."""
        found = _NAME.fullmatch(name)
        return cls(int(found[1]), int(found[2])) if found else None


class LogExtent(NamedTuple):
    """The messages of the log, `first_seq` to `last_seq`, and their size; none if `last_seq` is below `first_seq`."""

    first_seq: int
    last_seq: int
    bytes_now: int


class KeepingLimits(NamedTuple):
    """The longest time between snapshots while the log grows, and the log's byte limit; both above 0."""

    period_s: float
    log_bytes_max: int


class Retention:
    """Says what is due for a log and its snapshots."""

    def __init__(
        self, log: LogExtent, names: Iterable[str], limits: KeepingLimits, others: Collection[str] = ()
    ) -> None:
        """`names` are the bucket's; those not of our form are ignored. `others` are snapshots of another log."""
        ours = sorted((name for name in map(SnapshotName.read, names) if name is not None), reverse=True)
        self._log, self._limits = log, limits
        self.of_this_log = [name for name in ours if name.stream_seq <= log.last_seq and str(name) not in others]
        """The snapshots of this log, newest first, the order in which a cold start tries them."""
        self._newest_first = [*self.of_this_log, *(name for name in ours if name not in self.of_this_log)]

    def is_due(self, now_ns: int) -> bool:
        """Return whether a snapshot is to be written; `now_ns` counts from 1970."""
        if not self.of_this_log:
            return self._log.last_seq > 0
        newest = self.of_this_log[0]
        if newest.stream_seq >= self._log.last_seq:
            return False
        has_grown = self._bytes_after(newest) > GROWN_RATIO * self._limits.log_bytes_max
        return has_grown or abs(now_ns - newest.wall_ns) / 1e9 >= self._limits.period_s

    def purge_up_to(self, verified: Collection[str]) -> int:
        """Return the last seq to purge; 0: none. `verified` snapshots were read back without a difference."""
        if self._log.bytes_now <= PURGE_RATIO * self._limits.log_bytes_max:
            return 0
        retained_max = PURGED_RATIO * self._limits.log_bytes_max
        covering = [name for name in self.of_this_log if str(name) in verified]
        enough = [name for name in covering if self._bytes_after(name) <= retained_max] or covering[:1]
        up_to = min((name.stream_seq for name in enough), default=0)
        return up_to if up_to >= self._log.first_seq else 0

    def useless(self) -> list[str]:
        """Return the names of snapshots to delete."""
        useful = [name for name in self.of_this_log if name.stream_seq >= self._log.first_seq - 1]
        return [str(name) for name in self._newest_first[KEPT_MIN:] if name not in useful]

    def to_give_up(self) -> list[str]:
        """Return the names of snapshots that may be deleted to make room for a new one, in this order."""
        return [str(name) for name in reversed(self._newest_first[1:])]

    def _bytes_after(self, name: SnapshotName) -> float:
        """Return the estimated size of the messages that the snapshot does not cover."""
        messages = self._log.last_seq - self._log.first_seq + 1
        share = min(1.0, (self._log.last_seq - name.stream_seq) / messages) if messages > 0 else 0.0
        return self._log.bytes_now * share
