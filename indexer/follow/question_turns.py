"""A queue of recovery questions: a bounded number is in flight, the others wait in order.

A stream whose question was not answered goes to the end of the queue, so that silent consolidators do not block others.
"""

RECOVERIES_MAX = 16
"""More at once would only share the same network and the same event loop."""


class RecoveryQueue:
    """The queue of the streams of one fold that want to send a question, by slot."""

    def __init__(self) -> None:
        self._waiting: dict[int, None] = {}
        self._in_flight: set[int] = set()

    def wait(self, slot: int) -> None:
        """Add the stream at the end of the queue, unless it waits already."""
        self._waiting.setdefault(slot)

    def end(self, slot: int) -> None:
        """The stream's question is not in flight any more."""
        self._in_flight.discard(slot)

    def leave(self, slot: int) -> None:
        """Remove the stream: it neither waits nor has a question in flight."""
        self._in_flight.discard(slot)
        self._waiting.pop(slot, None)

    def next(self) -> int | None:
        """Return the next stream, which is in flight from now on; None if none waits or too many are in flight."""
        if not self._waiting or len(self._in_flight) >= RECOVERIES_MAX:
            return None
        slot = next(iter(self._waiting))
        del self._waiting[slot]
        self._in_flight.add(slot)
        return slot
