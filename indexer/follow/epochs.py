"""Which epoch of a rank's stream is followed, and what may change it.

A log read from its beginning tells of epochs long gone; heartbeats and answers prove which one lives. So after the
first proof of life, proofs alone change the epoch. An epoch that gave way is *retired*. A heartbeat of it counts again
when the present one was not proven for `silent_s`: else the last word of a dying epoch, come late and taken for a
restart, would end the living one. A batch of an epoch that was not heard to live yet has *outrun* its heartbeat.
"""

from collections import deque

RETIRED_MAX = 16


class EpochTracker:
    """What is known of the lives of one source, but for the number of the present one."""

    def __init__(self, silent_s: float) -> None:
        self._silent_s = silent_s
        self._proven_at_s: float | None = None
        self._outran: int | None = None
        self._retired: deque[int] = deque(maxlen=RETIRED_MAX)

    def on_proof(self, now_s: float) -> None:
        """The present life was heard to live."""
        self._proven_at_s = now_s

    def may_begin_by_batch(self, epoch: int) -> bool:
        """A batch of another epoch came; return whether it begins a life. If not, it may have outrun its heartbeat."""
        if self._proven_at_s is None and epoch not in self._retired:
            return True
        self._outran = epoch
        return False

    def is_retired(self, epoch: int) -> bool:
        """Return whether an answer of that epoch comes too late."""
        return epoch in self._retired

    def is_over(self, epoch: int, now_s: float) -> bool:
        """Return whether a heartbeat of that epoch comes too late: it is retired, and the present one lives."""
        lives = self._proven_at_s is not None and now_s - self._proven_at_s < self._silent_s
        return lives and epoch in self._retired

    def was_outrun(self, epoch: int) -> bool:
        """Return whether batches of that epoch were lost because they came before it was heard to live."""
        return epoch == self._outran

    def begin(self, epoch: int, former: int | None) -> None:
        """A life begins, and the former one, where there was one, is retired."""
        if former is not None:
            self._retired.append(former)
        if epoch in self._retired:
            self._retired.remove(epoch)
