"""What readers in other processes are told of the ranks: their slots, and the status of their streams.

The blocks themselves are in memory that the readers share (`indexer/native/shared_region.hpp`); this is the rest of
what `IndexFold.columns` answers. Ranks and refused ranks are told as a whole when one of them comes or goes, a status
when a fact may have changed it.
"""

from collections.abc import Callable, Mapping
from typing import Protocol, get_args

import msgspec

from indexer.follow.rank_stream import FollowedRank
from indexer.follow.status import StaleReason
from indexer.index.overlap_columns import StreamStatus
from kv_protocol.ids import WorkerRank

DOUBTS: tuple[str, ...] = get_args(StaleReason)
"""A doubt's place is its number in shared memory."""
_NUMBER_OF = {doubt: number for number, doubt in enumerate(DOUBTS)}


class SharedNames(msgspec.Struct, frozen=True):
    """The ranks that have slots, with those, and the ranks that are refused."""

    slots: list[tuple[str, int, int]] = []
    refused: list[tuple[str, int]] = []


class SharedTree(Protocol):
    """The side of an index that its readers are told by."""

    def write_names(self, names: bytes) -> None:
        """Replace the names: an encoded `SharedNames`."""

    def write_status(self, slot: int, epoch: int, seq: int, doubt: int) -> None:
        """Replace the status of a slot's stream; `doubt` is a place in `DOUBTS`."""


class StatusWriter:
    """Tells the readers what has changed since the last `write`."""

    def __init__(self, tree: SharedTree) -> None:
        self._tree = tree
        self._touched: set[WorkerRank] = set()
        self._has_all_changed = True
        self._names = b""

    def touch(self, rank: WorkerRank) -> None:
        """The rank's status may have changed."""
        self._touched.add(rank)

    def touch_all(self) -> None:
        """The status of any rank may have changed, and which ranks are refused."""
        self._has_all_changed = True

    def clear(self) -> None:
        """Slots have changed, or the tree was replaced by another."""
        self._has_all_changed, self._names = True, b""

    def write(
        self,
        streams: Mapping[WorkerRank, FollowedRank],
        refused: Callable[[], Mapping[WorkerRank, str]],
        status_of: Callable[[WorkerRank], StreamStatus],
    ) -> None:
        """Write the changed statuses; and the names, if they may have changed."""
        if self._has_all_changed or not self._touched <= streams.keys():
            self._write_names(streams, refused())
        for rank in streams if self._has_all_changed else self._touched & streams.keys():
            epoch, seq, doubt = status_of(rank)
            self._tree.write_status(streams[rank].slot, epoch, seq, _NUMBER_OF[doubt])
        self._touched.clear()
        self._has_all_changed = False

    def _write_names(self, streams: Mapping[WorkerRank, FollowedRank], refused: Mapping[WorkerRank, str]) -> None:
        slots = [(rank.worker_id, rank.dp_rank, stream.slot) for rank, stream in streams.items()]
        names = msgspec.msgpack.encode(SharedNames(slots, [(rank.worker_id, rank.dp_rank) for rank in refused]))
        if names != self._names:
            self._tree.write_names(names)
            self._names = names
