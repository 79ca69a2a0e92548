"""Decaying sum of prefill work per rank: in-flight load does not show agents that send one request after another.

    history_blocks(t) = sum over requests routed to the rank of prefill_blocks * 2 ^ -((t - routed at) / HALF_LIFE_S)

All sums refer to one moment, so that one factor converts them to another. That moment advances by whole half-lives, so
that the sums halve exactly.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kv_protocol.ids import WorkerRank
from router import native
from router.fleet.rank_table import RankTable
from router.journal.checkpoint_rows import HistoryMoment, HistoryRow

HALF_LIFE_S = 30.0
_HALVINGS_MAX = 64.0
_built: Any = native.load()


class History:
    """The decaying sum of each rank. `now_s` never goes back."""

    def __init__(self) -> None:
        self._sums = RankTable("d", (0.0,))
        self._as_of_s: float | None = None

    def add(self, rank: WorkerRank, prefill_blocks: float, now_s: float) -> None:
        """A request with this many blocks to prefill was routed to the rank."""
        if self._as_of_s is None:
            self._as_of_s = now_s
        halvings = (now_s - self._as_of_s) / HALF_LIFE_S
        if halvings > _HALVINGS_MAX:
            whole_halvings = math.floor(halvings)
            self._sums.scale(math.ldexp(1.0, -whole_halvings))
            self._as_of_s += whole_halvings * HALF_LIFE_S
            halvings = (now_s - self._as_of_s) / HALF_LIFE_S
        row = self._sums.row(rank)
        self._sums.put(row, self._sums.get(row) + prefill_blocks * math.exp2(halvings))

    def columns(self, ranks: tuple[WorkerRank, ...], now_s: float) -> NDArray[np.float64]:
        """Return each rank's decayed sum, in the order of `ranks`; read-only."""
        factor = 1.0 if self._as_of_s is None else math.exp2((self._as_of_s - now_s) / HALF_LIFE_S)
        if _built is not None:
            return np.frombuffer(_built.scaled(*self._sums.rows_of(ranks), factor))
        blocks: NDArray[np.float64] = self._sums.columns(ranks)[0] * factor
        blocks.setflags(write=False)
        return blocks

    def moment_row(self) -> HistoryMoment:
        """Return the row for a checkpoint."""
        return HistoryMoment(self._as_of_s)

    def restore_moment(self, row: HistoryMoment) -> None:
        """Restore the moment of the sums that follow."""
        self._as_of_s = row.as_of_s

    def rows(self) -> list[HistoryRow]:
        """Return the rows for a checkpoint."""
        return [HistoryRow(rank, self._sums.get(self._sums.row(rank))) for rank in self._sums]

    def restore(self, row: HistoryRow) -> None:
        """Restore the rank's sum from the row."""
        self._sums.put(self._sums.row(row.rank), row.blocks)

    def forget(self, worker_id: str) -> None:
        """Drop a worker that left."""
        for rank in [rank for rank in self._sums if rank.worker_id == worker_id]:
            self._sums.remove(rank)
