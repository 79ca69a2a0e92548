"""The ledger of promised work: what was routed to each rank and has not ended.

    Routed        blocks and uncached tokens are promised; the lease runs
    FirstToken    the uncached tokens are computed
    Renewed       the lease is extended (bytes still flow)
    Finished, Cancelled, Expired    the promise ends
    Reconciled    the engine's report corrects the promises (`reported_load.py`)
    Unreported    the engine's reports are dropped

Blocks are counted once per rank, however many requests share them. One table (`load_table.py`) has all ranks' chains
and sums; it tells how many of a new request's blocks a rank's active requests already use. When nothing is in flight,
and no engine reports foreign requests, every sum is 0.

Replicas' leases are leases like any other, and end by the same events. `origin` names their owner: only the owner
corrects them by what engines report, so that all of its replicas do the same.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kv_protocol.ids import WorkerRank
from kv_protocol.ledger import (
    Cancelled,
    Expired,
    Finished,
    FirstToken,
    LedgerEvent,
    Reconciled,
    Renewed,
    Routed,
    Unreported,
)
from router.fleet.load_table import LoadTable, new_load_table
from router.fleet.rank_rows import RankRows
from router.fleet.reported_load import Reported
from router.journal.checkpoint_rows import LeaseRow, LedgerRow, LedgerTotals

LEASE_S = 300.0
"""How long a lease lives that nothing renews."""
SILENT_S = 10.0
"""A lease renewed within this time is not ended because its engine reports fewer requests."""


_Fold = Callable[[Any, float, str], object]


class RankLoad(NamedTuple):
    """One rank's promises. `reported_*` come from its engine; `foreign_requests` are reported but not promised."""

    active_requests: int = 0
    active_blocks: int = 0
    prefill_tokens_queued: int = 0
    foreign_requests: int = 0
    reported_running: int = 0
    reported_waiting: int = 0
    reported_used_blocks: int = 0


class LoadColumns(NamedTuple):
    """Columns of n ranks, read-only.

    Uncached tokens before their first token; requests, with foreign ones; distinct blocks; blocks of a chain in use.
    """

    queued_tokens: NDArray[np.int64]
    active_requests: NDArray[np.int64]
    active_blocks: NDArray[np.int64]
    shared_blocks: NDArray[np.int64]


_LOAD_COLUMNS = len(LoadColumns._fields)


class LedgerStatistics(NamedTuple):
    """Open leases; leases that ended without their request's end, by cause; reported less promised, by rank."""

    open_leases: int
    expired_total: int
    corrected_total: int
    differences: dict[WorkerRank, int]


class _RankSums:
    """One rank's sums; `row` is its row in the table, which has them, too."""

    __slots__ = ("extra_blocks", "is_gone", "queued_tokens", "rank", "reported", "requests", "row")

    def __init__(self, rank: WorkerRank, row: int) -> None:
        self.rank = rank
        self.row = row
        self.requests = self.queued_tokens = self.extra_blocks = 0
        self.reported = Reported()
        self.is_gone = False  # forgotten, except for open leases


class _Lease:
    """`end` is that of its chain in the table; 0: no block has a hash. `blocks` is the request's own object."""

    __slots__ = ("at", "blocks", "end", "expires_at_s", "extra_blocks", "generation", "origin", "uncached_tokens")

    def __init__(self, routed: Routed, at: _RankSums, end: int, origin: str, expires_at_s: float) -> None:
        self.at = at
        self.blocks = routed.blocks
        self.end = end
        self.origin = origin
        self.uncached_tokens = routed.uncached_tokens
        self.extra_blocks = routed.extra_blocks
        self.generation = at.reported.generation
        self.expires_at_s = expires_at_s


