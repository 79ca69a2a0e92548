"""A row number for every rank: tables of ranks have their numbers in rows. Row 0 belongs to unknown ranks."""

from array import array
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kv_protocol.ids import WorkerRank

_PLACED_MAX = 64


class Placed(NamedTuple):
    """The rows of some ranks, in their order, as an array and as its bytes."""

    ranks: tuple[WorkerRank, ...]
    packed: bytes
    rows: NDArray[np.int64]


class RankRows:
    """The rows of all known ranks. Rows of removed ranks are given out again, so they stay dense."""

    def __init__(self) -> None:
        self._rows: dict[WorkerRank, int] = {}
        self._free: list[int] = []
        self._placed: dict[int, Placed] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[WorkerRank]:
        return iter(self._rows)

    def find(self, rank: WorkerRank) -> int:
        """Return the rank's row; 0: it has none."""
        return self._rows.get(rank, 0)

    def add(self, rank: WorkerRank) -> int:
        """Return a row for a rank that has none; it keeps the row until it is removed."""
        row = self._rows[rank] = self._free.pop() if self._free else len(self._rows) + 1
        self._placed.clear()
        return row

    def remove(self, rank: WorkerRank) -> None:
        """Free the rank's row."""
        self._free.append(self._rows.pop(rank))
        self._placed.clear()

    def placed(self, ranks: tuple[WorkerRank, ...]) -> Placed:
        """Return the rows of `ranks`; looked up once for one tuple, if it is the very same one."""
        placed = self._placed.get(id(ranks))
        if placed is None or placed.ranks is not ranks:
            if len(self._placed) == _PLACED_MAX:
                self._placed.clear()
            packed = array("q", [self._rows.get(rank, 0) for rank in ranks]).tobytes()
            placed = self._placed[id(ranks)] = Placed(ranks, packed, np.frombuffer(packed, dtype=np.int64))
        return placed
