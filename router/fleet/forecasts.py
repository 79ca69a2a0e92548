"""Predicts TTFT and ITL of a request at each rank, and learns from measured latencies (`ttft_model.py`).

    decided           the features of the winner are kept until the outcome is known
    outcome known     ok: TTFT and ITL are learnt with these features, each if it was measured
                      (`router/request/latency.py`); any other outcome: nothing is learnt
    worker forgotten  all that was learnt of it is dropped

Only decisions of modes that read forecasts are learnt from: those of other modes lack features.
"""

from collections.abc import Iterable
from itertools import starmap

from kv_protocol.journal import OutcomeKnown
from router.decision.verdict import Verdict
from router.decision.view import Forecast, RouteRequest, View
from router.fleet.ttft_model import ItlModel, TtftModel
from router.journal.checkpoint_rows import Features, ForecastTotals, PendingRow

PENDING_MAX = 65_536
"""Largest number of decisions without an outcome; beyond it the oldest is dropped, and not learnt from."""


class Forecasts:
    """The latency models of all ranks."""

    def __init__(self) -> None:
        self.ttft = TtftModel()
        self.itl = ItlModel()
        self._pending: dict[str, Features] = {}

    def forecast(self, view: View, request: RouteRequest) -> Forecast:
        """Return the predicted latency of the request at each rank of the view."""
        held_tokens = view.expected * request.block_size
        uncached = request.isl_tokens - held_tokens
        running, blocks = view.active_requests, view.active_blocks
        return Forecast(
            self.ttft.predict_columns(view.ranks, (uncached, view.queued_tokens, running)),
            self.itl.predict_columns(view.ranks, (running, blocks)),
        )

    def decided(self, verdict: Verdict) -> None:
        """Keep the features of a decision that is carried out."""
        view, request = verdict.view, verdict.request
        place = verdict.rank_indices[verdict.winner_at]
        if len(self._pending) >= PENDING_MAX:
            del self._pending[next(iter(self._pending))]
        self._pending[request.decision_id] = Features(
            verdict.winner,
            float(request.isl_tokens - verdict.expected_blocks * request.block_size),
            float(view.queued_tokens[place]),
            float(view.active_requests[place]),
            float(view.active_blocks[place]),
        )

    def ended(self, outcome: OutcomeKnown) -> None:
        """Learn from the outcome of a decision."""
        known = self._pending.pop(outcome.decision_id, None)
        if known is None or outcome.outcome != "ok":
            return
        ttft_s, itl_s = outcome.ttft_s, outcome.mean_itl_s
        if ttft_s is not None:
            self.ttft.learn(known.rank, (known.uncached_tokens, known.queued_tokens, known.running_requests), ttft_s)
        if itl_s is not None:
            self.itl.learn(known.rank, (known.running_requests, known.active_blocks), itl_s)

    # --------------------------------------------------------------------------------------------- checkpoints

    def totals_row(self) -> ForecastTotals:
        """Return the row for a checkpoint."""
        return ForecastTotals(self.ttft.refused_total, self.itl.refused_total)

    def restore_totals(self, row: ForecastTotals) -> None:
        """Restore the totals from the row."""
        self.ttft.refused_total, self.itl.refused_total = row

    def rows(self) -> Iterable[PendingRow]:
        """Return the rows for a checkpoint, made when they are read."""
        return starmap(PendingRow, self._pending.copy().items())

    def restore(self, row: PendingRow) -> None:
        """Restore a decision without an outcome."""
        self._pending[row.decision_id] = row.features

    def forget(self, worker_id: str) -> None:
        """Drop a worker that left or restarted."""
        self.ttft.forget(worker_id)
        self.itl.forget(worker_id)
        for decision_id in [each for each, known in self._pending.items() if known.rank.worker_id == worker_id]:
            del self._pending[decision_id]
