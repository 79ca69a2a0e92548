"""Plans snapshots and the log's retention: what to write, what to purge, what to delete. Pure.

A snapshot covers the log up to its place. If its place is beyond the end of the log, it belongs to a former log that
was lost, as those in `others` do. The newest snapshot is the one that covers most of this log.

    write     if the log has messages that the newest snapshot does not cover, and
                  there is no snapshot, or the newest is at least `period_s` old, or that far in the future (the clock
                  was set back), or the messages after it take more than a quarter of the log's byte limit
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

import msgspec

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
    """The messages of the log, `first_seq` to `last_seq`, and their size; no message if `last_seq` is the smaller."""

    first_seq: int
    last_seq: int
    bytes_now: int

    def bytes_after(self, seq: int) -> float:
        """Return the estimated size of the messages after a place."""
        messages = self.last_seq - self.first_seq + 1
        return self.bytes_now * min(1.0, max(0, self.last_seq - seq) / messages) if messages > 0 else 0.0


class KeepingLimits(NamedTuple):
    """The longest time between snapshots while the log grows, and the log's byte limit; both above 0."""

    period_s: float
    log_bytes_max: int


class RetentionPlan(msgspec.Struct, frozen=True):
    """The actions to take; `purge_up_to` 0: no purge."""

    write: bool
    purge_up_to: int
    delete: tuple[str, ...]


def plan(
    log: LogExtent,
    names: Iterable[str],
    now_ns: int,
    limits: KeepingLimits,
    *,
    verified: Collection[str] = (),
    others: Collection[str] = (),
) -> RetentionPlan:
    """Return the actions to take.

    Args:
        log: the messages of the log.
        names: all names in the bucket; names that are not ours are ignored.
        now_ns: since 1970.
        limits: of the time between snapshots, and of the log.
        verified: this log's snapshots that were read back without a difference.
        others: snapshots that are known to be of another log.
    """
    ours, this = _newest_first(log, names, others), of_this_log(log, names, others)
    useful = {name for name in this if name.stream_seq >= log.first_seq - 1}
    return RetentionPlan(
        write=_is_due(log, this, now_ns, limits),
        purge_up_to=_purge_up_to(log, [name for name in this if str(name) in verified], limits),
        delete=tuple(str(name) for name in ours[KEPT_MIN:] if name not in useful),
    )


def of_this_log(log: LogExtent, names: Iterable[str], others: Collection[str] = ()) -> list[SnapshotName]:
    """Return the snapshots of this log, newest first, the order in which a cold start tries them."""
    return [name for name in _newest_first(log, names, others) if _is_of(log, name, others)]


def to_give_up(log: LogExtent, names: Iterable[str], others: Collection[str] = ()) -> list[str]:
    """Return the names that may be deleted for a new snapshot, in that order."""
    return [str(name) for name in reversed(_newest_first(log, names, others)[1:])]


def _newest_first(log: LogExtent, names: Iterable[str], others: Collection[str]) -> list[SnapshotName]:
    """Return the names that are ours; those of another log come last."""
    ours = [name for name in map(SnapshotName.read, names) if name is not None]
    return sorted(ours, key=lambda name: (_is_of(log, name, others), name), reverse=True)


def _is_of(log: LogExtent, name: SnapshotName, others: Collection[str]) -> bool:
    return name.stream_seq <= log.last_seq and str(name) not in others


def _is_due(log: LogExtent, newest_first: list[SnapshotName], now_ns: int, limits: KeepingLimits) -> bool:
    if not newest_first:
        return log.last_seq > 0
    newest = newest_first[0]
    if newest.stream_seq >= log.last_seq:
        return False
    age_s = (now_ns - newest.wall_ns) / 1e9
    return abs(age_s) >= limits.period_s or log.bytes_after(newest.stream_seq) > GROWN_RATIO * limits.log_bytes_max


def _purge_up_to(log: LogExtent, newest_first: list[SnapshotName], limits: KeepingLimits) -> int:
    if log.bytes_now <= PURGE_RATIO * limits.log_bytes_max:
        return 0
    retained_max = PURGED_RATIO * limits.log_bytes_max
    enough = [name for name in newest_first if log.bytes_after(name.stream_seq) <= retained_max] or newest_first[:1]
    up_to = min((name.stream_seq for name in enough), default=0)
    return up_to if up_to >= log.first_seq else 0
