"""The newest routed requests, by the last block of their prompts: what makes prefixes of the tree warm.

    heat of a request    2 ** -(its age / `HALF_LIFE_S`)

A request that was routed in a mode without overlap has no blocks, and does not count.
"""

from collections import deque
from collections.abc import Sequence
from typing import ClassVar

from indexer.embedded import PassedRequest
from router.decision.verdict import Verdict
from router.journal.records import Recordable
from router.prompt.chains import BLOCK_BYTES

REQUESTS_MAX = 8192
HALF_LIFE_S = 60.0


class PassedRequests:
    """A recorder of a router; older requests are forgotten for newer ones."""

    reads: ClassVar[tuple[type, ...]] = (Verdict,)

    def __init__(self) -> None:
        self._ends: deque[tuple[bytes, float]] = deque(maxlen=REQUESTS_MAX)

    def record(self, what: Recordable) -> None:
        """A decision counts if its prompt has a full block."""
        if type(what) is Verdict and (hashes := what.request.sequence_hashes):
            self._ends.append((hashes[-BLOCK_BYTES:], what.now_s))

    def newest(self) -> list[tuple[int, float]]:
        """Return the last block and the time of each request, eldest first."""
        return [(int.from_bytes(block, "little"), at_s) for block, at_s in self._ends]


def warmth(ends: Sequence[tuple[int, float]], now_s: float) -> list[PassedRequest]:
    """Return the newest `REQUESTS_MAX` requests with their heat at this time."""
    newest = sorted(ends, key=lambda each: each[1])[-REQUESTS_MAX:]
    return [PassedRequest(block, 2.0 ** (-max(0.0, now_s - at_s) / HALF_LIFE_S), at_s) for block, at_s in newest]
