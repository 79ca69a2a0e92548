"""Combines the load that a rank's engine reports with the work that was promised to it.

A report and a promise never refer to the same moment: a request, or its end, is in transit. So a difference counts only
if the newest `REPORTS` reports all show it, and only as much of it as the least of them shows:

    foreign  = max(0, min over the newest reports of (running + waiting - promised then))
    excess   = max(0, settled - max over the newest reports of (running + waiting))

`settled` are the open leases that were booked before the report that preceded these, so that each of these could have
shown them. `foreign` requests are load of other clients: they count as active requests. `Ledger.tick` ends the eldest
settled leases, as many as the `excess`. With fewer reports both are 0; an engine without reports for `UNREPORTED_S`
(an idle one does not report) is treated like one that never reported.
"""

from collections import deque

from kv_protocol.ledger import Reconciled
from router.journal.checkpoint_rows import ReportedRow

REPORTS = 5
UNREPORTED_S = 5.0


class Reported:
    """One rank's reports. A lease's generation is the number of reports before it was booked."""

    __slots__ = ("_reported_at_s", "_running", "_surpluses", "_young", "excess", "foreign", "generation", "newest")

    def __init__(self) -> None:
        self.generation = 0
        self._young = [0] * (REPORTS + 1)  # open leases by generation, the newest REPORTS of them and the present one
        self.withdraw()

    def withdraw(self) -> None:
        """Drop all reports."""
        self.newest = (0, 0, 0)
        self.foreign = self.excess = 0
        self._running: deque[int] = deque(maxlen=REPORTS)
        self._surpluses: deque[int] = deque(maxlen=REPORTS)
        self._reported_at_s: float | None = None

    def row(self) -> ReportedRow:
        """Return the row for a checkpoint."""
        return ReportedRow(
            self.generation,
            [*self._young],
            self.newest,
            self.foreign,
            self.excess,
            [*self._running],
            [*self._surpluses],
            self._reported_at_s,
        )

    def restore(self, row: ReportedRow) -> None:
        """Restore the reports from the row, which counts the open leases."""
        self.generation, self._young, self.newest = row.generation, [*row.young], row.newest
        self.foreign, self.excess = row.foreign, row.excess
        self._running.extend(row.reported)
        self._surpluses.extend(row.surpluses)
        self._reported_at_s = row.reported_at_s

    @property
    def has_reported(self) -> bool:
        """Whether there is a valid report."""
        return self._reported_at_s is not None

    def is_silent(self, now_s: float) -> bool:
        """Whether the reports are too old to be valid."""
        return self._reported_at_s is not None and now_s - self._reported_at_s >= UNREPORTED_S

    def is_settled(self, generation: int) -> bool:
        """Whether a lease of this generation was booked before all of the newest reports, and the one before them."""
        return generation < self.generation - REPORTS

    def booked(self) -> None:
        """A lease of the present generation was booked."""
        self._young[self.generation % len(self._young)] += 1

    def ended(self, generation: int) -> None:
        """A lease ended; if it was settled, the excess shrinks by one."""
        if self.is_settled(generation):
            self.excess = max(0, self.excess - 1)
        else:
            self._young[generation % len(self._young)] -= 1

    def on_report(self, report: Reconciled, promised: int, now_s: float) -> None:
        """The engine reported while `promised` requests were promised."""
        self.newest = (report.running_requests, report.waiting_requests, report.used_blocks)
        self._reported_at_s = now_s
        running = report.running_requests + report.waiting_requests
        self._running.append(running)
        self._surpluses.append(running - promised)
        self.generation += 1
        self._young[self.generation % len(self._young)] = 0
        self.foreign = self.excess = 0
        if len(self._running) == REPORTS:
            self.foreign = max(0, min(self._surpluses))
            self.excess = max(0, promised - sum(self._young) - max(self._running))
