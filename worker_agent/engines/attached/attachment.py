"""When an attached engine is registered: a table over its health, probed every `PROBE_PERIOD_S`.

out, answers                             register
in,  answers                             nothing
in,  after a reconnection to the log     register: the log may be a new one
in,  failed `FAILURES_MAX` probes        leave
in,  sleeps                              leave
out, does not answer                     nothing
"""

from typing import Literal

PROBE_PERIOD_S = 1.0
FAILURES_MAX = 5

Step = Literal["register", "leave", ""]


class Attachment:
    """The registration state. `on_probe` returns the next step; the caller confirms it with `entered` or `left`."""

    def __init__(self) -> None:
        self._is_in = self._is_current = False
        self._failures = 0

    @property
    def is_in(self) -> bool:
        """Whether the engine is registered."""
        return self._is_in

    @property
    def is_out(self) -> bool:
        """Whether the engine is not registered, or is about to leave."""
        return not self._is_in or self._failures >= FAILURES_MAX

    def on_probe(self, *, is_healthy: bool, is_log_new: bool = False, is_asleep: bool = False) -> Step:
        """Return the step after a probe; empty: none."""
        self._failures = 0 if is_healthy else self._failures + 1
        self._is_current = self._is_current and not is_log_new
        if is_healthy:
            return "" if self._is_current else "register"
        return "leave" if self._is_in and (is_asleep or self._failures >= FAILURES_MAX) else ""

    def entered(self) -> None:
        """Confirm that the registration is in the log."""
        self._is_in = self._is_current = True

    def left(self) -> None:
        """Confirm that `WorkerLeft` is in the log."""
        self._is_in = self._is_current = False
