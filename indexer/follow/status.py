"""The status of one rank's stream, for decisions, and what happened to it, for metrics.

stale          why the rank's blocks are not known to be current
------------   ------------------------------------------------------------------------------------------------
never_heard    nothing was heard of it
refused        the index had no place for it
resyncing      batches are missing, or what is held may be wrong: it is being asked for
overfull       the index had no memory for some of its blocks; what fitted is known
source         its own consolidator does not vouch for it
behind         a heartbeat told of batches that did not come yet
log_away       the log cannot be heard; it was current, or behind, when it was heard last
(empty)        nothing speaks against it
"""

from typing import Literal

import msgspec

StaleReason = Literal["never_heard", "refused", "resyncing", "overfull", "source", "behind", "log_away", ""]


def is_blind(stale: str) -> bool:
    """Return whether a rank so stale is routed to blindly: what is known of it counts for little."""
    return stale not in ("", "overfull", "log_away")


def without_log(stale: str) -> str:
    """Return the reason while the log cannot be heard: who would be current, or soon, may have changed since."""
    return "log_away" if stale in ("", "behind") else stale


class FollowerCounts(msgspec.Struct, kw_only=True):
    """What has befallen one stream so far: batches, holes, answers, and how long it took to be whole again.

    `gaps` counts holes that were noticed, `holes_closed` those of them that the log closed itself; `replays`, `repairs`
    and `resyncs` (whole dumps) count answers that did their work; `implausible` counts what was told of a place too far
    from the stream's. `heals` counts the times that it was recovering and followed on; each took as long as from the
    first sign that something was wrong.
    """

    applied: int = 0
    duplicates: int = 0
    gaps: int = 0
    holes_closed: int = 0
    replays: int = 0
    repairs: int = 0
    resyncs: int = 0
    restarts: int = 0
    digest_mismatches: int = 0
    implausible: int = 0
    other_epoch: int = 0
    kept_lost: int = 0
    heals: int = 0
    healing_s_total: float = 0.0
    last_healing_s: float = 0.0

    def on_heal(self, seconds: float) -> None:
        """A recovery ended, so long after its first sign."""
        self.heals += 1
        self.last_healing_s = seconds
        self.healing_s_total += seconds


class FollowerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Where one stream stands, and a copy of what has befallen it.

    `logged_seq` is the highest seq of the epoch that the log itself brought.
    """

    epoch: int
    cursor: int
    logged_seq: int
    stale: StaleReason
    counts: FollowerCounts
