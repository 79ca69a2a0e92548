"""The newest routed requests, by the last block of their prompts: what makes prefixes of the tree warm.

    heat of a request    2 ** -(its age / `HALF_LIFE_S`)

A request that was routed in a mode without overlap has no blocks, and does not count.
"""

from collections import deque
from typing import ClassVar

from indexer.embedded import PassedRequest
from kv_protocol.journal import LedgerApplied
from kv_protocol.ledger import Routed
from router.decision.verdict import Verdict
from router.journal.records import Recordable
from router.prompt.chains import BLOCK_BYTES

REQUESTS_MAX = 8192
HALF_LIFE_S = 60.0


class PassedRequests:
    """A recorder of the requests of a router and of its replicas; older ones are forgotten for newer ones."""

    reads: ClassVar[tuple[type, ...]] = (Verdict, LedgerApplied)

    def __init__(self) -> None:
        self._ends: deque[tuple[bytes, float]] = deque(maxlen=REQUESTS_MAX)

    def record(self, what: Recordable) -> None:
        """A decision counts if its prompt has a full block."""
        if type(what) is Verdict:
            self._add(what.request.sequence_hashes, what.now_s)
        elif isinstance(what, LedgerApplied) and isinstance(what.event, Routed):
            self._add(what.event.blocks, what.now_s)

    def _add(self, hashes: bytes, at_s: float) -> None:
        if hashes:
            self._ends.append((hashes[-BLOCK_BYTES:], at_s))

    def newest(self, now_s: float) -> list[PassedRequest]:
        """Return the requests with their heat at this time, eldest first."""
        return [
            PassedRequest(int.from_bytes(block, "little"), 2.0 ** (-max(0.0, now_s - at_s) / HALF_LIFE_S), at_s)
            for block, at_s in self._ends
        ]
