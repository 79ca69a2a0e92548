"""When an attached engine belongs to the fleet: a table over its health, probed every `PROBE_PERIOD_S`.

out, answers                             register
in,  answers                             nothing
in,  the log was lost and found          register: it may be a new one
in,  did not answer `FAILURES_MAX` times leave
out, does not answer                     nothing
"""

from typing import Literal

PROBE_PERIOD_S = 1.0
FAILURES_MAX = 5

Step = Literal["register", "leave", ""]


class Attachment:
    """Whether the engine is in. What `on_probe` asks for is done when `entered` or `left` says so."""

    def __init__(self) -> None:
        self._is_in = self._is_current = False
        self._failures = 0

    @property
    def is_in(self) -> bool:
        """Whether the fleet was told that the engine serves."""
        return self._is_in

    @property
    def is_out(self) -> bool:
        """Whether the fleet does not count on the engine, or is not to any more."""
        return not self._is_in or self._failures >= FAILURES_MAX

    def on_probe(self, *, is_healthy: bool, is_log_new: bool = False) -> Step:
        """Return what is to be done after a probe; empty: nothing."""
        self._failures = 0 if is_healthy else self._failures + 1
        self._is_current = self._is_current and not is_log_new
        if is_healthy:
            return "" if self._is_current else "register"
        return "leave" if self._is_in and self._failures >= FAILURES_MAX else ""

    def entered(self) -> None:
        """The registration is in the log."""
        self._is_in = self._is_current = True

    def left(self) -> None:
        """The fleet was told that the engine is gone."""
        self._is_in = self._is_current = False
