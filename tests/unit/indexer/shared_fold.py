"""Folds of whatever index; one of a shared index is asked as its readers ask."""

from collections.abc import Sequence
from typing import Any

from indexer.follow.fold import IndexFold, OverlapColumns, RankView
from indexer.follow.inputs import Fact, MessageArrived, Question
from indexer.follow.messages import read_message
from indexer.follow.status_writer import StatusWriter
from indexer.index.prefix_index import Hashes, PrefixIndex
from indexer.shared import IndexReader
from kv_protocol import codec
from kv_protocol.events import Batch
from kv_protocol.ids import WorkerRank
from tests.contract.indexes import SharedNativeIndex


class SharedFold(IndexFold):
    """Answers as a reader is answered, which is what the fold answers, or fails."""

    def __init__(self, index: SharedNativeIndex, *limits: Any, **settings: Any) -> None:
        super().__init__(index, *limits, told=StatusWriter(index), **settings)
        self.tick(0.0)
        self.reader = IndexReader(index.reader)

    def overlap(self, sequence_hashes: Hashes, ranks: Sequence[WorkerRank]) -> list[RankView]:
        """Return the reader's views."""
        views = super().overlap(sequence_hashes, ranks)
        assert self.reader.overlap(sequence_hashes, ranks) == views
        return views

    def columns(self, chain: Hashes, ranks: tuple[WorkerRank, ...]) -> OverlapColumns:
        """Return the reader's columns."""
        expected, found = super().columns(chain, ranks), self.reader.columns(chain, ranks)
        assert found.depths.tolist() == expected.depths.tolist()
        assert found[1:] == expected[1:]
        return found


def fold_of(index: PrefixIndex, *limits: Any, **settings: Any) -> IndexFold:
    """Return a fold of the index."""
    kind: Any = SharedFold if isinstance(index, SharedNativeIndex) else IndexFold
    made: IndexFold = kind(index, *limits, **settings)
    return made


def told(fold: IndexFold, *facts: Fact, now_s: float = 0) -> list[Question]:
    return [question for fact in facts for question in fold.apply(fact, now_s)]


def arrived(rank: WorkerRank, *batches: Batch) -> MessageArrived:
    return MessageArrived(rank, read_message(codec.encode_message(batches)))


def stale(fold: IndexFold, *ranks: WorkerRank) -> list[str]:
    return [view.stale for view in fold.overlap((), ranks)]
