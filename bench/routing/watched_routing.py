"""A router's decisions with everything told that happens to its leases, in order: for simulations that look at each."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from kv_protocol.journal import JournalRecord, LedgerApplied, OutcomeName
from kv_protocol.ledger import FirstToken, LedgerEvent, Renewed
from router.decision.routing import Lease, Routing
from router.decision.verdict import Verdict
from router.journal.checkpoint import JournalCheckpoint
from router.journal.encoder import JournalEncoder

Told = JournalRecord | Verdict
"""What was applied: a record, or a decision that was carried out."""


class Watcher(Protocol):
    """Gets all that a router applies."""

    def record(self, what: Told) -> None:
        """`what` was applied."""


class _WatchedLease:
    """A lease, and who is told of it."""

    def __init__(self, lease: Lease, tell: Callable[[Told], None], now: Callable[[], float]) -> None:
        self._lease, self._tell, self._now = lease, tell, now

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the lease has
        return getattr(self._lease, name)

    def _happened(self, act: Callable[[], None]) -> None:
        """Tell of the first token, or a renewal, that the act brings."""
        lease = self._lease
        has_begun, renewed_s = lease.first_byte_s is not None, lease.renewed_s
        act()
        event: LedgerEvent = (Renewed if has_begun else FirstToken)(lease_id=lease.verdict.decision_id)
        if lease.renewed_s != renewed_s or (lease.first_byte_s is not None and not has_begun):
            self._tell(LedgerApplied(now_s=self._now(), event=event))

    def first_token(self) -> None:
        self._happened(self._lease.first_token)

    def on_bytes(self) -> None:
        self._happened(self._lease.on_bytes)

    def end(self, outcome: OutcomeName, *counts: int | None, **arrived: Any) -> None:  # noqa: ANN401 - as the lease has it
        is_open = self._lease.outcome is None
        self._lease.end(outcome, *counts, **arrived)
        if is_open and (known := self._lease.outcome) is not None:
            self._tell(known)


class WatchedRouting(Routing):
    """The same decisions. What happens to leases is told to `watch`, and all else to `recorders`."""

    def __init__(self, *given: Any, watch: Sequence[Callable[[Told], None]], **named: Any) -> None:  # noqa: ANN401 - as `Routing`
        super().__init__(*given, **named)
        self._watch = watch

    def _tell(self, what: Told) -> None:
        for each in self._watch:
            each(what)

    def take(self, verdict: Verdict) -> Lease:
        """Carry out `verdict`, and tell of it."""
        lease = super().take(verdict)
        self._tell(verdict)
        return cast("Lease", _WatchedLease(lease, self._tell, self.clock.now))


def tell(encoder: JournalEncoder, what: Told | JournalCheckpoint) -> None:
    """Have a journal that is not the router's own record `what`."""
    encoder.batches.decided(what) if isinstance(what, Verdict) else encoder.record(what)