class Ledger:
    """All leases. Unknown leases and second endings change nothing."""

    def __init__(self, lease_s: float = LEASE_S) -> None:
        self._lease_s = lease_s
        self._leases: dict[str, _Lease] = {}  # in the order of their expiry
        self._ranks: dict[WorkerRank, _RankSums] = {}
        self._rows = RankRows()
        self._table: LoadTable = new_load_table()
        self._expired = self._corrected = 0
        self._folds: dict[type, _Fold] = {
            Routed: self._book,
            FirstToken: lambda event, now_s, _: self._renew(event.lease_id, now_s, prefilled=True),
            Renewed: lambda event, now_s, _: self._renew(event.lease_id, now_s, prefilled=False),
            Finished: lambda event, _, __: self.end(event.lease_id),
            Cancelled: lambda event, _, __: self.end(event.lease_id),
            Expired: self._expire,
            Reconciled: lambda event, now_s, _: self._reconcile(event, now_s),
            Unreported: lambda event, _, __: self._unreport(WorkerRank(event.worker_id, event.dp_rank)),
        }

    def apply(self, event: LedgerEvent, now_s: float, origin: str = "") -> None:
        """Fold one event in. `origin` is the router that owns the lease; empty: this one."""
        self._folds[type(event)](event, now_s, origin)

    def _expire(self, event: Expired, _now_s: float, _origin: str) -> None:
        is_ended = self.end(event.lease_id)
        self._expired += is_ended and event.cause == "silence"
        self._corrected += is_ended and event.cause == "engine"

    def tick(self, now_s: float) -> list[Expired | Unreported]:
        """Return the events that the passing of time causes; the caller applies them, or gets them again.

        These are endings of expired leases, and of own leases that an engine does not report; and the engines that have
        stopped reporting.
        """
        events: list[Expired | Unreported] = []
        for lease_id, lease in self._leases.items():
            if lease.expires_at_s > now_s:
                break
            events.append(Expired(lease_id=lease_id))
        for at in self._ranks.values():
            if at.reported.excess:
                events.extend(self._unknown_to(at, now_s))
            if at.reported.is_silent(now_s):
                events.append(Unreported(worker_id=at.rank.worker_id, dp_rank=at.rank.dp_rank))
        return events

    def _unknown_to(self, at: _RankSums, now_s: float) -> list[Expired]:
        """Return endings of the rank's eldest leases, as many as its engine does not report."""
        eldest: list[tuple[str, _Lease]] = []
        for lease_id, lease in self._leases.items():
            renewed_s = lease.expires_at_s - self._lease_s
            if renewed_s > now_s - SILENT_S or len(eldest) == at.reported.excess:
                break
            if lease.at is at and at.reported.is_settled(lease.generation):
                eldest.append((lease_id, lease))
        overdue = [each for each in eldest if not each[1].origin and each[1].expires_at_s > now_s]
        return [Expired(lease_id=lease_id, cause="engine") for lease_id, _ in overdue]

    def _rank(self, rank: WorkerRank) -> _RankSums:
        at = self._ranks.get(rank)
        if at is None:
            at = self._ranks[rank] = _RankSums(rank, self._rows.add(rank))
            self._show(at)
        at.is_gone = False
        return at

    def _show(self, at: _RankSums) -> None:
        self._table.put(at.row, at.queued_tokens, at.requests + at.reported.foreign, at.extra_blocks)

    def _book(self, routed: Routed, now_s: float, origin: str) -> None:
        if routed.lease_id in self._leases:
            return
        at = self._rank(WorkerRank(routed.worker_id, routed.dp_rank))
        end = self._table.add(at.row, routed.blocks) if routed.blocks else 0
        lease = self._leases[routed.lease_id] = _Lease(routed, at, end, origin, now_s + self._lease_s)
        self._count(at, lease)
        at.reported.booked()

    def _renew(self, lease_id: str, now_s: float, *, prefilled: bool) -> None:
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return
        if prefilled:
            lease.at.queued_tokens -= lease.uncached_tokens
            lease.uncached_tokens = 0
            self._show(lease.at)
        lease.expires_at_s = now_s + self._lease_s
        self._leases[lease_id] = lease

    def end(self, lease_id: str) -> bool:
        """The lease is over, in whatever way; return whether it was known."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return False
        at = lease.at
        if lease.end:
            self._table.remove(lease.end)
        at.requests -= 1
        at.queued_tokens -= lease.uncached_tokens
        at.extra_blocks -= lease.extra_blocks
        at.reported.ended(lease.generation)
        self._show(at)
        if at.is_gone and not at.requests:
            self._drop(at)
        return True

    def _drop(self, at: _RankSums) -> None:
        self._table.put(at.row, 0, 0, 0)
        self._rows.remove(at.rank)
        del self._ranks[at.rank]

    def _reconcile(self, report: Reconciled, now_s: float) -> None:
        at = self._rank(WorkerRank(report.worker_id, report.dp_rank))
        at.reported.on_report(report, at.requests, now_s)
        self._show(at)

    def _unreport(self, rank: WorkerRank) -> None:
        at = self._ranks.get(rank)
        if at is not None:
            at.reported.withdraw()
            self._show(at)

    def forget(self, worker_id: str) -> None:
        """Drop the reports of a worker that left, and its ranks once their leases ended."""
        for at in [at for rank, at in self._ranks.items() if rank.worker_id == worker_id]:
            at.reported.withdraw()
            at.is_gone = True
            self._show(at)
            if not at.requests:
                self._drop(at)

    def mark_gone(self, rank: WorkerRank) -> None:
        """Mark the rank of an unregistered worker: it is dropped once its leases have ended."""
        at = self._ranks.get(rank)
        if at is not None:
            at.is_gone = True

    def columns(self, ranks: tuple[WorkerRank, ...], chain: bytes = b"") -> LoadColumns:
        """Return the loads in the order of `ranks`, zeroes for unknown ones; the last column is about `chain`.

        Cheap if the same tuple object was passed before.
        """
        packed = self._table.columns(self._rows.placed(ranks).packed, chain)
        return LoadColumns(*np.ndarray((_LOAD_COLUMNS, len(ranks)), np.int64, packed))

    def load_of(self, rank: WorkerRank) -> RankLoad:
        """Return the rank's present load; zeroes for an unknown rank."""
        at = self._ranks.get(rank)
        if at is None:
            return RankLoad()
        running, waiting, used = at.reported.newest
        return RankLoad(
            active_requests=at.requests,
            active_blocks=self._table.blocks(at.row) + at.extra_blocks,
            prefill_tokens_queued=at.queued_tokens,
            foreign_requests=at.reported.foreign,
            reported_running=running,
            reported_waiting=waiting,
            reported_used_blocks=used,
        )

    def loads(self) -> dict[WorkerRank, RankLoad]:
        """Return every rank's load."""
        return {rank: self.load_of(rank) for rank in self._ranks}

    def statistics(self) -> LedgerStatistics:
        """Return current and ended leases, and the difference between promises and reports."""
        reporting = [at for at in self._ranks.values() if at.reported.has_reported]
        return LedgerStatistics(
            open_leases=len(self._leases),
            expired_total=self._expired,
            corrected_total=self._corrected,
            differences={at.rank: sum(at.reported.newest[:2]) - at.requests for at in reporting},
        )

    @property
    def expired_total(self) -> int:
        """Number of leases that expired."""
        return self._expired

    # --------------------------------------------------------------------------------------------- checkpoints

    def totals_row(self) -> LedgerTotals:
        """Return the row for a checkpoint."""
        return LedgerTotals(self._expired, self._corrected)

    def restore_totals(self, row: LedgerTotals) -> None:
        """Restore the totals from the row."""
        self._expired, self._corrected = row

    def rank_rows(self) -> list[LedgerRow]:
        """Return the rows for a checkpoint."""
        return [LedgerRow(rank, at.is_gone, at.reported.row()) for rank, at in self._ranks.items()]

    def restore_rank(self, row: LedgerRow) -> None:
        """Restore the rank without its leases."""
        at = self._rank(row.rank)
        at.is_gone = row.is_gone
        at.reported.restore(row.reported)
        self._show(at)

    def lease_rows(self) -> list[LeaseRow]:
        """Return the rows for a checkpoint, in the order of their expiry."""
        return [
            LeaseRow(
                lease_id,
                lease.at.rank,
                lease.origin,
                lease.blocks,
                lease.uncached_tokens,
                lease.extra_blocks,
                lease.generation,
                lease.expires_at_s,
            )
            for lease_id, lease in self._leases.items()
        ]

    def restore_lease(self, row: LeaseRow) -> None:
        """Restore a lease of a rank that was restored before."""
        at = self._ranks[row.rank]
        routed = Routed(
            lease_id=row.lease_id,
            worker_id=row.rank.worker_id,
            dp_rank=row.rank.dp_rank,
            blocks=row.blocks,
            uncached_tokens=row.uncached_tokens,
            extra_blocks=row.extra_blocks,
        )
        end = self._table.add(at.row, row.blocks) if row.blocks else 0
        lease = self._leases[row.lease_id] = _Lease(routed, at, end, row.origin, row.expires_at_s)
        lease.generation = row.generation
        self._count(at, lease)

    def _count(self, at: _RankSums, lease: _Lease) -> None:
        at.requests += 1
        at.queued_tokens += lease.uncached_tokens
        at.extra_blocks += lease.extra_blocks
        self._show(at)

    def is_empty(self) -> bool:
        """Whether the ledger has no lease, and no remains of former ones."""
        nothing = all((at.requests, at.queued_tokens, at.extra_blocks) == (0, 0, 0) for at in self._ranks.values())
        return not self._leases and self._table.is_empty() and nothing
