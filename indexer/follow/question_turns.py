"""Which questions are in flight: a bounded number, the others in order.

Who was not answered goes back to the end of the row, so that consolidators which are silent hold nobody up for long.
"""

RECOVERIES_MAX = 16
"""More at once would only share the same network and the same event loop."""


class QuestionTurns:
    """The row of the streams of one fold that want to ask, by their number (slot)."""

    def __init__(self, at_once_max: int = RECOVERIES_MAX) -> None:
        self._at_once_max = at_once_max
        self._waiting: dict[int, None] = {}
        self._asking: set[int] = set()

    def wait(self, slot: int) -> None:
        """The stream waits, behind all who wait already."""
        self._waiting.setdefault(slot)

    def end(self, slot: int) -> None:
        """The stream's question is in flight no more."""
        self._asking.discard(slot)

    def leave(self, slot: int) -> None:
        """The stream neither asks nor waits."""
        self._asking.discard(slot)
        self._waiting.pop(slot, None)

    def next(self) -> int | None:
        """Return who may ask now, and counts as asking from now on; None where nobody waits, or nobody may."""
        if not self._waiting or len(self._asking) >= self._at_once_max:
            return None
        slot = next(iter(self._waiting))
        del self._waiting[slot]
        self._asking.add(slot)
        return slot
