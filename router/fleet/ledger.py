"""The ledger of promised work: what was routed to each rank and has not ended.

    Routed        blocks and uncached tokens are promised; the lease runs
    FirstToken    the uncached tokens are computed
    Renewed       the lease runs anew (bytes still flow)
    Finished, Cancelled, Expired    nothing is promised any more
    Reconciled    what the engine itself reports stands beside the promise, and corrects it (`reported_load.py`)
    Unreported    the engine's word counts no more

Blocks are counted once a rank, however many requests share them; one inverted index of chains -> ranks answers how many
of a new request's blocks a rank already works on. When nothing is in flight, and no engine speaks of requests that are
not ours, every sum is 0.

Replicas' leases are leases like any other, and end by the same events. `origin` says whose they are: their owner alone
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
from router.fleet.rank_table import RankTable
from router.fleet.reported_load import Reported
from router.journal.checkpoint_rows import LeaseRow, LedgerRow, LedgerTotals
from router.prompt.chains import ChainCounts, Path

SILENT_S = 10.0
"""A lease that gave a sign of life within this time is not ended because its engine knows of fewer requests."""


_Fold = Callable[[Any, float, str], object]


class RankLoad(NamedTuple):
    """One rank's promises; `reported_*` is its engine's own word, `foreign_requests` those of it that are not ours."""

    active_requests: int = 0
    active_blocks: int = 0
    prefill_tokens_queued: int = 0
    foreign_requests: int = 0
    reported_running: int = 0
    reported_waiting: int = 0
    reported_used_blocks: int = 0


class LoadColumns(NamedTuple):
    """Of n ranks: uncached tokens not past their first token; requests, the foreign ones too; distinct blocks."""

    queued_tokens: NDArray[np.int64]
    active_requests: NDArray[np.int64]
    active_blocks: NDArray[np.int64]


class LedgerStatistics(NamedTuple):
    """Leases that run, and that nobody ended, by cause; of each rank that reports, requests reported less promised."""

    open_leases: int
    expired_total: int
    corrected_total: int
    differences: dict[WorkerRank, int]


class _Rank:
    """One rank's sums; `row` is its place in the columns."""

    __slots__ = ("extra_blocks", "is_gone", "queued_tokens", "rank", "reported", "requests", "row")

    def __init__(self, rank: WorkerRank, row: int) -> None:
        self.rank = rank
        self.row = row
        self.requests = self.queued_tokens = self.extra_blocks = 0
        self.reported = Reported()
        self.is_gone = False  # forgotten, but for requests that have not ended


class _Lease:
    """`path` is None where no block of the request has a hash. `blocks` are those of the request, the same object."""

    __slots__ = ("at", "blocks", "expires_at_s", "extra_blocks", "generation", "origin", "path", "uncached_tokens")

    def __init__(
        self, routed: Routed, at: _Rank, path: Path[WorkerRank] | None, origin: str, expires_at_s: float
    ) -> None:
        self.at = at
        self.blocks = routed.blocks
        self.path = path
        self.origin = origin
        self.uncached_tokens = routed.uncached_tokens
        self.extra_blocks = routed.extra_blocks
        self.generation = at.reported.generation
        self.expires_at_s = expires_at_s


