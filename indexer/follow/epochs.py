"""Which epoch of a rank's stream is followed, and what may change it.

A log that is read from its beginning has batches of old epochs; heartbeats and answers prove which epoch is current.
After the first such proof, only proofs change the epoch. A replaced epoch is *retired*. Its heartbeats count again when
the current epoch was not proven for `silent_s`: otherwise a late heartbeat of the old epoch would look like a restart.
A batch of an epoch without a proof has *outrun* its heartbeat.
"""

from collections import deque

RETIRED_MAX = 16


class EpochTracker:
    """The epochs of one stream, except for the number of the current one."""

    def __init__(self, silent_s: float) -> None:
        self._silent_s = silent_s
        self._proven_at_s: float | None = None
        self._outran: int | None = None
        self._retired: deque[int] = deque(maxlen=RETIRED_MAX)

    def on_proof(self, now_s: float) -> None:
        """The current epoch was proven."""
        self._proven_at_s = now_s

    def may_begin_by_batch(self, epoch: int) -> bool:
        """Return whether a batch of `epoch`, which is not the current epoch, makes it the current one.

        If not, `epoch` is remembered: its batches may have outrun its first heartbeat.
        """
        if self._proven_at_s is None and epoch not in self._retired:
            return True
        self._outran = epoch
        return False

    def is_retired(self, epoch: int) -> bool:
        """Return whether the epoch is retired, so that its answers are ignored."""
        return epoch in self._retired

    def is_over(self, epoch: int, now_s: float) -> bool:
        """Return whether the epoch is retired and the current one was proven lately: its heartbeats are ignored."""
        is_current_proven = self._proven_at_s is not None and now_s - self._proven_at_s < self._silent_s
        return is_current_proven and epoch in self._retired

    def was_outrun(self, epoch: int) -> bool:
        """Return whether batches of that epoch were lost because they came before its first proof."""
        return epoch == self._outran

    def begin(self, epoch: int, former: int | None) -> None:
        """Begin an epoch; the former one, if any, is retired."""
        if former is not None:
            self._retired.append(former)
        if epoch in self._retired:
            self._retired.remove(epoch)
