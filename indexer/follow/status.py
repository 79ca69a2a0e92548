"""The status of one rank's stream, for decisions, and its counts, for metrics.

stale          why the rank's blocks are not known to be current
------------   ------------------------------------------------------------------------------------------------
never_heard    nothing was received
refused        the index has no slot or memory for the rank
resyncing      batches are missing, or the blocks may be wrong: a recovery is under way
overfull       the index had no memory for some of its blocks; the others are known
source         the rank's consolidator reports it as stale
no_events      the consolidator reports that the engine publishes no KV events, or that none arrive (`fleet.NO_EVENTS`)
behind         a heartbeat reported batches that were not received yet
log_away       the log is disconnected; the rank was current, or behind, before
(empty)        current
"""

from typing import Literal

import msgspec

StaleReason = Literal[
    "never_heard", "refused", "resyncing", "overfull", "source", "behind", "log_away", "", "no_events"
]


def is_blind(stale: str) -> bool:
    """Return whether the overlap of a rank that is stale for this reason counts for little."""
    return stale not in ("", "overfull", "log_away")


def without_log(stale: str) -> str:
    """Return the reason while the log is disconnected: a current rank may have changed since."""
    return "log_away" if stale in ("", "behind") else stale


class FollowerCounts(msgspec.Struct, kw_only=True):
    """Counts of one stream so far: batches, holes, answers, and the time that recoveries took.

    `gaps` counts holes, `holes_closed` those that the log closed itself; `replays`, `repairs` and `resyncs` (complete
    dumps) count answers that took effect; `implausible` counts seqs that cannot be right. `heals` counts completed
    recoveries, `kept_lost` early batches that were dropped. A recovery's duration is counted from its first sign on.
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


class FollowerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The status of one stream, and a copy of its counts.

    `logged_seq` is the highest seq of the epoch that came from the log.
    """

    epoch: int
    cursor: int
    logged_seq: int
    stale: StaleReason
    counts: FollowerCounts
