"""Batches that came out of order: kept by seq within bounds; the oldest are dropped first.

The last is always kept: that there is one says that something before it is missing. Each is kept with the newest
question when it came: what was there before a question lies within its answer, or never was.
"""

from collections.abc import Iterator
from typing import NamedTuple

from sortedcontainers import SortedDict

from kv_protocol.events import Batch, Cleared


class _Kept(NamedTuple):
    batch: Batch
    request_id: int

    @property
    def blocks(self) -> int:
        event = self.batch.event
        return 0 if isinstance(event, Cleared) else len(event.sequence_hashes)


class KeptBatches:
    """The batches of one epoch that do not follow yet."""

    def __init__(self, batches_max: int, blocks_max: int) -> None:
        self._batches_max, self._blocks_max = batches_max, blocks_max
        self._blocks = 0
        self._kept: SortedDict[int, _Kept] = SortedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, batch: Batch, request_id: int) -> int:
        """The batch is kept; return how many of the oldest gave way."""
        self._take(batch.seq)
        kept = self._kept[batch.seq] = _Kept(batch, request_id)
        self._blocks += kept.blocks
        lost = 0
        while len(self._kept) > 1 and (len(self._kept) > self._batches_max or self._blocks > self._blocks_max):
            self._take(self._kept.peekitem(0)[0])
            lost += 1
        return lost

    def _take(self, seq: int) -> _Kept | None:
        kept: _Kept | None = self._kept.pop(seq, None)
        self._blocks -= 0 if kept is None else kept.blocks
        return kept

    def following(self, seq: int) -> Iterator[Batch]:
        """Yield those that follow each other from `seq + 1` on; they are not kept any more."""
        while (kept := self._take(seq := seq + 1)) is not None:
            yield kept.batch

    def drop_up_to(self, seq: int) -> int:
        """Nothing up to `seq` is kept; return how many were."""
        return self._drop(list(self._kept.irange(maximum=seq)))

    def drop_untrue(self, answered_seq: int, request_id: int) -> int:
        """Nothing beyond an answer is kept that was there before its question; return how many were."""
        beyond = self._kept.irange(minimum=answered_seq + 1)
        return self._drop([each for each in beyond if self._kept[each].request_id < request_id])

    def _drop(self, seqs: list[int]) -> int:
        for seq in seqs:
            self._take(seq)
        return len(seqs)

    def clear(self) -> None:
        """Nothing is kept."""
        self._kept.clear()
        self._blocks = 0
