"""What a decision reads of many ranks, as columns, reused between decisions where nothing changed.

Of ranks that are asked for again and again (`ranks`, the very same tuple), where each sits in the index is known, and
where its stream stands is looked up again only once something was told of it.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kv_protocol.ids import WorkerRank

STATUS_COLUMNS_MAX = 64
"""So many tuples of ranks are known at once; one a model is asked for."""

StreamStatus = tuple[int, int, str]
"""Epoch, seq and why it may be wrong (empty: it is exact)."""


class OverlapColumns(NamedTuple):
    """Of n ranks in their order: depths (4, n) on the tiers 0..t, and where each one's stream stands.

    `depths` is the receiver's own. Columns are the same objects as before while they say the same.
    """

    depths: NDArray[np.int32]
    epochs: tuple[int, ...]
    seqs: tuple[int, ...]
    doubts: tuple[str, ...]


class StatusColumns:
    """Where some ranks sit in the index, and where their streams stood when it was last looked."""

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
        """Something was told of the rank."""
        column = self._column_of.get(rank)
        if column is not None:
            self._touched.add(column)

    def touch_all(self) -> None:
        """Something was told that may concern anybody."""
        self._touched.update(self._column_of.values())

    def refresh(self, status_of: Callable[[WorkerRank], StreamStatus]) -> None:
        """The columns say where streams stand now."""
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
    """Those that were asked for of late."""

    def __init__(self, slot_of: Callable[[WorkerRank], int]) -> None:
        self._slot_of = slot_of
        self._known: dict[int, StatusColumns] = {}

    def of(self, ranks: tuple[WorkerRank, ...]) -> StatusColumns:
        """Return the seating of these ranks."""
        known = self._known.get(id(ranks))
        if known is None:  # while it is known it keeps its tuple, so that no other one has that id
            if len(self._known) == STATUS_COLUMNS_MAX:
                del self._known[next(iter(self._known))]
            known = self._known[id(ranks)] = StatusColumns(ranks, [self._slot_of(rank) for rank in ranks])
        return known

    def touch(self, rank: WorkerRank) -> None:
        """Something was told of the rank."""
        for columns in self._known.values():
            columns.touch(rank)

    def touch_all(self) -> None:
        """Something was told that may concern anybody."""
        for columns in self._known.values():
            columns.touch_all()

    def clear(self) -> None:
        """Somebody sits elsewhere now."""
        self._known.clear()
