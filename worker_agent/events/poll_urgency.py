"""How urgently a source is polled whose buffer drops its oldest events when full.

    pace      begins                                     a turn                                       ends
    -------   ----------------------------------------   ------------------------------------------   ------------------
    normal                                               one poll, which waits for events; then
                                                           they are encoded and published
    pressed   a poll brought more than half of what      polls at once, until one brings nothing      with a turn that
              the buffer holds, or a turn found that     or as much is taken as the buffer holds;     ran dry, and found
              events were lost                           only then is anything encoded                nothing lost

What a turn that ran dry took is all that the source had to say. Source: `docs/SOURCES.md` E1.5, E8 item 4.
"""

import msgspec

_BUFFER_EVENTS = 100_000
"""How much is taken at once of a source whose buffer is not known."""


class DrainStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What polls brought. `largest_ratio` is the largest poll, of what the buffer holds; 0 where that is not known."""

    pressed_cycles_total: int
    polls_total: int
    largest_ratio: float


class Drain:
    """The pace. `buffer_events` is what the source's buffer holds; 0: not known, and only losses press."""

    def __init__(self, buffer_events: int = 0) -> None:
        self._buffer_events = buffer_events
        self._is_pressed = self._is_dry = False
        self._events_in_cycle = self._largest = self._pressed_cycles = self._polls = 0

    @property
    def is_pressed(self) -> bool:
        """Whether the next poll is not to wait."""
        return self._is_pressed

    def on_poll(self, events: int) -> bool:
        """A poll brought so many events; return whether this turn polls again, without waiting."""
        self._polls += 1
        self._events_in_cycle += events
        self._largest = max(self._largest, events)
        self._is_dry = not events
        self._is_pressed = self._is_pressed or 2 * events > self._buffer_events > 0
        return self._is_pressed and not self._is_dry and self._events_in_cycle < (self._buffer_events or _BUFFER_EVENTS)

    def on_failure(self) -> None:
        """A poll failed; what it would have brought is not known."""
        self._is_dry = False

    def on_cycle(self, *, is_lossy: bool) -> bool:
        """What the turn took is published, and showed a loss or none; return whether that is all that there was."""
        is_all = self._is_dry and not is_lossy
        self._pressed_cycles += self._is_pressed
        self._is_pressed = is_lossy or (self._is_pressed and not is_all)
        self._events_in_cycle = 0
        return is_all

    def statistics(self) -> DrainStatistics:
        """Return what polls brought so far."""
        return DrainStatistics(
            pressed_cycles_total=self._pressed_cycles,
            polls_total=self._polls,
            largest_ratio=self._largest / self._buffer_events if self._buffer_events else 0.0,
        )
