"""Columns of many ranks for a decision, reused between decisions if nothing changed.

For a repeated tuple of ranks (the same object), slots are cached, and a stream's status is looked up again only after a
fact of its rank.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kv_protocol.ids import WorkerRank

STATUS_COLUMNS_MAX = 64
"""The number of cached tuples of ranks; each model needs one."""

StreamStatus = tuple[int, int, str]
"""Epoch, seq and the reason for doubt (empty: exact)."""


class OverlapColumns(NamedTuple):
    """For n ranks in order: depths (4, n) on the tiers 0..t, and the status of each stream.

    `depths` belongs to the caller. The other columns are the same objects as before while they are equal.
    """

    depths: NDArray[np.int32]
    epochs: tuple[int, ...]
    seqs: tuple[int, ...]
    doubts: tuple[str, ...]


class StatusColumns:
    """The slots of some ranks, and the status of their streams at the last refresh."""

    __slots__ = (
        "_column_of",
        "_epochs",
        "_seqs",
        "_statuses",
        "_touched",
        "doubts",
        "epochs",
        "ranks",
        "seqs",
        "slots",
    )

    def __init__(self, ranks: tuple[WorkerRank, ...], slots: Sequence[int]) -> None:
        self.ranks = ranks
        self.slots = np.array(slots, dtype=np.intp)
        self._column_of = {rank: column for column, rank in enumerate(ranks)}
        self._statuses: list[StreamStatus] = [(0, 0, "")] * len(ranks)
        self._touched = set(self._column_of.values())
        self.epochs: tuple[int, ...] = ()
        self.seqs: tuple[int, ...] = ()
        self.doubts: tuple[str, ...] = ()

    def touch(self, rank: WorkerRank) -> None:
        """The rank's status may have changed."""
        column = self._column_of.get(rank)
        if column is not None:
            self._touched.add(column)

    def touch_all(self) -> None:
        """The status of any rank may have changed."""
        self._touched.update(self._column_of.values())

    def refresh(self, status_of: Callable[[WorkerRank], StreamStatus]) -> None:
        """Update the columns of changed ranks."""
        if not self._touched:
            return
        statuses = self._statuses
        for column in self._touched:
            statuses[column] = status_of(self.ranks[column])
        self._touched.clear()
        epochs, seqs, doubts = zip(*statuses, strict=True)
        self.seqs = seqs
        self.epochs = self.epochs if epochs == self.epochs else epochs
        self.doubts = self.doubts if doubts == self.doubts else doubts


class StatusColumnsCache:
    """The recently used status columns, by tuple of ranks."""

    def __init__(self, slot_of: Callable[[WorkerRank], int]) -> None:
        self._slot_of = slot_of
        self._known: dict[int, StatusColumns] = {}

    def __len__(self) -> int:
        return len(self._known)

    def of(self, ranks: tuple[WorkerRank, ...]) -> StatusColumns:
        """Return the columns of these ranks."""
        known = self._known.get(id(ranks))
        if known is None:  # a cached entry keeps its tuple alive, so its id is unique
            if len(self._known) == STATUS_COLUMNS_MAX:
                del self._known[next(iter(self._known))]
            known = self._known[id(ranks)] = StatusColumns(ranks, [self._slot_of(rank) for rank in ranks])
        return known

    def touch(self, rank: WorkerRank) -> None:
        """The rank's status may have changed."""
        for columns in self._known.values():
            columns.touch(rank)

    def touch_all(self) -> None:
        """The status of any rank may have changed."""
        for columns in self._known.values():
            columns.touch_all()

    def clear(self) -> None:
        """Slots have changed: drop all columns."""
        self._known.clear()
