"""Blocks that ranks are about to hold, from requests in flight: siblings of a burst go to the same rank.

    routed                  the request's blocks count as held by its rank
    first token             they count for `SEEN_S` more: by then the rank's events have reported them, or never will
    the lease ends          they count no more
    another epoch           of the rank's stream, in which a request was routed since: the blocks of the former epoch
                            went into a cache that does not exist any more
    worker forgotten        they count no more

No prediction outlives its request: between consecutive requests only the index says what is held.
"""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from kv_protocol.ids import WorkerRank
from kv_protocol.ledger import Cancelled, Expired, Finished, FirstToken, LedgerEvent, Routed
from router.fleet.load_table import LoadTable, new_load_table
from router.fleet.rank_rows import RankRows
from router.journal.checkpoint_rows import LifeRow, PredictionRow, SeenRow

SEEN_S = 2.0
_IDLE_ROWS = 64


class _Life:
    """One epoch of a rank's stream; `row` is the rank's row while no request is routed there in a later one."""

    __slots__ = ("epoch", "rank", "row")

    def __init__(self, rank: WorkerRank, epoch: int, row: int) -> None:
        self.rank = rank
        self.epoch = epoch
        self.row = row


class _Prediction:
    """`end` is that of its chain in the table; 0: it has no blocks, or they count no more."""

    __slots__ = ("blocks", "end", "is_seen", "life")

    def __init__(self, life: _Life, end: int, blocks: bytes) -> None:
        self.life = life
        self.end = end
        self.blocks = blocks
        self.is_seen = False


