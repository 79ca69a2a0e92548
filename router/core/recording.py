"""What a router records, and how it becomes small.

On a request's path a `Recorder` only gets what was applied: a record, a verdict or a refusal. Whoever encodes later
hands each to `Shortener.records`, which says what the journal has of it:

    verdict                      a `RankStanding` of every rank whose epoch or doubt is not what was recorded of it last
                                 (at first: none), then `Decided`
    its promise, `Routed`        `Promised`, without the blocks, which are the decision's
    refusal                      `Refused`
    any other record             itself

`Lengthener` undoes the second. A view has its doubts as trust; `doubt_of` says which doubt makes a rank trusted so.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from msgspec.structs import asdict, replace
from numpy.typing import NDArray

from kv_protocol.decided import BEST_MAX, TERM_DEFAULTS, TERMS, TIERS, WIDE, Decided, RequestRecord
from kv_protocol.decision import Exclusion
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import JournalRecord, LedgerApplied, Promised, RankStanding, Refused
from kv_protocol.ledger import Routed
from router.core.cost import CostColumns
from router.core.trust import Trust
from router.core.verdict import Verdict
from router.core.view import Depths, RouteRequest, View

_F64_DEFAULTS = tuple(np.array([default], "<f8").tobytes() for default in TERM_DEFAULTS)
_U16_MAX = 0xFFFF
_DOUBT_OF = {
    "": "",
    "no KV events heard; approximate": "never_heard",
    "no room in the index; approximate": "refused",
    "event log away": "log_away",
}
_UNHEARD = (0, "")
"""What is recorded of a rank of which nothing is recorded: no epoch, no doubt."""


class RefusedRequest(NamedTuple):
    """Nobody could take this request at that time."""

    now_s: float
    request: RouteRequest
    exclusions: tuple[Exclusion, ...]


Recordable = JournalRecord | Verdict | RefusedRequest


class Recorder(Protocol):
    """Who is told of all that is applied, in its order."""

    def record(self, what: Recordable) -> None:
        """`what` was applied."""


class Recorders:
    """Several recorders, told one after the other; of none, nobody keeps anything."""

    def __init__(self, *recorders: Recorder) -> None:
        self._records = tuple(each.record for each in recorders)

    def record(self, what: Recordable) -> None:
        """`what` was applied."""
        for record in self._records:
            record(what)


class Shortener:
    """Says what the journal has of what was applied. One for a journal: it knows what was recorded before."""

    def __init__(self) -> None:
        self._standings = dict[WorkerRank, tuple[int, str]]()
        self._looked_at: tuple[object, object, object] = (None, None, None)
        self._decided: RouteRequest | None = None

    def records(self, what: Recordable, kv_seq: int) -> Iterator[JournalRecord]:
        """Yield the records of `what`; `kv_seq` is how far the index had read `KV_EVENTS` when it was applied."""
        if isinstance(what, Verdict):
            yield from self._changed(what.view)
            self._decided = what.request
            yield decided(what, kv_seq)
        elif isinstance(what, LedgerApplied) and self._is_promise(what):
            assert isinstance(what.event, Routed)
            yield Promised(now_s=what.now_s, event=replace(what.event, blocks=b""))
        elif isinstance(what, RefusedRequest):
            yield Refused(now_s=what.now_s, request=request_record(what.request), exclusions=what.exclusions)
        else:
            yield what

    def _is_promise(self, record: LedgerApplied) -> bool:
        event, request = record.event, self._decided
        return (
            isinstance(event, Routed)
            and not record.router
            and request is not None
            and event.lease_id == request.decision_id
            and event.blocks == request.sequence_hashes
        )

    def _changed(self, view: View) -> Iterator[RankStanding]:
        looked_at = (view.ranks, view.epochs, view.trust)
        if all(one is other for one, other in zip(looked_at, self._looked_at, strict=True)):
            return
        self._looked_at = looked_at
        for rank, epoch, trust in zip(view.ranks, view.epochs, view.trust, strict=True):
            known = self._standings.get(rank, _UNHEARD)
            standing = epoch, doubt_of(trust, known[1])
            if standing != known:
                self._standings[rank] = standing
                yield RankStanding(
                    now_s=view.now_s,
                    worker_id=rank.worker_id,
                    dp_rank=rank.dp_rank,
                    epoch=epoch,
                    doubt=standing[1],
                )


def doubt_of(trust: Trust, before: str) -> str:
    """Return the doubt of the index for which a rank is trusted so.

    Of a rank with disparities they alone decide: it is whatever was known `before`.
    """
    known = _DOUBT_OF.get(trust.reason)
    if known is not None:
        return known
    return trust.reason if trust.state == "DEGRADED" else before


class Lengthener:
    """Undoes what a `Shortener` did to promises."""

    def __init__(self) -> None:
        self._decided: RequestRecord | None = None

    def record(self, record: JournalRecord) -> JournalRecord | None:
        """Return the record as it was applied; None for a promise whose decision is not there."""
        if isinstance(record, Decided):
            self._decided = record.request
        if not isinstance(record, Promised):
            return record
        request = self._decided
        if request is None or request.decision_id != record.event.lease_id:
            return None
        return LedgerApplied(now_s=record.now_s, event=replace(record.event, blocks=request.sequence_hashes))


def request_record(request: RouteRequest) -> RequestRecord:
    """Return the request as the journal has it."""
    return RequestRecord(**asdict(request))


def request_of(record: RequestRecord) -> RouteRequest:
    """Return the request that was recorded."""
    return RouteRequest(**asdict(record))


def decided(verdict: Verdict, kv_seq: int) -> Decided:
    """Return the decision as the journal has it."""
    view, places = verdict.view, verdict.places
    best = terms = costs = b""
    if verdict.costs is not None:
        best, terms, costs = _costs(verdict.costs, verdict.winner_at, places)
    return Decided(
        now_s=verdict.now_s,
        request=request_record(verdict.request),
        policy=verdict.policy,
        seed=verdict.seed,
        kv_seq=kv_seq,
        turn=view.turn,
        ranks=len(view.ranks),
        winner=places[verdict.winner_at],
        worker_id=verdict.winner.worker_id,
        dp_rank=verdict.winner.dp_rank,
        runner_up=None if verdict.runner_up is None else places[verdict.runner_up],
        margin_blocks=verdict.margin_blocks,
        reason=verdict.reason,
        action=verdict.action,
        ttft_s=verdict.ttft_s,
        itl_s=verdict.itl_s,
        best=best,
        terms=terms,
        costs=costs,
        overlap=pack_overlap(view.overlap),
    )


def _costs(costs: CostColumns, winner_at: int, places: Sequence[int]) -> tuple[bytes, bytes, bytes]:
    cost = costs.cost
    order = np.argsort(cost, kind="stable")
    best = np.concatenate(([winner_at], order[order != winner_at][: BEST_MAX - 1]))
    rest = np.ones(len(cost), bool)
    rest[best] = False
    columns = np.asarray(places)[best].astype("<u2").tobytes()
    return columns, _terms(costs, best), cost[rest].astype("<f4").tobytes()


def _terms(costs: CostColumns, best: NDArray[np.intp]) -> bytes:
    mask, parts = 0, [b""]
    for at, name in enumerate(TERMS):
        column = getattr(costs, name)
        values = b"" if column is None else column[best].astype("<f8").tobytes()
        if values and values != _F64_DEFAULTS[at] * len(best):
            mask |= 1 << at
            parts.append(values)
    parts[0] = bytes((mask,))
    return b"".join(parts)


def pack_overlap(overlap: Depths) -> bytes:
    """Return the depths of all columns, as `kv_protocol/decided.py` has it."""
    if not overlap[TIERS - 1].any():
        return b""
    is_wide = int(overlap[TIERS - 1].max()) > _U16_MAX
    flags, parts, kind = WIDE * is_wide, [b""], "<u4" if is_wide else "<u2"
    before = None
    for tier, depths in enumerate(overlap):
        if before is not None and before.tobytes() == depths.tobytes():
            continue
        more = depths if before is None else depths - before
        who = more.astype(bool)
        if before is not None or who.any():
            flags |= 1 << tier
            parts += [np.packbits(who, bitorder="little").tobytes(), more[who].astype(kind).tobytes()]
        before = depths
    parts[0] = bytes((flags,))
    return b"".join(parts)
