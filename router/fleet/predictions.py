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

from kv_protocol.ids import WorkerRank
from kv_protocol.ledger import Cancelled, Expired, Finished, FirstToken, LedgerEvent, Routed
from router.journal.checkpoint_rows import LifeRow, PredictionRow, SeenRow
from router.prompt.chains import ChainCounts, Path

SEEN_S = 2.0


class _Life:
    """One epoch of a rank's stream, while no request is routed there in a later one."""

    __slots__ = ("epoch", "rank")

    def __init__(self, rank: WorkerRank, epoch: int) -> None:
        self.rank = rank
        self.epoch = epoch


class _Prediction:
    __slots__ = ("blocks", "is_seen", "path")

    def __init__(self, path: Path[_Life], blocks: bytes) -> None:
        self.path = path
        self.blocks = blocks
        self.is_seen = False


class Predictions:
    """The predictions of all requests in flight, by their leases. Unknown leases and second endings change nothing.

    `now_s` never decreases.
    """

    def __init__(self) -> None:
        self._predictions: dict[str, _Prediction] = {}
        self._chains: ChainCounts[_Life] = ChainCounts()
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
                self._end(lease_id)
            case _:
                pass

    def _add(self, routed: Routed) -> None:
        if routed.lease_id in self._predictions:
            return
        rank = WorkerRank(routed.worker_id, routed.dp_rank)
        life = self._current_epoch.get(rank)
        if life is None or life.epoch != routed.epoch:
            life = self._current_epoch[rank] = _Life(rank, routed.epoch)
        self._predictions[routed.lease_id] = _Prediction(self._chains.add(life, routed.blocks), routed.blocks)

    def _see(self, lease_id: str, now_s: float) -> None:
        prediction = self._predictions.get(lease_id)
        if prediction is not None and not prediction.is_seen:
            prediction.is_seen = True
            self._seen.append((now_s + SEEN_S, lease_id, prediction))

    def _end(self, lease_id: str) -> None:
        prediction = self._predictions.pop(lease_id, None)
        if prediction is not None:
            self._chains.remove(prediction.path)
            life = prediction.path.key
            if not self._chains.blocks(life) and self._current_epoch.get(life.rank) is life:
                del self._current_epoch[life.rank]

    def forget(self, worker_id: str) -> None:
        """Drop the predictions of a worker that left or restarted."""
        of_worker = [
            lease_id
            for lease_id, prediction in self._predictions.items()
            if prediction.path.key.rank.worker_id == worker_id
        ]
        for lease_id in of_worker:
            self._end(lease_id)

    def tick(self, now_s: float) -> None:
        """Drop expired predictions; answers do not change by that."""
        while self._seen and self._seen[0][0] <= now_s:
            _, lease_id, prediction = self._seen.popleft()
            if self._predictions.get(lease_id) is prediction:
                self._end(lease_id)

    def is_empty(self) -> bool:
        """Whether no prediction is left, except for the times of first tokens."""
        return not self._predictions and not self._current_epoch and self._chains.is_empty()

    # --------------------------------------------------------------------------------------------- checkpoints

    def _epoch_numbers(self) -> dict[_Life, int]:
        """Return every epoch in use, with its number."""
        epochs = [*self._current_epoch.values(), *(each.path.key for each in self._predictions.values())]
        return {life: at for at, life in enumerate(dict.fromkeys(epochs))}

    def life_rows(self) -> list[LifeRow]:
        """Return the rows for a checkpoint."""
        current = self._current_epoch
        return [LifeRow(life.rank, life.epoch, current.get(life.rank) is life) for life in self._epoch_numbers()]

    def restore_life(self, row: LifeRow) -> None:
        """Restore an epoch."""
        life = _Life(row.rank, row.epoch)
        self._restored.append(life)
        if row.is_current:
            self._current_epoch[row.rank] = life

    def rows(self) -> list[PredictionRow]:
        """Return the rows for a checkpoint."""
        numbers = self._epoch_numbers()
        return [
            PredictionRow(lease_id, numbers[each.path.key], each.blocks, each.is_seen)
            for lease_id, each in self._predictions.items()
        ]

    def restore(self, row: PredictionRow) -> None:
        """Restore a prediction in an epoch that was restored before."""
        path = self._chains.add(self._restored[row.life], row.blocks)
        prediction = self._predictions[row.lease_id] = _Prediction(path, row.blocks)
        prediction.is_seen = row.is_seen

    def seen_rows(self) -> list[SeenRow]:
        """Return the rows for a checkpoint."""
        known = self._predictions
        return [SeenRow(over_at_s, lease_id) for over_at_s, lease_id, each in self._seen if known.get(lease_id) is each]

    def restore_seen(self, row: SeenRow) -> None:
        """Restore the expiry of a prediction that was restored before."""
        self._seen.append((row.over_at_s, row.lease_id, self._predictions[row.lease_id]))

    def depths(self, chain: bytes, now_s: float) -> dict[WorkerRank, tuple[int, int]]:
        """Return for each rank with expected blocks its epoch, and how many leading blocks of `chain` are expected."""
        self.tick(now_s)
        current = self._current_epoch
        return {
            life.rank: (life.epoch, blocks)
            for life, blocks in self._chains.depths(chain).items()
            if current.get(life.rank) is life
        }