class Ledger:
    """All leases. Unknown leases and second endings change nothing."""

    def __init__(self, lease_s: float = 300.0) -> None:
        self._lease_s = lease_s
        self._leases: dict[str, _Lease] = {}  # in the order of their expiry
        self._ranks: dict[WorkerRank, _Rank] = {}
        self._chains: ChainCounts[WorkerRank] = ChainCounts()
        self._table = RankTable("q", (0, 0, 0))  # the fields of `LoadColumns`
        self._unshown: set[_Rank] = set()  # whose rows are not what they come to
        self._expired = self._corrected = 0
        self._folds: dict[type, _Fold] = {
            Routed: self._book,
            FirstToken: lambda event, now_s, _: self._renew(event.lease_id, now_s, prefilled=True),
            Renewed: lambda event, now_s, _: self._renew(event.lease_id, now_s, prefilled=False),
            Finished: lambda event, _, __: self._end(event.lease_id),
            Cancelled: lambda event, _, __: self._end(event.lease_id),
            Expired: self._expire,
            Reconciled: lambda event, now_s, _: self._reconcile(event, now_s),
            Unreported: lambda event, _, __: self._unreport(WorkerRank(event.worker_id, event.dp_rank)),
        }

    def apply(self, event: LedgerEvent, now_s: float, origin: str = "") -> None:
        """Fold one event in. `origin` is the router whose lease it is of; empty: this one."""
        self._folds[type(event)](event, now_s, origin)

    def _expire(self, event: Expired, _now_s: float, _origin: str) -> None:
        is_ended = self._end(event.lease_id)
        self._expired += is_ended and event.cause == "silence"
        self._corrected += is_ended and event.cause == "engine"

    def tick(self, now_s: float) -> list[Expired | Unreported]:
        """Return what time has brought; the caller applies it, as any other event, and else is told it again.

        Those are endings of leases whose time is over, and of our own that an engine knows nothing of; and the engines
        that have fallen silent.
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

    def _unknown_to(self, at: _Rank, now_s: float) -> list[Expired]:
        """Return the endings of the eldest of the rank's leases, as many as its engine does not know of."""
        eldest: list[tuple[str, _Lease]] = []
        for lease_id, lease in self._leases.items():
            renewed_s = lease.expires_at_s - self._lease_s
            if renewed_s > now_s - SILENT_S or len(eldest) == at.reported.excess:
                break
            if lease.at is at and at.reported.is_settled(lease.generation):
                eldest.append((lease_id, lease))
        overdue = [each for each in eldest if not each[1].origin and each[1].expires_at_s > now_s]
        return [Expired(lease_id=lease_id, cause="engine") for lease_id, _ in overdue]

    def _rank(self, rank: WorkerRank) -> _Rank:
        at = self._ranks.get(rank)
        if at is None:
            at = self._ranks[rank] = _Rank(rank, self._table.row(rank))
        at.is_gone = False
        return at

    def _show(self, at: _Rank) -> None:
        requests, blocks = at.requests + at.reported.foreign, self._chains.blocks(at.rank) + at.extra_blocks
        self._table.put(at.row, at.queued_tokens, requests, blocks)

    def _book(self, routed: Routed, now_s: float, origin: str) -> None:
        if routed.lease_id in self._leases:
            return
        at = self._rank(WorkerRank(routed.worker_id, routed.dp_rank))
        path = self._chains.add(at.rank, routed.blocks) if routed.blocks else None
        lease = self._leases[routed.lease_id] = _Lease(routed, at, path, origin, now_s + self._lease_s)
        self._count(at, lease)
        at.reported.booked()

    def _renew(self, lease_id: str, now_s: float, *, prefilled: bool) -> None:
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return
        if prefilled:
            lease.at.queued_tokens -= lease.uncached_tokens
            lease.uncached_tokens = 0
            self._unshown.add(lease.at)
        lease.expires_at_s = now_s + self._lease_s
        self._leases[lease_id] = lease

    def _end(self, lease_id: str) -> bool:
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return False
        at = lease.at
        if lease.path is not None:
            self._chains.remove(lease.path)
        at.requests -= 1
        at.queued_tokens -= lease.uncached_tokens
        at.extra_blocks -= lease.extra_blocks
        at.reported.ended(lease.generation)
        self._unshown.add(at)
        if at.is_gone and not at.requests:
            self._drop(at)
        return True

    def _drop(self, at: _Rank) -> None:
        self._table.remove(at.rank)
        self._unshown.discard(at)
        del self._ranks[at.rank]

    def _reconcile(self, report: Reconciled, now_s: float) -> None:
        at = self._rank(WorkerRank(report.worker_id, report.dp_rank))
        at.reported.on_report(report, at.requests, now_s)
        self._unshown.add(at)

    def _unreport(self, rank: WorkerRank) -> None:
        at = self._ranks.get(rank)
        if at is not None:
            at.reported.withdraw()
            self._unshown.add(at)

    def forget(self, worker_id: str) -> None:
        """The worker is gone: what its engine reported counts no more, and of its ranks nothing once leases ended."""
        for at in [at for rank, at in self._ranks.items() if rank.worker_id == worker_id]:
            at.reported.withdraw()
            at.is_gone = True
            self._unshown.add(at)
            if not at.requests:
                self._drop(at)

    def mark_gone(self, rank: WorkerRank) -> None:
        """The rank's worker is not registered: nothing of the rank is kept once its leases have ended."""
        at = self._ranks.get(rank)
        if at is not None:
            at.is_gone = True

    def columns(self, ranks: tuple[WorkerRank, ...]) -> LoadColumns:
        """Return the loads in the order of `ranks`, zeroes for unknown ones; they do not change any more.

        Cheap for a tuple that was asked for before, the very same one.
        """
        while self._unshown:
            self._show(self._unshown.pop())
        return LoadColumns(*self._table.columns(ranks))

    def shared(self, chain: bytes) -> dict[WorkerRank, int]:
        """Return, per rank that works on any, how many blocks of the chain it already works on."""
        return self._chains.depths(chain)

    def load_of(self, rank: WorkerRank) -> RankLoad:
        """Return the rank's load as it is now; zeroes for an unknown one."""
        at = self._ranks.get(rank)
        if at is None:
            return RankLoad()
        running, waiting, used = at.reported.newest
        return RankLoad(
            active_requests=at.requests,
            active_blocks=self._chains.blocks(rank) + at.extra_blocks,
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
        """Return how many leases there are, what became of others, and how far promises and reports differ."""
        reporting = [at for at in self._ranks.values() if at.reported.has_reported]
        return LedgerStatistics(
            open_leases=len(self._leases),
            expired_total=self._expired,
            corrected_total=self._corrected,
            differences={at.rank: sum(at.reported.newest[:2]) - at.requests for at in reporting},
        )

    @property
    def expired_total(self) -> int:
        """How many leases nobody ended for their whole time."""
        return self._expired

    # --------------------------------------------------------------------------------------------- checkpoints

    def totals_row(self) -> LedgerTotals:
        """Return the row of a checkpoint."""
        return LedgerTotals(self._expired, self._corrected)

    def restore_totals(self, row: LedgerTotals) -> None:
        """These are as the row has them."""
        self._expired, self._corrected = row

    def rank_rows(self) -> list[LedgerRow]:
        """Return the rows of a checkpoint."""
        return [LedgerRow(rank, at.is_gone, at.reported.row()) for rank, at in self._ranks.items()]

    def restore_rank(self, row: LedgerRow) -> None:
        """The rank is as the row has it, without its leases."""
        at = self._rank(row.rank)
        at.is_gone = row.is_gone
        at.reported.restore(row.reported)
        self._unshown.add(at)

    def lease_rows(self) -> list[LeaseRow]:
        """Return the rows of a checkpoint, in the order of their expiry."""
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
        """The lease runs, at a rank that was restored before."""
        at = self._ranks[row.rank]
        routed = Routed(
            lease_id=row.lease_id,
            worker_id=row.rank.worker_id,
            dp_rank=row.rank.dp_rank,
            blocks=row.blocks,
            uncached_tokens=row.uncached_tokens,
            extra_blocks=row.extra_blocks,
        )
        path = self._chains.add(at.rank, row.blocks) if row.blocks else None
        lease = self._leases[row.lease_id] = _Lease(routed, at, path, row.origin, row.expires_at_s)
        lease.generation = row.generation
        self._count(at, lease)

    def _count(self, at: _Rank, lease: _Lease) -> None:
        at.requests += 1
        at.queued_tokens += lease.uncached_tokens
        at.extra_blocks += lease.extra_blocks
        self._unshown.add(at)

    def is_empty(self) -> bool:
        """Whether no lease runs, and nothing of those that ended is left."""
        nothing = all((at.requests, at.queued_tokens, at.extra_blocks) == (0, 0, 0) for at in self._ranks.values())
        return not self._leases and self._chains.is_empty() and nothing
