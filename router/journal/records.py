"""The records of the journal, and how they are shortened.

On a request's path a `Recorder` only gets what was applied: a record, a decision or a refusal. The encoder later calls
`Shortener.records`, which returns the journal's records for it:

    decision (`Verdict`)    a `RankStanding` of every rank whose epoch or doubt differs from the last recorded one (at
                            first: none), then `Decided`, from which the promise can be derived
    refusal                 `Refused`, without hashes
    checkpoint              `CheckpointBegan`, `RankStanding`s, `CheckpointPart`s, `CheckpointEnded`; each is made when
                            it is read
    any other record        itself

A decision states doubts as trust; `doubt_of` returns the doubt behind a rank's trust.
"""

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from kv_protocol.ids import WorkerRank
from kv_protocol.journal import JournalRecord, RankStanding, Refused
from router.decision.recorders import Applied, RefusedRequest
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


Recordable = Applied | JournalCheckpoint
"""What a journal takes."""
Encodable = JournalRecord | bytes
"""A record, or the msgpack of one."""


class Shortener:
    """Makes the journal's records. One per journal: it knows what was recorded before."""

    def __init__(self) -> None:
        self._statuses = dict[WorkerRank, tuple[int, str]]()
        self._looked_at: tuple[object, object, object] = (None, None, None)

    def records(self, what: Recordable, kv_seq: int) -> Sequence[Encodable]:
        """Return the records of `what`; `kv_seq` is how far the index had read `KV_EVENTS` when it was applied."""
        if isinstance(what, Verdict):
            return *self._changed(what), what.journal_record(kv_seq)
        if isinstance(what, RefusedRequest):
            request = replace(what.request, sequence_hashes=b"") if what.request.sequence_hashes else what.request
            return (Refused(now_s=what.now_s, request=request, exclusions=what.exclusions),)
        if isinstance(what, JournalCheckpoint):
            return (*self.checkpoint(what),)
        return (what,)

    def checkpoint(self, checkpoint: JournalCheckpoint) -> Iterator[JournalRecord]:
        """Yield the records of the checkpoint one by one; forget ranks that left the fleet."""
        workers = checkpoint.worker_ids
        self._statuses = {rank: known for rank, known in self._statuses.items() if rank.worker_id in workers}
        self._looked_at = (None, None, None)
        yield checkpoint.began
        for rank, (epoch, doubt) in self._statuses.items():
            yield RankStanding(
                now_s=checkpoint.began.now_s,
                worker_id=rank.worker_id,
                dp_rank=rank.dp_rank,
                epoch=epoch,
                doubt=doubt,
            )
        yield from checkpoint.parts()

    def _changed(self, verdict: Verdict) -> Sequence[RankStanding]:
        ranks, epochs, trusts = self._looked_at
        if verdict.ranks is ranks and verdict.epochs is epochs and verdict.trusts is trusts:
            return ()
        self._looked_at = (verdict.ranks, verdict.epochs, verdict.trusts)
        return tuple(self._news(verdict))

    def _news(self, verdict: Verdict) -> Iterator[RankStanding]:
        epochs = verdict.epochs or (0,) * len(verdict.ranks)
        for rank, epoch, trust in zip(verdict.ranks, epochs, verdict.trusts, strict=True):
            known = self._statuses.get(rank, _UNHEARD)
            status = epoch, doubt_of(trust, known[1])
            if status != known:
                self._statuses[rank] = status
                yield RankStanding(
                    now_s=verdict.now_s,
                    worker_id=rank.worker_id,
                    dp_rank=rank.dp_rank,
                    epoch=epoch,
                    doubt=status[1],
                )


def doubt_of(trust: Trust, before: str) -> str:
    """Return the doubt behind a rank's trust.

    For a rank with disparities trust does not depend on the doubt: return the doubt known `before`.
    """
    known = _DOUBT_OF.get(trust.reason)
    if known is not None:
        return known
    return trust.reason if trust.state == "DEGRADED" else before
