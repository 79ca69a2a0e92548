"""Sessions and the ranks that serve them: a fold over ledger events.

    routed                      its session is bound to the rank, replacing any former binding, and is in flight
    its last lease ends         the idle time of `idle_s` starts
    idle for `idle_s`           the binding ends
    worker forgotten            the bindings to its ranks end
    more than `sessions_max`    the session that has been idle longest is evicted; if all are in flight, the oldest

The policy says what a binding means: `hard`, the bound rank takes the request if it is eligible; `soft`, it costs less
there. If the bound rank is not eligible (unfit, gone, failed it), the request is placed like any other, and binds its
session anew.
"""

from collections.abc import Iterable
from typing import NamedTuple

from kv_protocol.ids import WorkerRank
from kv_protocol.ledger import Cancelled, Expired, Finished, LedgerEvent, Routed
from router.journal.checkpoint_rows import AffinityTotals, BoundRow, IdleRow, SessionLeaseRow


class AffinityLimits(NamedTuple):
    """How long an idle session stays bound (seconds), and how many sessions are kept."""

    idle_s: float = 600.0
    sessions_max: int = 65_536


class AffinityStatistics(NamedTuple):
    """Bound sessions, and how many of them are in flight; evicted bindings, and bindings that changed their rank."""

    sessions: int
    in_flight: int
    evicted_total: int
    moved_total: int


class _Idle(NamedTuple):
    rank: WorkerRank
    until_s: float


class _Session:
    """A session in flight."""

    __slots__ = ("leases", "name", "rank")

    def __init__(self, name: str, rank: WorkerRank) -> None:
        self.name = name
        self.rank = rank
        self.leases = 0


class Affinity:
    """All bindings. Unknown leases and second endings change nothing; `now_s` never decreases."""

    def __init__(self, limits: AffinityLimits | None = None) -> None:
        self._limits = limits or AffinityLimits()
        self._busy: dict[str, _Session] = {}  # in flight; in the order in which they became so
        self._idle: dict[str, _Idle] = {}  # in the order in which they became so, which is that of their expiry
        self._of_lease: dict[str, _Session] = {}
        self._evicted = self._moved = 0

    def apply(self, event: LedgerEvent, now_s: float) -> None:
        """Fold one event in. Events without a session are ignored."""
        match event:
            case Routed(session_id=session_id) if session_id:
                self._bind(event, now_s)
            case _ if not self._of_lease:
                pass
            case Finished(lease_id=lease_id) | Cancelled(lease_id=lease_id) | Expired(lease_id=lease_id):
                self.end(lease_id, now_s)
            case _:
                pass

    def _bind(self, routed: Routed, now_s: float) -> None:
        if routed.lease_id in self._of_lease:
            return
        self.tick(now_s)
        name, rank = routed.session_id, WorkerRank(routed.worker_id, routed.dp_rank)
        session = self._busy.get(name)
        if session is None:
            idle = self._idle.pop(name, None)
            session = _Session(name, rank if idle is None else idle.rank)
        self._moved += session.rank != rank
        session.rank = rank
        session.leases += 1
        self._busy[name] = self._of_lease[routed.lease_id] = session
        if len(self._busy) + len(self._idle) > self._limits.sessions_max:
            self._evict()

    def _evict(self) -> None:
        if self._idle:
            del self._idle[next(iter(self._idle))]
        else:
            del self._busy[next(iter(self._busy))]
        self._evicted += 1

    def end(self, lease_id: str, now_s: float) -> None:
        """The lease is over, in whatever way."""
        session = self._of_lease.pop(lease_id, None)
        if session is None:
            return
        session.leases -= 1
        if not session.leases and self._busy.get(session.name) is session:
            del self._busy[session.name]
            self._idle[session.name] = _Idle(session.rank, now_s + self._limits.idle_s)

    def bound(self, session_id: str, now_s: float) -> WorkerRank | None:
        """Return the rank that the session is bound to; None if it is not bound, or has no name."""
        if not session_id:
            return None
        session = self._busy.get(session_id)
        if session is not None:
            return session.rank
        idle = self._idle.get(session_id)
        return idle.rank if idle is not None and now_s < idle.until_s else None

    def forget(self, worker_id: str) -> None:
        """Unbind the sessions of a worker that left or restarted."""
        for name in [name for name, session in self._busy.items() if session.rank.worker_id == worker_id]:
            del self._busy[name]
        for name in [name for name, idle in self._idle.items() if idle.rank.worker_id == worker_id]:
            del self._idle[name]

    def tick(self, now_s: float) -> None:
        """Drop expired sessions; answers do not change by that."""
        while self._idle:
            name, idle = next(iter(self._idle.items()))
            if now_s < idle.until_s:
                return
            del self._idle[name]

    # --------------------------------------------------------------------------------------------- checkpoints

    def totals_row(self) -> AffinityTotals:
        """Return the row for a checkpoint."""
        return AffinityTotals(self._evicted, self._moved)

    def restore_totals(self, row: AffinityTotals) -> None:
        """Restore the totals from the row."""
        self._evicted, self._moved = row

    def bound_rows(self) -> list[BoundRow]:
        """Return the rows for a checkpoint."""
        return [BoundRow(name, session.rank) for name, session in self._busy.items()]

    def restore_bound(self, row: BoundRow) -> None:
        """Restore a session in flight; its leases follow."""
        self._busy[row.name] = _Session(row.name, row.rank)

    def idle_rows(self) -> Iterable[IdleRow]:
        """Return the rows for a checkpoint, made when they are read."""
        return map(_idle_row, self._idle.copy().items())

    def restore_idle(self, row: IdleRow) -> None:
        """Restore a session without a lease."""
        self._idle[row.name] = _Idle(row.rank, row.until_s)

    def lease_rows(self) -> list[SessionLeaseRow]:
        """Return the rows for a checkpoint."""
        busy = self._busy
        return [
            SessionLeaseRow(lease_id, session.name if busy.get(session.name) is session else None)
            for lease_id, session in self._of_lease.items()
        ]

    def restore_lease(self, row: SessionLeaseRow) -> None:
        """Restore a lease of a session that was restored before."""
        session = _Session("", WorkerRank("", 0)) if row.name is None else self._busy[row.name]
        session.leases += 1
        self._of_lease[row.lease_id] = session

    def statistics(self) -> AffinityStatistics:
        """Return current figures and totals."""
        return AffinityStatistics(
            sessions=len(self._busy) + len(self._idle),
            in_flight=len(self._busy),
            evicted_total=self._evicted,
            moved_total=self._moved,
        )


def _idle_row(item: tuple[str, _Idle]) -> IdleRow:
    name, idle = item
    return IdleRow(name, idle.rank, idle.until_s)
