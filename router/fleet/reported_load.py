"""Combines the load that a rank's engine reports with the work that was promised to it.

A report and a promise never mean the same moment: a request is on its way, or its end is. So a difference counts once
the newest `REPORTS` reports all show it, and no more of it than the least of them shows:

    foreign  = max(0, min over the newest reports of (running + waiting - promised then))
    excess   = max(0, settled - max over the newest reports of (running + waiting))

`settled` are the leases that run and were booked before the report that came before these, so that each of these could
have shown them. `foreign` requests are load that is not ours: they count as active requests. Of the `excess`, the
eldest settled leases are ended, by `Ledger.tick`. With fewer reports, nothing is believed; an engine that says nothing
for `UNREPORTED_S` (one without work does not report) is as one that never did.
"""

from collections import deque

from kv_protocol.ledger import Reconciled
from router.journal.checkpoint_rows import ReportedRow

REPORTS = 5
UNREPORTED_S = 5.0


class Reported:
    """One rank's reports. Leases are told of by their generation: how many reports there were when they were booked."""

    __slots__ = ("_reported_at_s", "_running", "_surpluses", "_young", "excess", "foreign", "generation", "newest")

    def __init__(self) -> None:
        self.generation = 0
        self._young = [0] * (REPORTS + 1)  # open leases by generation, the newest REPORTS of them and the present one
        self.withdraw()

    def withdraw(self) -> None:
        """Nothing that was reported counts any more."""
        self.newest = (0, 0, 0)
        self.foreign = self.excess = 0
        self._running: deque[int] = deque(maxlen=REPORTS)
        self._surpluses: deque[int] = deque(maxlen=REPORTS)
        self._reported_at_s: float | None = None

    def row(self) -> ReportedRow:
        """Return the row of a checkpoint."""
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
        """The reports are as the row has them; leases that run are counted in it."""
        self.generation, self._young, self.newest = row.generation, [*row.young], row.newest
        self.foreign, self.excess = row.foreign, row.excess
        self._running.extend(row.reported)
        self._surpluses.extend(row.surpluses)
        self._reported_at_s = row.reported_at_s

    @property
    def has_reported(self) -> bool:
        """Whether a report counts."""
        return self._reported_at_s is not None

    def is_silent(self, now_s: float) -> bool:
        """Whether reports count that should not any more."""
        return self._reported_at_s is not None and now_s - self._reported_at_s >= UNREPORTED_S

    def is_settled(self, generation: int) -> bool:
        """Whether a lease of this generation was there before all of the newest reports, and the one before them."""
        return generation < self.generation - REPORTS

    def booked(self) -> None:
        """A lease of the present generation runs."""
        self._young[self.generation % len(self._young)] += 1

    def ended(self, generation: int) -> None:
        """A lease is over; if it was settled, one less of them is too many."""
        if self.is_settled(generation):
            self.excess = max(0, self.excess - 1)
        else:
            self._young[generation % len(self._young)] -= 1

    def on_report(self, report: Reconciled, promised: int, now_s: float) -> None:
        """The engine reported while so many requests were promised."""
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
