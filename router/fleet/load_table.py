"""The load of ranks as rows of one table: chains of their requests, and numbers beside them.

    row        of a rank (`rank_rows.py`), from 1 on; row 0, and a row that nothing was put in, has zeroes
    chains     each block is counted once per row, however many of its chains have it (`router/prompt/chains.py`)
    columns    one call answers for many ranks, as packed int64s

`new_load_table` returns the table in C++ (`router/native/`) where it was built; `PythonLoadTable` otherwise. The latter
is the reference: the same calls have the same answers.
"""

from typing import Any, Protocol

import numpy as np

from router import native
from router.prompt.chains import ChainCounts, Path, whole

ROW_MAX = 1 << 20
_COLUMNS = 3
_ROWS_FIRST = 64


class LoadTable(Protocol):
    """Rows of chains and numbers. `ValueError`: a row is not in 1..`ROW_MAX`, or bytes are no whole numbers."""

    def add(self, row: int, chain: bytes) -> int:
        """Add a chain to the row; return its end, a positive number."""

    def remove(self, end: int) -> None:
        """Remove the chain that `add` returned `end` for, once for each `add`; `KeyError` if there is none."""

    def blocks(self, row: int) -> int:
        """Return how many distinct blocks the row's chains have."""

    def put(self, row: int, queued_tokens: int, requests: int, extra_blocks: int) -> None:
        """Set the numbers of the row."""

    def set_epoch(self, row: int, epoch: int) -> None:
        """Set the epoch (u64) in which the row's chains count for `expected`; 0 at first."""

    def columns(self, rows: bytes, chain: bytes) -> bytes:
        """Return four columns of the packed `rows`, one after another.

        They are queued tokens, requests, distinct blocks with the extra ones, and leading blocks of `chain` that the
        row's chains have.
        """

    def expected(self, rows: bytes, chain: bytes, epochs: tuple[int, ...]) -> bytes | None:
        """Return how many leading blocks of `chain` the chains of `rows` have, 0 if a row's epoch is not `epochs[i]`.

        None: 0 in every row.
        """

    def node_count(self) -> int:
        """Return how many stretches the chains have: at most two per chain."""

    def is_empty(self) -> bool:
        """Whether it has no chain, and no remains of former ones. Numbers do not count."""


class PythonLoadTable:
    """A `LoadTable` in Python."""

    def __init__(self) -> None:
        self._chains: ChainCounts[int] = ChainCounts()
        self._paths: dict[int, Path[int]] = {}
        self._numbers = np.zeros((_COLUMNS, _ROWS_FIRST), dtype=np.int64)
        self._epochs: dict[int, int] = {}
        self._added = 0

    def add(self, row: int, chain: bytes) -> int:
        """Add a chain to the row."""
        path = self._chains.add(_checked(row), whole("chain", chain))
        self._added += 1
        self._paths[self._added] = path
        return self._added

    def remove(self, end: int) -> None:
        """Remove a chain."""
        self._chains.remove(self._paths.pop(end))

    def blocks(self, row: int) -> int:
        """Return the distinct blocks of the row."""
        return self._chains.blocks(_checked(row))

    def put(self, row: int, queued_tokens: int, requests: int, extra_blocks: int) -> None:
        """Set the numbers of the row."""
        while _checked(row) >= self._numbers.shape[1]:
            self._numbers = np.concatenate((self._numbers, np.zeros_like(self._numbers)), axis=1)
        self._numbers[:, row] = (queued_tokens, requests, extra_blocks)

    def set_epoch(self, row: int, epoch: int) -> None:
        """Set the epoch of the row."""
        self._epochs[_checked(row)] = epoch

    def columns(self, rows: bytes, chain: bytes) -> bytes:
        """Return the four columns."""
        depths, numbers = self._chains.depths(whole("chain", chain)), list[list[int]]()
        known = self._numbers.shape[1]
        for row in np.frombuffer(whole("rows", rows), dtype=np.int64).tolist():
            queued, requests, extra = self._numbers[:, row].tolist() if 0 <= row < known else (0, 0, 0)
            numbers.append([queued, requests, extra + self._chains.blocks(row), depths.get(row, 0)])
        return np.array(numbers, dtype=np.int64).T.tobytes()

    def expected(self, rows: bytes, chain: bytes, epochs: tuple[int, ...]) -> bytes | None:
        """Return the expected blocks."""
        asked = np.frombuffer(whole("rows", rows), dtype=np.int64).tolist()
        if len(epochs) != len(asked):
            raise ValueError(f"epochs: found {len(epochs)}, allowed as many as rows")
        depths = self._chains.depths(whole("chain", chain))
        found = [
            depths.get(row, 0) if self._epochs.get(row, 0) == epoch else 0
            for row, epoch in zip(asked, epochs, strict=True)
        ]
        return np.array(found, dtype=np.int64).tobytes() if any(found) else None

    def node_count(self) -> int:
        """Return the stretches."""
        return self._chains.node_count()

    def is_empty(self) -> bool:
        """Whether it has no chain."""
        return self._chains.is_empty()


def _checked(row: int) -> int:
    if not 1 <= row <= ROW_MAX:
        raise ValueError(f"row: found {row}, allowed 1..{ROW_MAX}")
    return row


def new_load_table() -> LoadTable:
    """Return an empty table: in C++ where it was built."""
    built: Any = native.load()
    table: LoadTable = PythonLoadTable() if built is None else built.LoadTable()
    return table
