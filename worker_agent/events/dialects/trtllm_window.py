"""Which attention window of a rank counts: the widest; blocks of sliding windows are no prefix.

    known by                    the widest window is
    nothing yet                 not known: events are held back, their order kept
    configuration               the configured one; the first `created` takes its place, unless an event confirmed it
    `created`                   the widest of those created
    an event without a window   unbounded: the engine is older than windows, or this pool has none
    `HELD_BACK_MAX` events      the widest among them: `created` was lost before the first poll, and every window stores
                                what a request computed
    an event of a wider window  that one: the earlier value was wrong

If the window that counts changes after events of the former one were published, these events were not of prefixes: the
rank is cleared. So a wrong guess lasts until the next event of the widest window. The first event has no special rule.
Source: `docs/SOURCES.md` E1.3, E2.2, E8 item 9.
"""

from collections.abc import Iterable

from worker_agent.events.dialects.trtllm_wire import UNBOUNDED

HELD_BACK_MAX = 64


class WidestWindow:
    """The widest window of one rank, in tokens; it may be unknown or assumed."""

    def __init__(self, configured: int | None) -> None:
        self._widest = configured
        self._is_seen = False

    @property
    def widest(self) -> int | None:
        """The window that counts; None if unknown."""
        return self._widest

    def on_created(self, window: int) -> None:
        """Note that a pool of this window exists."""
        self._widest = max(window, self._widest or 0) if self._is_seen else window
        self._is_seen = True

    def on_event(self, window: int) -> None:
        """Note an event of this window."""
        if window == UNBOUNDED or (self._widest is not None and window >= self._widest):
            self._widest = window
            self._is_seen = True

    def assume(self, windows: Iterable[int]) -> None:
        """Assume the widest of these windows."""
        self._widest = max(windows)
        self._is_seen = True
