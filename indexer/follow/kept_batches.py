"""The reorder buffer of one stream: batches that came early, by seq. Beyond its bounds it drops the lowest seqs first.

The batch with the highest seq always stays: it proves that a batch before it is missing. Each batch is kept with the id
of the newest question at its arrival: an answer covers all batches that came before its question. One that came before
the question and has a higher seq than the answer was never published.
"""

from collections.abc import Iterator
from typing import NamedTuple

from sortedcontainers import SortedDict

from kv_protocol.events import Batch, Cleared


class _EarlyBatch(NamedTuple):
    batch: Batch
    request_id: int

    @property
    def blocks(self) -> int:
        event = self.batch.event
        return 0 if isinstance(event, Cleared) else len(event.sequence_hashes)


class ReorderBuffer:
    """The early batches of one epoch, at most so many, with so many blocks in all."""

    def __init__(self, batches_max: int, blocks_max: int) -> None:
        self._batches_max, self._blocks_max = batches_max, blocks_max
        self._blocks = 0
        self._batches: SortedDict[int, _EarlyBatch] = SortedDict()

    def __len__(self) -> int:
        return len(self._batches)

    def keep(self, batch: Batch, request_id: int) -> int:
        """Add a batch; return how many were dropped, the lowest seqs first."""
        self._take(batch.seq)
        early = self._batches[batch.seq] = _EarlyBatch(batch, request_id)
        self._blocks += early.blocks
        lost = 0
        while len(self._batches) > 1 and (len(self._batches) > self._batches_max or self._blocks > self._blocks_max):
            self._take(self._batches.peekitem(0)[0])
            lost += 1
        return lost

    def _take(self, seq: int) -> _EarlyBatch | None:
        early: _EarlyBatch | None = self._batches.pop(seq, None)
        self._blocks -= 0 if early is None else early.blocks
        return early

    def following(self, seq: int) -> Iterator[Batch]:
        """Remove and yield the batches that follow each other from `seq + 1` on."""
        while (early := self._take(seq := seq + 1)) is not None:
            yield early.batch

    def drop_up_to(self, seq: int) -> int:
        """Drop the batches up to `seq`; return how many there were."""
        return self._drop(list(self._batches.irange(maximum=seq)))

    def drop_untrue(self, answered_seq: int, request_id: int) -> int:
        """Drop batches that came before a question, but are above its answer's last seq; return how many there were."""
        above = self._batches.irange(minimum=answered_seq + 1)
        return self._drop([each for each in above if self._batches[each].request_id < request_id])

    def _drop(self, seqs: list[int]) -> int:
        for seq in seqs:
            self._take(seq)
        return len(seqs)

    def clear(self) -> None:
        """Drop all."""
        self._batches.clear()
        self._blocks = 0
