"""An index that one process writes and others read, in memory that they share.

shared = SharedIndex(settings, readers=2)          in a process that then forks the others
EmbeddedIndex(..., shared=shared)                  the writer: one process at a time
IndexReader(shared, 0)                             a reader: one process for each number

A reader matches in the writer's tree itself: nothing is copied, and no other process is asked. Blocks and slots that it
sees together were true together; the statuses are of that moment or a later one. While no writer lives the tree is read
as it was, and every rank that was current is in doubt (log_away); a new writer's tree takes its place once that has
caught up with the log. While the writer stands still they are in doubt, too (index_behind). If a writer is killed in
the midst of a change, nothing is known until then.
"""

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from indexer.follow.fold_views import RankView
from indexer.follow.status import StaleReason, without_log
from indexer.follow.status_writer import DOUBTS, SharedNames
from indexer.index.overlap_columns import STATUS_COLUMNS_MAX, OverlapColumns, StreamStatus
from indexer.index.prefix_index import Hashes
from indexer.native._core import Reader, SharedRegion
from kv_protocol.events import TIERS
from kv_protocol.ids import WorkerRank
from kv_runtime.config.loading import ConfigurationError
from kv_runtime.config.sections import IndexSection

if TYPE_CHECKING:
    from numpy.typing import NDArray

READERS_MAX = 64
_COLUMNS_MIN = 64
_NO_SLOT = 0xFFFF_FFFF
_decode_names = msgspec.msgpack.Decoder(SharedNames).decode


class SharedIndex:
    """Memory for an index; processes that are forked from this one share it."""

    def __init__(self, settings: IndexSection, readers: int) -> None:
        """Reserve address space for what `settings` allow; `readers`: 1..READERS_MAX.

        Raises:
            ConfigurationError: the index has no limit of memory, or there is no such address space.
        """
        if settings.memory_bytes_max == 0:
            raise ConfigurationError(
                ["index.memory_bytes_max: found 0 (no limit), an index that processes share needs a limit"]
            )
        try:
            self.region = SharedRegion(readers, settings.memory_bytes_max)
        except (MemoryError, RuntimeError) as error:
            found = f"index.memory_bytes_max: found {settings.memory_bytes_max}, for which this machine has no shared"
            raise ConfigurationError([f"{found} address space ({error})"]) from error

    def on_writer_ended(self) -> None:
        """The writer's process is gone: its index is read on, in doubt."""
        self.region.on_writer_ended()

    def reader(self, number: int) -> "IndexReader":
        """Return reader `number`, 0..readers-1; from now on this process cannot write to the index."""
        self.region.protect()
        return IndexReader(self.region.reader(number))


class _Columns:
    """The slots of some ranks, and the statuses of their streams as of a version."""

    __slots__ = ("doubts", "epochs", "ranks", "seqs", "slots", "version")

    def __init__(self, ranks: tuple[WorkerRank, ...]) -> None:
        self.ranks = ranks
        self.version = -1
        self.slots: NDArray[np.intp] = np.empty(0, dtype=np.intp)
        self.epochs: tuple[int, ...] = ()
        self.seqs: tuple[int, ...] = ()
        self.doubts: tuple[str, ...] = ()

    def update(self, statuses: list[StreamStatus], version: int) -> None:
        """Have the statuses; tuples that are equal to the former ones stay the same objects."""
        epochs, seqs, doubts = zip(*statuses, strict=True) if statuses else ((), (), ())
        self.seqs, self.version = seqs, version
        self.epochs = self.epochs if epochs == self.epochs else epochs
        self.doubts = self.doubts if doubts == self.doubts else doubts


