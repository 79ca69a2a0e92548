"""A `Routing` that tells of all that happens to its leases, in order: for tests that look at each."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, cast

from kv_protocol.journal import JournalRecord, LedgerApplied
from kv_protocol.ledger import FirstToken, Renewed
from router.decision.routing import Lease, Routing
from router.decision.verdict import Verdict
from router.journal.encoder import JournalCheckpoint, JournalEncoder

Told = JournalRecord | Verdict
"""What was applied: a record, or a decision that was carried out."""


class Watcher(Protocol):
    """Gets all that a router applies."""

    def record(self, what: Told) -> None:
        """`what` was applied."""


class _WatchedLease:
    """A lease that reports its first token, renewals and outcome."""

    def __init__(self, lease: Lease, tell: Callable[[Told], None]) -> None:
        self._lease, self._tell = lease, tell

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._lease, name)
        return partial(self._act, found) if callable(found) else found

    def _act(self, act: Callable[..., None], *given: Any, **named: Any) -> None:
        """Tell of the first token, the renewal or the end that the act brings."""
        lease = self._lease
        has_begun, renewed_s, before = lease.first_byte_s is not None, lease.renewed_s, lease.outcome
        act(*given, **named)
        if (known := lease.outcome) is not None:
            if before is None:
                self._tell(known)
        elif lease.first_byte_s is not None and (not has_begun or lease.renewed_s != renewed_s):
            event = (Renewed if has_begun else FirstToken)(lease_id=lease.verdict.decision_id)
            self._tell(LedgerApplied(now_s=lease.renewed_s, event=event))


class WatchedRouting(Routing):
    """A `Routing` that reports decisions, and events of their leases, to `watch`; `recorders` get all other records."""

    def __init__(self, *given: Any, watch: Sequence[Callable[[Told], None]], **named: Any) -> None:
        super().__init__(*given, **named)
        self._watch = watch

    def _tell(self, what: Told) -> None:
        for each in self._watch:
            each(what)

    def take(self, verdict: Verdict) -> Lease:
        """Carry out `verdict`, and tell of it."""
        lease = super().take(verdict)
        self._tell(verdict)
        return cast("Lease", _WatchedLease(lease, self._tell))


def tell(encoder: JournalEncoder, what: Told | JournalCheckpoint) -> None:
    """Have a journal that is not the router's own record `what`."""
    encoder.journal.decided(what) if isinstance(what, Verdict) else encoder.record(what)
