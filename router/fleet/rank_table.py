"""A few numbers of every rank, as columns: written rank by rank, read for many ranks at once.

Written through a Python array, because writing an item costs a third of numpy's time, and read through numpy, on the
same memory. The row of unknown ranks never changes.
"""

from array import array
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kv_protocol.ids import WorkerRank
from router.fleet.rank_rows import RankRows

_ROWS_FIRST = 64


class RankTable:
    """The numbers of each rank, int64 ("q") or float64 ("d"), initially `at_first`.

    They are taken as they come, as objects: a declared `float` would make floats of integers, which "q" refuses.
    """

    def __init__(self, typecode: Literal["q", "d"], at_first: tuple[object, ...]) -> None:
        self._at_first = at_first
        self._width = len(at_first)
        self._rows = RankRows()
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

    def __iter__(self) -> Iterator[WorkerRank]:
        return iter(self._rows)

    def row(self, rank: WorkerRank) -> int:
        """Return the rank's row, which it keeps until it is removed."""
        row = self._rows.find(rank)
        if not row:
            row = self._rows.add(rank)
            if row >= self._capacity:
                self._grow(2 * self._capacity)
            self.put(row, *self._at_first)
        return row

    def remove(self, rank: WorkerRank) -> None:
        """Free the rank's row."""
        self._rows.remove(rank)

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

    def rows_of(self, ranks: tuple[WorkerRank, ...]) -> "tuple[array[Any], int, bytes]":
        """Return all numbers, column by column, how many rows a column has, and the packed rows of `ranks`.

        For the extension, which reads them at once: the numbers may be elsewhere after the next change.
        """
        return self._items, self._capacity, self._rows.placed(ranks).packed

    def columns(self, ranks: tuple[WorkerRank, ...]) -> NDArray[Any]:
        """Return a copy of the numbers, (`width`, n) and read-only, in the order of `ranks`.

        The rows of one tuple are looked up once, if it is the very same one.
        """
        columns = self._columns.take(self._rows.placed(ranks).rows, axis=1)
        columns.setflags(write=False)
        return columns
