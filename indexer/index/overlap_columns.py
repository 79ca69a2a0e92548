"""Columns of many ranks for a decision, reused between decisions if nothing changed.

For a repeated tuple of ranks (the same object), slots are looked up once, and a stream's status again only after
something happened that may have changed it.
"""

from array import array
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kv_protocol.ids import WorkerRank

STATUS_COLUMNS_MAX = 64
"""The number of cached tuples of ranks; each model needs one."""
_TIERS = 4

StreamStatus = tuple[int, int, str]
"""Epoch, seq and the reason for doubt (empty: exact)."""


class OverlapColumns(NamedTuple):
    """For n ranks in order: `depths` (4, n), whose row t counts blocks on the tiers 0..t, and the streams' status.

    The next question about the same tuple of ranks overwrites `depths`. `epochs` and `doubts` stay the same objects
    while their values stay the same.
    """

    depths: NDArray[np.int32]
    epochs: tuple[int, ...]
    seqs: tuple[int, ...]
    doubts: tuple[str, ...]


class StatusColumns:
    """Some ranks, their slots, and the newest answer about them."""

    __slots__ = ("_column_of", "_statuses", "answer", "depths", "ranks", "slots", "touched")

    def __init__(self, ranks: tuple[WorkerRank, ...], slots: list[int]) -> None:
        self.ranks = ranks
        self.slots = array("I", slots).tobytes()
        self.depths = array("i", bytes(4 * _TIERS * len(ranks)))
        """The answer's depths, as the index writes them."""
        self._column_of = {rank: column for column, rank in enumerate(ranks)}
        self._statuses: list[StreamStatus] = [(0, 0, "")] * len(ranks)
        self.touched = set(self._column_of.values())
        """Columns to be read again before the next answer."""
        self.answer = OverlapColumns(np.frombuffer(self.depths, np.int32).reshape(_TIERS, -1), (), (), ())

    def touch(self, rank: WorkerRank) -> None:
        """Let the rank's status be looked up again, as it may have changed."""
        column = self._column_of.get(rank)
        if column is not None:
            self.touched.add(column)

    def touch_all(self) -> None:
        """Let the status of all ranks be looked up again, as it may have changed."""
        self.touched.update(self._column_of.values())

    def refresh(self, status_of: Callable[[WorkerRank], StreamStatus]) -> None:
        """Look up the status of the touched ranks."""
        statuses, before = self._statuses, self.answer
        for column in self.touched:
            statuses[column] = status_of(self.ranks[column])
        self.touched.clear()
        epochs, seqs, doubts = zip(*statuses, strict=True)
        self.answer = OverlapColumns(
            before.depths,
            before.epochs if epochs == before.epochs else epochs,
            seqs,
            before.doubts if doubts == before.doubts else doubts,
        )


class StatusColumnsCache:
    """Status columns by tuple of ranks, at most `STATUS_COLUMNS_MAX`; the eldest are dropped."""

    def __init__(self, slot_of: Callable[[WorkerRank], int], status_of: Callable[[WorkerRank], StreamStatus]) -> None:
        self._slot_of, self._status_of = slot_of, status_of
        self._known: dict[int, StatusColumns] = {}
        """By the id of the tuple of ranks; the value keeps the tuple alive, so no other tuple gets this id."""

    def __len__(self) -> int:
        return len(self._known)

    def of(self, ranks: tuple[WorkerRank, ...]) -> StatusColumns:
        """Return the columns of these ranks, with their present status."""
        known = self._known.get(id(ranks))
        if known is None:
            if len(self._known) == STATUS_COLUMNS_MAX:
                del self._known[next(iter(self._known))]
            known = self._known[id(ranks)] = StatusColumns(ranks, [self._slot_of(rank) for rank in ranks])
        if known.touched:
            known.refresh(self._status_of)
        return known

    def touch(self, rank: WorkerRank) -> None:
        """Let the rank's status be looked up again, as it may have changed."""
        for columns in self._known.values():
            columns.touch(rank)

    def touch_all(self) -> None:
        """Let the status of all ranks be looked up again, as it may have changed."""
        for columns in self._known.values():
            columns.touch_all()

    def clear(self) -> None:
        """Drop all columns, because slots have changed."""
        self._known.clear()
