"""All that a decision may read, as one fold over journal records, but for the index, which is a fold of its own.

apply(record)         what a decision may read changes here and nowhere else
tick(now)             lets go of what is over, and returns the records that the passing of time makes; the caller
                      applies them
view(request, ...)    one moment, frozen
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kv_protocol.fleet import FleetEvent, WorkerDraining, WorkerLeft, WorkerRegistered
from kv_protocol.hashing import Hashing
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import (
    BreakerChanged,
    Decided,
    FleetApplied,
    JournalRecord,
    LedgerApplied,
    LoadApplied,
    LogConnection,
    WorkerHeard,
)
from kv_protocol.ledger import LedgerEvent, Reconciled, Routed
from router.core.approximate import ApproximateIndex
from router.core.fleet import Fleet, Worker
from router.core.history import History
from router.core.ledger import Ledger
from router.core.predictions import Predictions
from router.core.trust import Trust, trust_of
from router.core.view import RankRow, RouteRequest, View

Depths = tuple[int, int, int, int]
Overlap = tuple[Depths, int, int, str]
"""Of one rank: overlap blocks by tier, epoch, seq, and why they may be wrong (empty: they are exact)."""


class RouterState:
    """Fleet, ledger, history, approximate index and predictions of one router."""

    def __init__(self, fleet: Fleet, ledger: Ledger, approximate: ApproximateIndex | None = None) -> None:
        self.fleet = fleet
        self.ledger = ledger
        self.approximate = approximate or ApproximateIndex()
        self._history = History()
        self._predictions = Predictions()
        self._turns: Counter[str] = Counter()

    def apply(self, record: JournalRecord) -> None:
        """Fold one record in; records that change nothing here are welcome."""
        match record:
            case FleetApplied(now_s=now_s, event=event):
                if self._ends_a_life(event):
                    self.ledger.forget(event.worker_id)
                    self._history.forget(event.worker_id)
                    self.approximate.forget(event.worker_id, now_s)
                    self._predictions.forget(event.worker_id)
                self.fleet.apply(event)
            case LoadApplied():
                self._reconcile(record)
            case LedgerApplied(now_s=now_s, event=ledger_event):
                self._remember(ledger_event, now_s)
                self.ledger.apply(ledger_event, now_s)
            case WorkerHeard(now_s=now_s, worker_id=worker_id, instance=instance):
                self.fleet.heard(worker_id, instance, now_s)
            case LogConnection(now_s=now_s, heard=heard):
                self.fleet.log_heard(heard=heard, now_s=now_s)
            case BreakerChanged(worker_id=worker_id, reason=reason, open_until_s=open_until_s):
                self.fleet.set_breaker(worker_id, reason, open_until_s)
            case Decided(decision=decision):
                self._turns[decision.model] += 1
            case _:
                pass

    def tick(self, now_s: float) -> list[JournalRecord]:
        """Return what time has brought: leases that are over. What no view shows any more is let go of."""
        self.approximate.tick(now_s)
        self._predictions.tick(now_s)
        return [LedgerApplied(now_s=now_s, event=expired) for expired in self.ledger.tick(now_s)]

    def _ends_a_life(self, event: FleetEvent) -> bool:
        known = self.fleet.worker(event.worker_id)
        if known is None or isinstance(event, WorkerDraining):
            return False
        return isinstance(event, WorkerLeft) == (known.registration.instance == event.instance)

    def _reconcile(self, record: LoadApplied) -> None:
        report, known = record.report, self.fleet.worker(record.worker_id)
        if known is None or known.registration.instance != report.instance:
            return  # nobody's, or a former life's
        if record.dp_rank not in known.registration.dp_ranks:
            return
        reconciled = Reconciled(
            worker_id=record.worker_id,
            dp_rank=record.dp_rank,
            running_requests=report.running_requests,
            waiting_requests=report.waiting_requests,
            used_blocks=report.used_blocks,
        )
        self.ledger.apply(reconciled, record.now_s)

    def _remember(self, event: LedgerEvent, now_s: float) -> None:
        if isinstance(event, Routed):
            worker = self.fleet.worker(event.worker_id)
            if worker is None:
                return  # it left between decision and promise
            told, rank = worker.registration, WorkerRank(event.worker_id, event.dp_rank)
            self._history.add(rank, event.uncached_tokens / told.block_size, now_s)
            self.approximate.routed(rank, event.blocks, now_s, told.total_kv_blocks)
        self._predictions.apply(event, now_s)

    def view(
        self,
        request: RouteRequest,
        overlap: Callable[[Sequence[int], Sequence[WorkerRank]], Sequence[Overlap]],
        now_s: float,
        *,
        predict_on_route: bool,
    ) -> View:
        """Return every rank that serves the request's model, as it stands, with predictions or without."""
        workers = self.fleet.serving(request.model)
        ranks = [rank for worker in workers for rank in worker.registration.ranks]
        hashes = request.reusable_hashes
        held = dict(zip(ranks, overlap(hashes, ranks), strict=True))
        shared = self.ledger.shared_blocks(request.sequence_hashes)
        asked = _Asked(hashes, request.hashing, held, shared, now_s, predict_on_route)
        rows = [row for worker in workers for row in self._rows(asked, worker)]
        return View(now_s=now_s, turn=self._turns[request.model], rows=tuple(rows))

    def _rows(self, asked: "_Asked", worker: Worker) -> list[RankRow]:
        unfit = self.fleet.unfit(worker, asked.now_s)
        disparities = self.fleet.disparities(worker, asked.hashing)
        return [
            self._row(asked, rank, worker.registration, unfit, trust_of(disparities, asked.held[rank][3]))
            for rank in worker.registration.ranks
        ]

    def _row(self, asked: "_Asked", rank: WorkerRank, told: WorkerRegistered, unfit: str, trust: Trust) -> RankRow:
        overlap_blocks, epoch, seq, _ = asked.held[rank]
        if trust.overlap_source == "approximate":
            (depth,) = self.approximate.overlap(asked.hashes, (rank,), asked.now_s)
            overlap_blocks = (depth, depth, depth, depth)
        load = self.ledger.load_of(rank)
        return RankRow(
            rank=rank,
            unfit=unfit,
            role=told.role,
            max_seq_len=told.max_seq_len,
            overlap_blocks=overlap_blocks,
            overlap_source=trust.overlap_source,
            predicted_blocks=self._predicted(asked, rank, epoch),
            epoch=epoch,
            seq=seq,
            trust=trust.state,
            trust_reason=trust.reason,
            prefill_tokens_queued=load.prefill_tokens_queued,
            active_requests=load.active_requests,
            active_blocks=load.active_blocks,
            shared_blocks=asked.shared.get(rank, 0),
            history_blocks=self._history.blocks(rank, asked.now_s),
        )

    def _predicted(self, asked: "_Asked", rank: WorkerRank, epoch: int) -> int:
        return self._predictions.overlap(asked.hashes, rank, epoch, asked.now_s) if asked.predict_on_route else 0


class _Asked(NamedTuple):
    """One request at one moment: the blocks to look for, and what was found of them by rank."""

    hashes: tuple[int, ...]
    hashing: Hashing
    held: dict[WorkerRank, Overlap]
    shared: dict[WorkerRank, int]
    now_s: float
    predict_on_route: bool
