"""The standings of ranks in the journal: how decisions are shortened.

Each decision (`Decided`) stands behind a `RankStanding` of every rank whose epoch or doubt differs from the last
recorded one (at first: none). A checkpoint is `CheckpointBegan`, `RankStanding`s, `CheckpointPart`s, `CheckpointEnded`;
each is made when it is read.

A decision states doubts as trust; `doubt_of` returns the doubt behind a rank's trust.
"""

from collections.abc import Iterator
from itertools import chain

from kv_protocol.ids import WorkerRank
from kv_protocol.journal import JournalRecord, RankStanding
from router.decision.verdict import Verdict
from router.fleet.trust import Trust
from router.journal.checkpoint import JournalCheckpoint

_DOUBT_OF = {
    "": "",
    "no KV events heard; approximate": "never_heard",
    "no room in the index; approximate": "refused",
    "underpredicted; approximate": "underpredicted",
    "no events; approximate": "no_events",
    "event log away": "log_away",
}
_UNHEARD = (0, "")
"""Default record of a rank: no epoch, no doubt."""


class RecordedStandings:
    """What the journal says of the ranks' standings. One per journal."""

    def __init__(self) -> None:
        self._statuses = dict[WorkerRank, tuple[int, str]]()

    def checkpoint(self, checkpoint: JournalCheckpoint) -> Iterator[JournalRecord]:
        """Return the records of the checkpoint; forget ranks that left the fleet."""
        workers = checkpoint.worker_ids
        self._statuses = {rank: known for rank, known in self._statuses.items() if rank.worker_id in workers}
        now_s = checkpoint.began.now_s
        standings = [_standing(now_s, rank, *status) for rank, status in self._statuses.items()]
        return chain((checkpoint.began,), standings, checkpoint.parts())

    def changed(self, verdict: Verdict) -> Iterator[RankStanding]:
        """Yield the standings that the decision sees and that are not as recorded."""
        epochs = verdict.epochs or (0,) * len(verdict.ranks)
        for rank, epoch, trust in zip(verdict.ranks, epochs, verdict.trusts, strict=True):
            known = self._statuses.get(rank, _UNHEARD)
            status = epoch, doubt_of(trust, known[1])
            if status != known:
                self._statuses[rank] = status
                yield _standing(verdict.now_s, rank, *status)


def _standing(now_s: float, rank: WorkerRank, epoch: int, doubt: str) -> RankStanding:
    return RankStanding(now_s=now_s, worker_id=rank.worker_id, dp_rank=rank.dp_rank, epoch=epoch, doubt=doubt)


def doubt_of(trust: Trust, before: str) -> str:
    """Return the doubt behind a rank's trust.

    For a rank with disparities trust does not depend on the doubt: return the doubt known `before`.
    """
    known = _DOUBT_OF.get(trust.reason)
    if known is not None:
        return known
    return trust.reason if trust.state == "DEGRADED" else before
