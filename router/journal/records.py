"""The records of the journal, and how they are shortened.

On a request's path a `Recorder` only gets what was applied: a record, a decision or a refusal. The encoder later calls
`Shortener.records`, which returns the journal's records for it:

    decision and promise (`Taken`)    a `RankStanding` of every rank whose epoch or doubt differs from the last recorded
                                      one (at first: none), then `Decided`, from which the promise can be derived
    refusal                           `Refused`, without hashes
    checkpoint                        `CheckpointBegan`, `RankStanding`s, `CheckpointPart`s, `CheckpointEnded`; each is
                                      made when it is read
    any other record                  itself

A view states doubts as trust; `doubt_of` returns the doubt behind a rank's trust.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from msgspec.structs import asdict, replace

from kv_protocol.decided import BEST_MAX, TERM_DEFAULTS, TIERS, WIDE, NewDecision, RequestRecord, packed_mask
from kv_protocol.decision import Exclusion
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import JournalRecord, NewRecord, RankStanding, Refused
from router import native
from router.decision.cost import LISTS_MAX, CostColumns
from router.decision.verdict import Taken, Verdict
from router.decision.view import Depths, Floats, RouteRequest, View
from router.fleet.trust import Trust
from router.journal.checkpoint import JournalCheckpoint

_F64_DEFAULTS = tuple(struct.pack("<d", default) for default in TERM_DEFAULTS)
_U16_MAX = 0xFFFF
_built: Any = native.load()
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


class RefusedRequest(NamedTuple):
    """No rank was eligible for this request at that time."""

    now_s: float
    request: RouteRequest
    exclusions: tuple[Exclusion, ...]


Recordable = JournalRecord | Taken | RefusedRequest | JournalCheckpoint


class Recorder(Protocol):
    """Receives all that is applied, in order."""

    def record(self, what: Recordable) -> None:
        """`what` was applied."""


class SelectiveRecorder(Recorder, Protocol):
    """A recorder that is called only with records of the types in `reads`."""

    @property
    def reads(self) -> tuple[type, ...]:
        """The types of records that it is called with; an empty tuple means every type."""


class Recorders:
    """Several recorders, each called with what it reads, one after the other; without any, nothing is recorded."""

    def __init__(self, *recorders: SelectiveRecorder) -> None:
        self._recorders = recorders
        self._of_type: dict[type, tuple[Callable[[Recordable], None], ...]] = {}

    def record(self, what: Recordable) -> None:
        """`what` was applied."""
        kind = type(what)
        records = self._of_type.get(kind)
        if records is None:
            readers = [each for each in self._recorders if not each.reads or kind in each.reads]
            records = self._of_type[kind] = tuple(each.record for each in readers)
        for record in records:
            record(what)


class Shortener:
    """Makes the journal's records. One per journal: it knows what was recorded before."""

    def __init__(self) -> None:
        self._statuses = dict[WorkerRank, tuple[int, str]]()
        self._looked_at: tuple[object, object, object] = (None, None, None)

    def records(self, what: Recordable, kv_seq: int) -> Sequence[NewRecord]:
        """Return the records of `what`; `kv_seq` is how far the index had read `KV_EVENTS` when it was applied."""
        if isinstance(what, Taken):
            verdict, promise = what
            return *self._changed(verdict.view), decided(verdict, kv_seq, promise.uncached_tokens)
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

    def _changed(self, view: View) -> Sequence[RankStanding]:
        ranks, epochs, trust = self._looked_at
        if view.ranks is ranks and view.epochs is epochs and view.trust is trust:
            return ()
        self._looked_at = (view.ranks, view.epochs, view.trust)
        return tuple(self._news(view))

    def _news(self, view: View) -> Iterator[RankStanding]:
        for rank, epoch, trust in zip(view.ranks, view.epochs, view.trust, strict=True):
            known = self._statuses.get(rank, _UNHEARD)
            status = epoch, doubt_of(trust, known[1])
            if status != known:
                self._statuses[rank] = status
                yield RankStanding(
                    now_s=view.now_s,
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


def request_of(record: RequestRecord) -> RouteRequest:
    """Return the recorded request."""
    return RouteRequest(**asdict(record))


def decided(verdict: Verdict, kv_seq: int, uncached_tokens: int) -> NewDecision:
    """Return the decision as a journal record; `uncached_tokens` of the prompt were promised to be computed."""
    view, rank_indices = verdict.view, verdict.rank_indices
    best = terms = costs = b""
    if verdict.costs is not None:
        best, terms, costs = _costs(verdict.costs, verdict.winner_at, rank_indices)
    return NewDecision(
        now_s=verdict.now_s,
        request=verdict.request,
        policy=verdict.policy,
        seed=verdict.seed,
        kv_seq=kv_seq,
        turn=view.turn,
        ranks=len(view.ranks),
        winner=rank_indices[verdict.winner_at],
        worker_id=verdict.winner.worker_id,
        dp_rank=verdict.winner.dp_rank,
        runner_up=None if verdict.runner_up is None else rank_indices[verdict.runner_up],
        margin=verdict.margin,
        reason=verdict.reason,
        uncached_tokens=uncached_tokens,
        epoch=verdict.epoch,
        action=verdict.action,
        ttft_s=verdict.ttft_s,
        itl_s=verdict.itl_s,
        best=best,
        terms=terms,
        costs=costs,
        overlap=b"" if view.is_blank else pack_overlap(view.overlap),
    )


def _costs(costs: CostColumns, winner_at: int, rank_indices: Sequence[int]) -> tuple[bytes, bytes, bytes]:
    if _built is not None and costs.timed is not None:
        packed: tuple[bytes, bytes, bytes] | None = _built.packed_costs(costs.timed, winner_at, rank_indices)
        if packed is not None:
            return packed
    return costs_in_python(costs, winner_at, rank_indices)


def costs_in_python(costs: CostColumns, winner_at: int, rank_indices: Sequence[int]) -> tuple[bytes, bytes, bytes]:
    """Return the `best`, `terms` and `costs` of a record; the extension's are the same bytes."""
    cost = costs.costs()
    others = _cheapest(costs, cost)
    others.remove(winner_at) if winner_at in others else others.pop()
    best = [winner_at, *others]
    columns = struct.pack(f"<{len(best)}H", *[rank_indices[at] for at in best])
    return columns, _terms(costs, best), _rest(costs.cost, best) if len(cost) > len(best) else b""


def _cheapest(costs: CostColumns, cost: list[float]) -> list[int]:
    """Return the `BEST_MAX` cheapest candidates, cheapest first, the first among equals."""
    if len(cost) <= LISTS_MAX:
        return sorted(range(len(cost)), key=cost.__getitem__)[:BEST_MAX]
    cheapest: list[int] = costs.cost.argsort(kind="stable")[:BEST_MAX].tolist()
    return cheapest


def _rest(cost: Floats, best: list[int]) -> bytes:
    rest = np.ones(len(cost), bool)
    rest[best] = False
    return cost[rest].astype("<f4").tobytes()


def _terms(costs: CostColumns, best: list[int]) -> bytes:
    mask, parts, format_ = 0, [b""], f"<{len(best)}d"
    for at, numbers in enumerate(costs.picked(best)):
        if numbers is None:
            continue
        values = struct.pack(format_, *numbers)
        if values != _F64_DEFAULTS[at] * len(best):
            mask |= 1 << at
            parts.append(values)
    parts[0] = packed_mask(mask)
    return b"".join(parts)


def pack_overlap(overlap: Depths) -> bytes:
    """Return the depths of all columns, in the format of `kv_protocol/decided.py`."""
    if _built is None:
        return overlap_in_numpy(overlap)
    packed: bytes = _built.packed_overlap(overlap)
    return packed


def overlap_in_numpy(overlap: Depths) -> bytes:
    """Return the same bytes as `pack_overlap`."""
    if not overlap[TIERS - 1].any():
        return b""
    is_wide = int(overlap[TIERS - 1].max()) > _U16_MAX
    flags, parts, kind = WIDE * is_wide, [b""], "<u4" if is_wide else "<u2"
    before = None
    for tier, depths in enumerate(overlap):
        if before is not None and before.tobytes() == depths.tobytes():
            continue
        more = depths if before is None else depths - before
        is_more = more.astype(bool)
        if before is not None or is_more.any():
            flags |= 1 << tier
            parts += [np.packbits(is_more, bitorder="little").tobytes(), more[is_more].astype(kind).tobytes()]
        before = depths
    parts[0] = bytes((flags,))
    return b"".join(parts)
