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

from dataclasses import dataclass
from typing import Any

from kv_protocol.ids import WorkerRank
from kv_protocol.ledger import Routed


@dataclass(eq=False)
class Session:
    """A session in flight."""

    name: str
    rank: WorkerRank


class Affinity:
    """All bindings. Unknown leases and second endings change nothing; `now_s` never decreases."""

    def __init__(self, idle_s: float, sessions_max: int) -> None:
        self.idle_s, self.sessions_max = idle_s, sessions_max
        self.busy: dict[str, Session] = {}  # in flight; in the order in which they became so
        self.idle: dict[str, tuple[WorkerRank, float]] = {}  # with the time of their expiry; in its order
        self.of_lease: dict[str, Session] = {}
        self.evicted = self.moved = 0

    def routed(self, routed: Routed, now_s: float) -> None:
        """Bind the request's session, if it has one."""
        name, rank = routed.session_id, WorkerRank(routed.worker_id, routed.dp_rank)
        if not name or routed.lease_id in self.of_lease:
            return
        self.tick(now_s)
        session = self.busy.get(name)
        if session is None:
            session = Session(name, self.idle.pop(name, (rank, 0.0))[0])
        self.moved += session.rank != rank
        session.rank = rank
        self.busy[name] = self.of_lease[routed.lease_id] = session
        if len(self.busy) + len(self.idle) > self.sessions_max:
            evicted_from: dict[str, Any] = self.idle or self.busy
            del evicted_from[next(iter(evicted_from))]
            self.evicted += 1

    def end(self, lease_id: str, now_s: float) -> None:
        session = self.of_lease.pop(lease_id, None)
        if session is None or session in self.of_lease.values() or self.busy.get(session.name) is not session:
            return
        del self.busy[session.name]
        self.idle[session.name] = session.rank, now_s + self.idle_s

    def bound(self, name: str, now_s: float) -> WorkerRank | None:
        """Return the rank that the session is bound to; None if it is not bound, or has no name."""
        if name in self.busy:
            return self.busy[name].rank
        rank, until_s = self.idle.get(name, (None, now_s))
        return rank if now_s < until_s else None

    def forget(self, worker_id: str) -> None:
        self.busy = {name: each for name, each in self.busy.items() if each.rank.worker_id != worker_id}
        self.idle = {name: each for name, each in self.idle.items() if each[0].worker_id != worker_id}

    def tick(self, now_s: float) -> None:
        self.idle = {name: each for name, each in self.idle.items() if now_s < each[1]}

    def name_of(self, lease_id: str) -> str:
        """Return the lease's session; empty: it has none, or one that is bound no more."""
        session = self.of_lease.get(lease_id)
        return session.name if session is not None and self.busy.get(session.name) is session else ""

    def tables(self) -> dict[str, list[Any]]:
        """Return the rows for a checkpoint; those of leases name their sessions."""
        return {
            "totals": [self.evicted, self.moved],
            "bound": [(name, each.rank) for name, each in self.busy.items()],
            "idle": [(name, *each) for name, each in self.idle.items()],
        }
