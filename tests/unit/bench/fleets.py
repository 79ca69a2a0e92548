"""A small recorded workload, and the simplest placement."""

import math
from itertools import count
from typing import Any

from bench.fidelity.closed_loop import Placer, Sent
from bench.fidelity.recording import Recording, Session

SESSIONS = tuple(
    Session(
        number % 2,
        tuple(100 + 10 * number + turn for turn in range(4)),
        tuple(5 + number % 3 + turn for turn in range(4)),
    )
    for number in range(14)
)


def recording(**changes: Any) -> Recording:
    """A workload on engines whose caches are too small for all of it."""
    whole = Recording(
        blocks_per_worker=250,
        block_size=16,
        concurrency=6,
        system_tokens=(320, 500),
        sessions=SESSIONS,
        sending_s=math.inf,
    )
    return whole._replace(**changes)


class RoundRobin(Placer):
    """One worker after the other, request by request."""

    def __init__(self) -> None:
        self._sent = count()

    def choose(self, sent: Sent) -> int:
        """Return the next worker."""
        return next(self._sent) % len(sent.in_flight)
