"""Planted bugs of keepers of snapshots and the log, and of ledgers of promised work."""

from collections.abc import Collection, Iterable

import msgspec

from indexer.service.retention import KeepingLimits, LogExtent, RetentionPlan, plan
from kv_protocol.ledger import FirstToken, LedgerEvent
from router.fleet.ledger import Ledger
from tests.simulation.planted import Planted

Names = Iterable[str]


def purges_before_snapshots(
    log: LogExtent, names: Names, now_ns: int, limits: KeepingLimits, **known: Collection[str]
) -> RetentionPlan:
    """Let go of a large log's beginning, whatever is covered."""
    planned = plan(log, names, now_ns, limits, **known)
    is_large = log.bytes_now > limits.log_bytes_max / 2
    return msgspec.structs.replace(planned, purge_up_to=log.last_seq if is_large else 0)


def purges_one_too_many(
    log: LogExtent, names: Names, now_ns: int, limits: KeepingLimits, **known: Collection[str]
) -> RetentionPlan:
    """Let go of the first message that no snapshot covers, too."""
    planned = plan(log, names, now_ns, limits, **known)
    return msgspec.structs.replace(planned, purge_up_to=planned.purge_up_to and planned.purge_up_to + 1)


def deletes_the_newest(
    log: LogExtent, names: Names, now_ns: int, limits: KeepingLimits, **known: Collection[str]
) -> RetentionPlan:
    """Let go of all snapshots but the oldest."""
    planned = plan(log, names := sorted(names), now_ns, limits, **known)
    return msgspec.structs.replace(planned, delete=tuple(names[1:]))


class LeaksEnded(Ledger):
    """Keeps the lease of a request that ended."""

    def end(self, lease_id: str) -> bool:
        return lease_id in self._leases


class LeaksPrefill(Ledger):
    """Takes a prompt for computed at its first token, and again at its end."""

    def apply(self, event: LedgerEvent, now_s: float, origin: str = "") -> None:
        lease = self._leases.get(event.lease_id) if isinstance(event, FirstToken) else None
        tokens = 0 if lease is None else lease.uncached_tokens
        super().apply(event, now_s, origin)
        if lease is not None:
            lease.uncached_tokens = tokens


PLAN = "indexer.service.retention.plan"
LEDGER = "tests.simulation.router.Ledger"

PLANTED = (
    Planted(PLAN, purges_before_snapshots, "calm", 20),
    Planted(PLAN, purges_one_too_many, "calm", 20),
    Planted(PLAN, deletes_the_newest, "calm", 20),
    Planted(LEDGER, LeaksEnded, "faulty", 20),
    Planted(LEDGER, LeaksPrefill, "faulty", 20),
)
