"""How urgently a polled source is polled.

A source's buffer drops the oldest events when it is full.

    pace      begins                                     a cycle                                      ends
    -------   ----------------------------------------   ------------------------------------------   ------------------
    normal                                               one poll, which waits for events; then
                                                           they are translated and handed on
    pressed   a poll returned more than half of the      polls without waiting, until one is empty    with a cycle that
              buffer's capacity, or a cycle found        or a buffer's worth of events is taken;      ran dry and found
              lost events                                only then are they translated                no loss

A cycle that ran dry has taken all events that the source had. Source: `docs/SOURCES.md` E1.5, E8.
"""

_BUFFER_EVENTS = 100_000
"""Most events of one cycle, if the buffer's size is unknown."""


class Pace:
    """The pace of polls. `buffer_events` is the buffer's capacity; 0: unknown, and only losses press the pace."""

    def __init__(self, buffer_events: int = 0) -> None:
        self._buffer_events = buffer_events
        self._is_dry = False  # the last poll had no events
        self.is_pressed = False
        """Whether the next poll must not wait."""
        self._events_in_cycle = self._largest = self.pressed_cycles_total = self.polls_total = 0

    def on_poll(self, events: int) -> bool:
        """Note the number of events of a poll; return whether this cycle polls again, without waiting."""
        self.polls_total += 1
        self._events_in_cycle += events
        self._largest = max(self._largest, events)
        self._is_dry = not events
        self.is_pressed = self.is_pressed or 2 * events > self._buffer_events > 0
        return self.is_pressed and not self._is_dry and self._events_in_cycle < (self._buffer_events or _BUFFER_EVENTS)

    def on_failure(self) -> None:
        """Note a failed poll: the cycle did not run dry."""
        self._is_dry = False

    def on_cycle(self, *, is_lossy: bool) -> bool:
        """End a cycle after its events are handed on; return whether the source has no more events and lost none."""
        is_all = self._is_dry and not is_lossy
        self.pressed_cycles_total += self.is_pressed
        self.is_pressed = is_lossy or (self.is_pressed and not is_all)
        self._events_in_cycle = 0
        return is_all

    @property
    def largest_ratio(self) -> float:
        """The largest poll relative to the buffer's capacity; 0 if that is unknown."""
        return self._largest / self._buffer_events if self._buffer_events else 0.0
