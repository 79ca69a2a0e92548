"""The ledger of promised work: what was routed and has not ended, per worker rank.

    Routed        blocks and uncached tokens are promised; the lease runs
    FirstToken    the uncached tokens are computed
    Renewed       the lease runs anew (bytes still flow)
    Finished, Cancelled, Expired    nothing is promised any more
    Reconciled    what the engine itself reports stands beside the promise

Blocks are counted once a rank, however many requests share them; one inverted index, block -> ranks, answers how many
of a new request's blocks a rank already works on. When nothing is in flight every sum is 0.
"""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from kv_protocol.ids import WorkerRank
from kv_protocol.ledger import Cancelled, Expired, Finished, FirstToken, LedgerEvent, Reconciled, Renewed, Routed


class RankLoad(msgspec.Struct, kw_only=True):
    """One rank's promises; `reported_*` is its engine's own word."""

    active_requests: int = 0
    active_blocks: int = 0
    prefill_tokens_queued: int = 0
    reported_running: int = 0
    reported_waiting: int = 0
    reported_used_blocks: int = 0


class _Lease(NamedTuple):
    routed: Routed
    rank: WorkerRank
    uncached_tokens: int
    expires_at_s: float


class Ledger:
    """All leases. Unknown leases and second endings change nothing."""

    def __init__(self, lease_s: float = 300.0) -> None:
        self._lease_s = lease_s
        self._leases: dict[str, _Lease] = {}  # in the order of their expiry
        self._loads: dict[WorkerRank, RankLoad] = {}
        self._ranks_of: dict[int, dict[WorkerRank, int]] = {}
        self._gone: set[WorkerRank] = set()  # forgotten, but for requests that have not ended
        self.expired_total = 0

    def apply(self, event: LedgerEvent, now_s: float) -> None:
        """Fold one event in."""
        match event:
            case Routed():
                self._book(event, now_s)
            case Reconciled():
                load = self._load(WorkerRank(event.worker_id, event.dp_rank))
                load.reported_running = event.running_requests
                load.reported_waiting = event.waiting_requests
                load.reported_used_blocks = event.used_blocks
            case FirstToken(lease_id=lease_id) | Renewed(lease_id=lease_id):
                self._renew(lease_id, now_s, prefilled=isinstance(event, FirstToken))
            case Finished(lease_id=lease_id) | Cancelled(lease_id=lease_id):
                self._end(lease_id)
            case Expired(lease_id=lease_id):
                self.expired_total += self._end(lease_id)

    def tick(self, now_s: float) -> list[Expired]:
        """Return the endings of leases whose time is over; the caller applies them, as any other event."""
        overdue = []
        for lease_id, lease in self._leases.items():
            if lease.expires_at_s > now_s:
                break
            overdue.append(Expired(lease_id=lease_id))
        return overdue

    def _load(self, rank: WorkerRank) -> RankLoad:
        self._gone.discard(rank)
        return self._loads.setdefault(rank, RankLoad())

    def _book(self, routed: Routed, now_s: float) -> None:
        if routed.lease_id in self._leases:
            return
        rank = WorkerRank(routed.worker_id, routed.dp_rank)
        self._leases[routed.lease_id] = _Lease(routed, rank, routed.uncached_tokens, now_s + self._lease_s)
        load = self._load(rank)
        load.active_requests += 1
        load.prefill_tokens_queued += routed.uncached_tokens
        load.active_blocks += routed.extra_blocks
        for block in routed.blocks:
            counts = self._ranks_of.setdefault(block, {})
            counts[rank] = counts.get(rank, 0) + 1
            load.active_blocks += counts[rank] == 1

    def _renew(self, lease_id: str, now_s: float, *, prefilled: bool) -> None:
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return
        if prefilled:
            self._loads[lease.rank].prefill_tokens_queued -= lease.uncached_tokens
            lease = lease._replace(uncached_tokens=0)
        self._leases[lease_id] = lease._replace(expires_at_s=now_s + self._lease_s)

    def _end(self, lease_id: str) -> bool:
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return False
        load = self._loads[lease.rank]
        load.active_requests -= 1
        load.prefill_tokens_queued -= lease.uncached_tokens
        load.active_blocks -= lease.routed.extra_blocks
        for block in lease.routed.blocks:
            counts = self._ranks_of[block]
            counts[lease.rank] -= 1
            if not counts[lease.rank]:
                del counts[lease.rank]
                load.active_blocks -= 1
            if not counts:
                del self._ranks_of[block]
        if lease.rank in self._gone and not load.active_requests:
            self._gone.discard(lease.rank)
            del self._loads[lease.rank]
        return True

    def load_of(self, rank: WorkerRank) -> RankLoad:
        """Return a copy of the rank's load; zeroes for an unknown one."""
        return msgspec.structs.replace(self._loads.get(rank, RankLoad()))

    def shared_blocks(self, blocks: Iterable[int]) -> dict[WorkerRank, int]:
        """Return, per rank that works on any, how many of these (distinct) blocks it already works on."""
        shared: dict[WorkerRank, int] = {}
        for block in blocks:
            for rank in self._ranks_of.get(block, ()):
                shared[rank] = shared.get(rank, 0) + 1
        return shared

    def forget(self, worker_id: str) -> None:
        """The worker is gone: what its engine reported counts no more, and of its ranks nothing once leases ended."""
        for rank in [rank for rank in self._loads if rank.worker_id == worker_id]:
            load = self._loads[rank]
            if load.active_requests:
                load.reported_running = load.reported_waiting = load.reported_used_blocks = 0
                self._gone.add(rank)
            else:
                del self._loads[rank]

    def loads(self) -> dict[WorkerRank, RankLoad]:
        """Return a copy of every rank's load."""
        return {rank: self.load_of(rank) for rank in self._loads}
