"""A few numbers of every rank, as columns: written rank by rank, read for many ranks at once.

Written through a Python array, because writing an item costs a third of numpy's time, and read through numpy, on the
same memory. Row 0 belongs to unknown ranks, and never changes.
"""

from array import array
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kv_protocol.ids import WorkerRank

_ROWS_FIRST = 64
_PLACED_MAX = 64


class RankTable:
    """The numbers of each rank, int64 ("q") or float64 ("d"), initially `at_first`.

    They are taken as they come, as objects: a declared `float` would make floats of integers, which "q" refuses.
    """

    def __init__(self, typecode: Literal["q", "d"], at_first: tuple[object, ...]) -> None:
        self._at_first = at_first
        self._width = len(at_first)
        self._rows: dict[WorkerRank, int] = {}
        self._free: list[int] = []
        self._placed: dict[int, tuple[tuple[WorkerRank, ...], NDArray[np.intp]]] = {}
        self._capacity = 0
        self._items: array[Any] = array(typecode)
        self._grow(_ROWS_FIRST)
        self.put(0, *at_first)

    def _grow(self, capacity: int) -> None:
        known, items = self._capacity, array(self._items.typecode, bytes(8 * self._width * capacity))
        for number in range(self._width):
            items[number * capacity : number * capacity + known] = self._items[number * known : (number + 1) * known]
        self._items, self._capacity = items, capacity
        self._columns = np.frombuffer(items, dtype=items.typecode).reshape(self._width, capacity)
        self._free.extend(range(capacity - 1, max(known, 1) - 1, -1))

    def __iter__(self) -> Iterator[WorkerRank]:
        return iter(self._rows)

    def row(self, rank: WorkerRank) -> int:
        """Return the rank's row, which it keeps until it is removed."""
        row = self._rows.get(rank)
        if row is None:
            if not self._free:
                self._grow(2 * self._capacity)
            row = self._rows[rank] = self._free.pop()
            self.put(row, *self._at_first)
            self._placed.clear()
        return row

    def remove(self, rank: WorkerRank) -> None:
        """Free the rank's row."""
        self._free.append(self._rows.pop(rank))
        self._placed.clear()

    def put(self, row: int, *numbers: object) -> None:
        """Set the numbers of the row."""
        items, capacity = self._items, self._capacity
        for number in numbers:
            items[row] = number
            row += capacity

    def get(self, row: int) -> float:
        """Return the row's first number."""
        return float(self._items[row])

    def scale(self, factor: float) -> None:
        """Multiply every number of every rank by `factor`."""
        self._columns *= factor

    def columns(self, ranks: tuple[WorkerRank, ...]) -> NDArray[Any]:
        """Return a copy of the numbers, (`width`, n) and read-only, in the order of `ranks`.

        The rows of one tuple are looked up once, if it is the very same one.
        """
        placed = self._placed.get(id(ranks))
        if placed is None or placed[0] is not ranks:
            if len(self._placed) == _PLACED_MAX:
                self._placed.clear()
            placed = ranks, np.array([self._rows.get(rank, 0) for rank in ranks], dtype=np.intp)
            self._placed[id(ranks)] = placed
        columns = self._columns.take(placed[1], axis=1)
        columns.setflags(write=False)
        return columns
