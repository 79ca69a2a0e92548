"""All that a decision may read, as one fold over journal records, but for the index, which is a fold of its own.

apply(record)         state changes here and nowhere else
tick(now)             returns the records that the passing of time makes; the caller applies them
view(request, ...)    one moment, frozen
"""

from collections import Counter
from collections.abc import Callable, Sequence

from kv_protocol.decision import TrustState
from kv_protocol.fleet import FleetEvent, WorkerDraining, WorkerLeft
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
from kv_protocol.ledger import Reconciled, Routed
from router.core.fleet import Fleet, Worker
from router.core.history import History
from router.core.ledger import Ledger
from router.core.view import RankRow, RouteRequest, View

Depths = tuple[int, int, int, int]
Overlap = tuple[Depths, int, int, str]
"""Of one rank: overlap blocks by tier, epoch, seq, and why they may be wrong (empty: they are exact)."""

_NOTHING_KNOWN = {"never_heard": "no KV events heard", "refused": "no room in the index"}
"""Why nothing is known of a rank, in the words of an explanation."""


class RouterState:
    """Fleet, ledger and history of one router."""

    def __init__(self, fleet: Fleet, ledger: Ledger) -> None:
        self.fleet = fleet
        self.ledger = ledger
        self._history = History()
        self._turns: Counter[str] = Counter()

    def apply(self, record: JournalRecord) -> None:
        """Fold one record in; records that change nothing here are welcome."""
        match record:
            case FleetApplied(event=event):
                if self._ends_a_life(event):
                    self.ledger.forget(event.worker_id)
                    self._history.forget(event.worker_id)
                self.fleet.apply(event)
            case LoadApplied():
                self._reconcile(record)
            case LedgerApplied(now_s=now_s, event=ledger_event):
                if isinstance(ledger_event, Routed):
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
        """Return what time has brought: leases that are over."""
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

    def _remember(self, routed: Routed, now_s: float) -> None:
        worker = self.fleet.worker(routed.worker_id)
        if worker is not None:
            blocks = routed.uncached_tokens / worker.registration.block_size
            self._history.add(WorkerRank(routed.worker_id, routed.dp_rank), blocks, now_s)

    def view(
        self,
        request: RouteRequest,
        overlap: Callable[[Sequence[int], Sequence[WorkerRank]], Sequence[Overlap]],
        now_s: float,
    ) -> View:
        """Return every rank that serves the request's model, as it stands."""
        workers = [worker for worker in self.fleet.serving(request.model) for _ in worker.registration.dp_ranks]
        ranks = [rank for worker in self.fleet.serving(request.model) for rank in worker.registration.ranks]
        shared = self.ledger.shared_blocks(request.sequence_hashes)
        rows = [
            self._row(request, worker, rank, held, shared.get(rank, 0), now_s)
            for worker, rank, held in zip(workers, ranks, overlap(request.reusable_hashes, ranks), strict=True)
        ]
        return View(now_s=now_s, turn=self._turns[request.model], rows=tuple(rows))

    def _row(
        self, request: RouteRequest, worker: Worker, rank: WorkerRank, held: Overlap, shared: int, now_s: float
    ) -> RankRow:
        overlap_blocks, epoch, seq, stale = held
        disparity = self.fleet.disparity(worker, request.hashing)
        trust, reason = _trust(disparity, stale)
        load = self.ledger.load_of(rank)
        return RankRow(
            rank=rank,
            unfit=self.fleet.unfit(worker, now_s),
            role=worker.registration.role,
            max_seq_len=worker.registration.max_seq_len,
            overlap_blocks=(0, 0, 0, 0) if disparity else overlap_blocks,
            epoch=epoch,
            seq=seq,
            trust=trust,
            trust_reason=reason,
            prefill_tokens_queued=load.prefill_tokens_queued,
            active_requests=load.active_requests,
            active_blocks=load.active_blocks,
            shared_blocks=shared,
            history_blocks=self._history.blocks(rank, now_s),
        )


def _trust(disparity: str, stale: str) -> tuple[TrustState, str]:
    if disparity:
        return "FALLBACK", disparity
    if stale in _NOTHING_KNOWN:
        return "FALLBACK", _NOTHING_KNOWN[stale]
    return ("DEGRADED", stale) if stale else ("EXACT", "")
