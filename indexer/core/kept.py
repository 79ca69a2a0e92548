"""Batches that came before their turn: kept by seq, at most so many, the oldest give way.

Each is kept with the newest question when it came: what was there before a question lies within its answer, or never
was.
"""

from collections.abc import Iterator
from typing import NamedTuple

from sortedcontainers import SortedDict

from kv_protocol.events import Batch


class _Kept(NamedTuple):
    batch: Batch
    request_id: int


class KeptBatches:
    """The batches of one epoch that do not follow yet."""

    def __init__(self, batches_max: int) -> None:
        self._batches_max = batches_max
        self._kept: SortedDict[int, _Kept] = SortedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, batch: Batch, request_id: int) -> bool:
        """The batch is kept; return whether the oldest gave way."""
        self._kept[batch.seq] = _Kept(batch, request_id)
        is_full = len(self._kept) > self._batches_max
        if is_full:
            self._kept.popitem(0)
        return is_full

    def following(self, seq: int) -> Iterator[Batch]:
        """Yield those that follow each other from `seq + 1` on; they are not kept any more."""
        while (kept := self._kept.pop(seq := seq + 1, None)) is not None:
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
            del self._kept[seq]
        return len(seqs)

    def clear(self) -> None:
        """Nothing is kept."""
        self._kept.clear()
