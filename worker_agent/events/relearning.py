"""Decides when a rank is complete again after its source lost events: a sequence of stages.

    lost        the source's event ids jumped: the rank was cleared, and is learnt again from there
    drained     the source had no more events and lost no more; all of them are in the poller's batches before
                `Drained.sequence`
    read        these were delivered; all events are in the rank's stream up to a seq
    published   the log has it. The loss is over

Counts of lost events only grow, so each stage stores the count at which it was reached. The source's thread counts and
creates `DrainedMoment`, the event loop does the rest.
"""

from collections.abc import Mapping
from typing import NamedTuple


class DrainedMoment(NamedTuple):
    """A moment at which the source had no more events: the poller's next sequence, and the events lost so far."""

    sequence: int
    lost: Mapping[int, int]


class _Read(NamedTuple):
    lost: int
    seq: int


_NOTHING = _Read(0, 0)


class Relearning:
    """The ranks of one source."""

    def __init__(self) -> None:
        self._read: dict[int, _Read] = {}
        self._over: dict[int, int] = {}

    def on_progress(
        self, dp_rank: int, drained: DrainedMoment, delivered: int, last_seq: int, published_seq: int
    ) -> None:
        """Note the progress of the source, of the delivery and of the rank's stream."""
        lost = drained.lost.get(dp_rank, 0)
        if delivered >= drained.sequence and lost > self._read.get(dp_rank, _NOTHING).lost:
            self._read[dp_rank] = _Read(lost, last_seq)
        read = self._read.get(dp_rank, _NOTHING)
        if published_seq >= read.seq:
            self._over[dp_rank] = read.lost

    def missing(self, dp_rank: int, lost: int) -> int:
        """Return how many of the events lost so far belong to losses that are not over."""
        return lost - self._over.get(dp_rank, 0)