class IndexReader:
    """What a router asks of an index, answered from the memory that the index's writer shares. For one thread."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._columns: dict[int, _Columns] = {}
        self._slot_of: dict[WorkerRank, int] = {}
        self._refused: frozenset[WorkerRank] = frozenset()
        self._names_version = 0
        self._is_behind = False
        self._allocate(_COLUMNS_MIN)

    def _allocate(self, columns: int) -> None:
        """Allocate the matrix for `Reader.match`; its last column belongs to no rank and stays 0."""
        self._matched = array("i", bytes(4 * len(TIERS) * columns))
        self._depths = np.frombuffer(self._matched, dtype=np.int32).reshape(len(TIERS), columns)
        self._empty_column = columns - 1

    @property
    def is_behind(self) -> bool:
        """Whether the writer stands still, so that every rank that was current is in doubt (index_behind)."""
        return self._is_behind

    @is_behind.setter
    def is_behind(self, is_behind: bool) -> None:
        self._is_behind = is_behind
        self._columns.clear()

    def catching_up(self) -> str:
        """Return how far the first writer has read the log; empty once something is known."""
        is_known, _, progress = self._reader.progress()
        return "" if is_known else progress or "log: not read yet"

    def log_seq(self) -> int:
        """Return the seq of the last applied message of `KV_EVENTS`; 0 while nothing is known."""
        return self._reader.progress()[1]

    def columns(self, chain: Hashes, ranks: tuple[WorkerRank, ...]) -> OverlapColumns:
        """Return each rank's overlap with the chain and the status of its stream; a rank without a slot has no overlap.

        Cheap if the same tuple object was passed before.
        """
        version = self._match(chain)
        columns = self._columns_of(ranks)
        if columns.version != version and not self._refresh(columns):
            return self.columns(chain, ranks)
        return OverlapColumns(self._depths.take(columns.slots, 1), columns.epochs, columns.seqs, columns.doubts)

    def overlap(self, sequence_hashes: Hashes, ranks: Sequence[WorkerRank]) -> list[RankView]:
        """Return the same rank by rank."""
        self._match(sequence_hashes)
        columns = _Columns(tuple(ranks))
        if not self._refresh(columns):
            return self.overlap(sequence_hashes, ranks)
        rows = zip(columns.epochs, columns.seqs, columns.doubts, strict=True)
        depths = self._depths.take(columns.slots, 1).T.tolist()
        return [RankView(tuple(held), *row) for held, row in zip(depths, rows, strict=True)]

    def _match(self, chain: Hashes) -> int:
        """Fill the matrix, and return the version of all that is told of ranks then."""
        while True:
            names_version, version, needed = self._reader.match(chain, self._matched)
            if needed > self._empty_column:
                self._allocate(2 * needed)
                self._columns.clear()
            elif names_version == self._names_version:
                if names_version == 0:
                    self._depths[:] = 0
                return version
            else:
                self._read_names()

    def _read_names(self) -> None:
        self._names_version, data = self._reader.names()
        names = _decode_names(data) if self._names_version else SharedNames()
        self._slot_of = {WorkerRank(worker_id, dp_rank): slot for worker_id, dp_rank, slot in names.slots}
        self._refused = frozenset(WorkerRank(worker_id, dp_rank) for worker_id, dp_rank in names.refused)
        self._columns.clear()

    def _columns_of(self, ranks: tuple[WorkerRank, ...]) -> _Columns:
        known = self._columns.get(id(ranks))
        if known is None:  # a cached entry keeps its tuple alive, so its id is unique
            if len(self._columns) == STATUS_COLUMNS_MAX:
                del self._columns[next(iter(self._columns))]
            known = self._columns[id(ranks)] = _Columns(ranks)
        return known

    def _refresh(self, columns: _Columns) -> bool:
        """Read the statuses; return False if slots have changed since the match."""
        slots = [self._slot_of.get(rank, _NO_SLOT) for rank in columns.ranks]
        columns.slots = np.array([min(slot, self._empty_column) for slot in slots], dtype=np.intp)
        found, is_written, names_version, version = self._reader.statuses(slots)
        if names_version != self._names_version:
            return False
        statuses = [
            self._unknown(rank) if slot == _NO_SLOT else (epoch, seq, DOUBTS[doubt])
            for rank, slot, (epoch, seq, doubt) in zip(columns.ranks, slots, found, strict=True)
        ]
        if self._is_behind or not is_written:
            why: StaleReason = "index_behind" if is_written else "log_away"
            statuses = [(epoch, seq, without_log(doubt, why)) for epoch, seq, doubt in statuses]
        columns.update(statuses, version)
        return True

    def _unknown(self, rank: WorkerRank) -> StreamStatus:
        return 0, 0, "refused" if rank in self._refused else "never_heard"
