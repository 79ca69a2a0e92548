"""How urgently a polled source is polled.

A source's buffer drops the oldest events when it is full; a poll takes all that it has.

    pace      begins                                                            polls             ends
    -------   ---------------------------------------------------------------   ---------------   ----------------------
    normal                                                                      wait for events
    pressed   a poll returned more than half of the buffer's capacity, or its   do not wait       a poll returned none
              events show that others were lost

Source: `docs/SOURCES.md` E1.5, E8.
"""


class Pace:
    """The pace of polls. `buffer_events` is the buffer's capacity; 0: unknown, and only losses press the pace."""

    def __init__(self, buffer_events: int = 0) -> None:
        self._buffer_events = buffer_events
        self.is_pressed = False
        """Whether the next poll must not wait."""
        self._largest = self.pressed_polls_total = self.polls_total = 0

    def on_poll(self, events: int, *, is_lossy: bool) -> bool:
        """Note a poll whose events are handed on; return whether the source has no more events and lost none."""
        is_all = not events and not is_lossy
        self.polls_total += 1
        self.pressed_polls_total += self.is_pressed
        self._largest = max(self._largest, events)
        self.is_pressed = is_lossy or 2 * events > self._buffer_events > 0 or (self.is_pressed and not is_all)
        return is_all

    @property
    def largest_ratio(self) -> float:
        """The largest poll relative to the buffer's capacity; 0 if that is unknown."""
        return self._largest / self._buffer_events if self._buffer_events else 0.0