class Predictions:
    """The predictions of all requests in flight, by their leases. Unknown leases and second endings change nothing.

    `now_s` never decreases.
    """

    def __init__(self) -> None:
        self._predictions: dict[str, _Prediction] = {}
        self._rows = RankRows()  # of the ranks with a current epoch, and of some that had one
        self._rows_max = _IDLE_ROWS
        self._table: LoadTable = new_load_table()
        self._current_epoch: dict[WorkerRank, _Life] = {}  # the epoch of the last request
        self._seen: deque[tuple[float, str, _Prediction]] = deque()  # in the order of their expiry
        self._restored = list[_Life]()

    def apply(self, event: LedgerEvent, now_s: float) -> None:
        """Fold one event in. Events without predictions are ignored."""
        match event:
            case Routed():
                self.tick(now_s)
                self._add(event)
            case _ if not self._predictions:
                pass
            case FirstToken(lease_id=lease_id):
                self._see(lease_id, now_s)
            case Finished(lease_id=lease_id) | Cancelled(lease_id=lease_id) | Expired(lease_id=lease_id):
                self.end(lease_id)
            case _:
                pass

    def _add(self, routed: Routed) -> None:
        if routed.lease_id in self._predictions:
            return
        rank = WorkerRank(routed.worker_id, routed.dp_rank)
        life = self._current_epoch.get(rank)
        if life is None or life.epoch != routed.epoch:
            life = self._begin(rank, routed.epoch)
        end = self._table.add(life.row, routed.blocks) if routed.blocks else 0
        self._predictions[routed.lease_id] = _Prediction(life, end, routed.blocks)

    def _begin(self, rank: WorkerRank, epoch: int) -> _Life:
        """Begin an epoch of the rank: blocks of the former one are taken out of the table."""
        row, former = self._rows.find(rank) or self._new_row(rank), self._current_epoch.get(rank)
        if former is not None:
            for prediction in self._predictions.values():
                if prediction.life is former and prediction.end:
                    self._table.remove(prediction.end)
                    prediction.end = 0
        self._table.set_epoch(row, epoch)
        life = self._current_epoch[rank] = _Life(rank, epoch, row)
        return life

    def _new_row(self, rank: WorkerRank) -> int:
        """Return a row for the rank; drop those without a current epoch if there are too many."""
        if len(self._rows) >= self._rows_max:
            for idle in [each for each in self._rows if each not in self._current_epoch]:
                self._rows.remove(idle)
            self._rows_max = 2 * len(self._rows) + _IDLE_ROWS
        return self._rows.add(rank)

    def _see(self, lease_id: str, now_s: float) -> None:
        prediction = self._predictions.get(lease_id)
        if prediction is not None and not prediction.is_seen:
            prediction.is_seen = True
            self._seen.append((now_s + SEEN_S, lease_id, prediction))

    def end(self, lease_id: str) -> None:
        """The lease is over, in whatever way."""
        prediction = self._predictions.pop(lease_id, None)
        if prediction is not None:
            life = prediction.life
            if prediction.end:
                self._table.remove(prediction.end)
            if self._current_epoch.get(life.rank) is life and not self._table.blocks(life.row):
                del self._current_epoch[life.rank]

    def forget(self, worker_id: str) -> None:
        """Drop the predictions of a worker that left or restarted."""
        of_worker = [
            lease_id
            for lease_id, prediction in self._predictions.items()
            if prediction.life.rank.worker_id == worker_id
        ]
        for lease_id in of_worker:
            self.end(lease_id)

    def tick(self, now_s: float) -> None:
        """Drop expired predictions; answers do not change by that."""
        while self._seen and self._seen[0][0] <= now_s:
            _, lease_id, prediction = self._seen.popleft()
            if self._predictions.get(lease_id) is prediction:
                self.end(lease_id)

    def is_empty(self) -> bool:
        """Whether no prediction is left, except for the times of first tokens."""
        return not self._predictions and not self._current_epoch and self._table.is_empty()

    # --------------------------------------------------------------------------------------------- checkpoints

    def _epoch_numbers(self) -> dict[_Life, int]:
        """Return every epoch in use, with its number."""
        epochs = [*self._current_epoch.values(), *(each.life for each in self._predictions.values())]
        return {life: at for at, life in enumerate(dict.fromkeys(epochs))}

    def life_rows(self) -> list[LifeRow]:
        """Return the rows for a checkpoint."""
        current = self._current_epoch
        return [LifeRow(life.rank, life.epoch, current.get(life.rank) is life) for life in self._epoch_numbers()]

    def restore_life(self, row: LifeRow) -> None:
        """Restore an epoch."""
        life = self._begin(row.rank, row.epoch) if row.is_current else _Life(row.rank, row.epoch, 0)
        self._restored.append(life)

    def rows(self) -> list[PredictionRow]:
        """Return the rows for a checkpoint."""
        numbers = self._epoch_numbers()
        return [
            PredictionRow(lease_id, numbers[each.life], each.blocks, each.is_seen)
            for lease_id, each in self._predictions.items()
        ]

    def restore(self, row: PredictionRow) -> None:
        """Restore a prediction in an epoch that was restored before."""
        life = self._restored[row.life]
        end = self._table.add(life.row, row.blocks) if life.row and row.blocks else 0
        prediction = self._predictions[row.lease_id] = _Prediction(life, end, row.blocks)
        prediction.is_seen = row.is_seen

    def seen_rows(self) -> list[SeenRow]:
        """Return the rows for a checkpoint."""
        known = self._predictions
        return [SeenRow(over_at_s, lease_id) for over_at_s, lease_id, each in self._seen if known.get(lease_id) is each]

    def restore_seen(self, row: SeenRow) -> None:
        """Restore the expiry of a prediction that was restored before."""
        self._seen.append((row.over_at_s, row.lease_id, self._predictions[row.lease_id]))

    def column(
        self, chain: bytes, ranks: tuple[WorkerRank, ...], epochs: tuple[int, ...], now_s: float
    ) -> NDArray[np.int64] | None:
        """Return how many leading blocks of `chain` are expected at each rank, if its epoch is that in `epochs`.

        Read-only; None: at no rank any. Cheap if the same tuple of ranks was passed before.
        """
        self.tick(now_s)
        if not self._predictions:
            return None
        packed = self._table.expected(self._rows.placed(ranks).packed, chain, epochs)
        return None if packed is None else np.frombuffer(packed, dtype=np.int64)
