"""The ledger of promised work: what was routed to each rank and has not ended.

    Routed        blocks and uncached tokens are promised; the lease runs
    FirstToken    the uncached tokens are computed
    Renewed       the lease is extended (bytes still flow)
    Finished, Cancelled, Expired    the promise ends
    Unreported    the engine's reports are dropped

Blocks are counted once per rank, however many requests share them. When nothing is in flight, and no engine reports
foreign requests, every sum is 0. Replicas' leases are leases like any other, and end by the same events. `origin` names
their owner: only the owner corrects them by what engines report, so that all of its replicas do the same.

A report and a promise never refer to the same moment: a request, or its end, is in transit. So a difference counts only
if the newest `REPORTS` reports all show it, and only as much of it as the least of them shows:

    foreign  = max(0, min over the newest reports of (running + waiting - promised then))
    excess   = max(0, settled - max over the newest reports of (running + waiting))

`settled` are the open leases that were booked before the report that preceded these, so that each of these could have
shown them. `foreign` requests are load of other clients: they count as active requests. A tick ends the eldest settled
leases, as many as the `excess`, but none that was renewed within `SILENT_S`. With fewer reports both are 0; an engine
without reports for `UNREPORTED_S` (an idle one does not report) is treated like one that never reported.

A rank whose worker left stays until its leases have ended.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kv_protocol.ids import WorkerRank
from kv_protocol.ledger import Expired, FirstToken, LedgerEvent, Renewed, Routed, Unreported
from kv_protocol.load import LoadReport
from tests.reference.chains import blocks_of, depth

SILENT_S = 10.0
"""A lease renewed within this time is not ended because its engine reports fewer requests."""
REPORTS = 5
UNREPORTED_S = 5.0


@dataclass
class Lease:
    """A promise. `generation`: the number of reports of its rank before it was booked."""

    routed: Routed
    rank: WorkerRank
    origin: str
    uncached_tokens: int
    generation: int
    expires_at_s: float


@dataclass
class RankReports:
    """A rank, and what its engine reports; of the newest reports, requests, and how many more than were promised."""

    is_gone: bool = False
    generation: int = 0
    newest: tuple[int, int, int] = (0, 0, 0)
    foreign: int = 0
    excess: int = 0
    running: list[int] = field(default_factory=list)
    surpluses: list[int] = field(default_factory=list)
    reported_at_s: float | None = None

    def withdraw(self) -> None:
        self.newest, self.foreign, self.excess = (0, 0, 0), 0, 0
        self.running, self.surpluses, self.reported_at_s = [], [], None

    def is_settled(self, lease: Lease) -> bool:
        """Return whether the lease was booked before all of the newest reports, and the one before them."""
        return lease.generation < self.generation - REPORTS


class Load(NamedTuple):
    """Of one rank.

    Uncached tokens before their first token; requests, with foreign ones; distinct blocks; blocks of a chain in use.
    """

    queued_tokens: int
    active_requests: int
    active_blocks: int
    shared_blocks: int


class Ledger:
    """All leases. Unknown leases and second endings change nothing."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self.leases: dict[str, Lease] = {}  # in the order of their expiry
        self.ranks: dict[WorkerRank, RankReports] = {}
        self.expired = self.corrected = 0

    def apply(self, event: LedgerEvent, now_s: float, origin: str = "") -> None:
        """Fold one event in. `origin` is the router that owns the lease; empty: this one."""
        match event:
            case Routed():
                self._book(event, now_s, origin)
            case FirstToken() | Renewed():
                self._renew(event, now_s)
            case Unreported():
                at = self.ranks.get(WorkerRank(event.worker_id, event.dp_rank))
                if at is not None:
                    at.withdraw()
            case Expired():
                is_ended = self.end(event.lease_id)
                self.expired += is_ended and event.cause == "silence"
                self.corrected += is_ended and event.cause == "engine"
            case _:
                self.end(event.lease_id)

    def tick(self, now_s: float) -> list[Expired | Unreported]:
        """Return the events that the passing of time causes; the caller applies them, or gets them again.

        These are endings of expired leases, and of own leases that an engine does not report; and the engines that have
        stopped reporting.
        """
        events: list[Expired | Unreported] = [
            Expired(lease_id=lease_id) for lease_id, lease in self.leases.items() if lease.expires_at_s <= now_s
        ]
        for rank, at in self.ranks.items():
            unknown = [
                (lease_id, lease)
                for lease_id, lease in self.leases.items()
                if lease.rank == rank and at.is_settled(lease) and lease.expires_at_s - self.lease_s <= now_s - SILENT_S
            ]
            events += [
                Expired(lease_id=lease_id, cause="engine")
                for lease_id, lease in unknown[: at.excess]
                if not lease.origin and lease.expires_at_s > now_s
            ]
            if at.reported_at_s is not None and now_s - at.reported_at_s >= UNREPORTED_S:
                events.append(Unreported(worker_id=rank.worker_id, dp_rank=rank.dp_rank))
        return events

    def of_rank(self, rank: WorkerRank) -> list[Lease]:
        return [lease for lease in self.leases.values() if lease.rank == rank]

    def _known(self, rank: WorkerRank) -> RankReports:
        at = self.ranks.setdefault(rank, RankReports())
        at.is_gone = False
        return at

    def _book(self, routed: Routed, now_s: float, origin: str) -> None:
        if routed.lease_id in self.leases:
            return
        rank = WorkerRank(routed.worker_id, routed.dp_rank)
        generation = self._known(rank).generation
        self.leases[routed.lease_id] = Lease(
            routed, rank, origin, routed.uncached_tokens, generation, now_s + self.lease_s
        )

    def _renew(self, event: FirstToken | Renewed, now_s: float) -> None:
        lease = self.leases.pop(event.lease_id, None)
        if lease is None:
            return
        if isinstance(event, FirstToken):
            lease.uncached_tokens = 0
        lease.expires_at_s = now_s + self.lease_s
        self.leases[event.lease_id] = lease

    def end(self, lease_id: str) -> bool:
        """The lease is over, in whatever way; return whether it was known."""
        lease = self.leases.pop(lease_id, None)
        if lease is None:
            return False
        at = self.ranks[lease.rank]
        if at.is_settled(lease):
            at.excess = max(0, at.excess - 1)
        self._drop_if_over(lease.rank)
        return True

    def _drop_if_over(self, rank: WorkerRank) -> None:
        if self.ranks[rank].is_gone and not self.of_rank(rank):
            del self.ranks[rank]

    def reconcile(self, rank: WorkerRank, report: LoadReport, now_s: float) -> None:
        """The rank's engine reported its load."""
        at, leases = self._known(rank), self.of_rank(rank)
        at.newest = (report.running_requests, report.waiting_requests, report.used_blocks)
        at.reported_at_s = now_s
        running = report.running_requests + report.waiting_requests
        at.running = [*at.running, running][-REPORTS:]
        at.surpluses = [*at.surpluses, running - len(leases)][-REPORTS:]
        at.generation += 1
        at.foreign = at.excess = 0
        if len(at.running) == REPORTS:
            at.foreign = max(0, min(at.surpluses))
            at.excess = max(0, sum(map(at.is_settled, leases)) - max(at.running))

    def forget(self, worker_id: str) -> None:
        """Drop the reports of a worker that left, and its ranks once their leases ended."""
        for rank in [rank for rank in self.ranks if rank.worker_id == worker_id]:
            self.ranks[rank].withdraw()
            self.ranks[rank].is_gone = True
            self._drop_if_over(rank)

    def mark_gone(self, rank: WorkerRank) -> None:
        """Mark the rank of an unregistered worker: it is dropped once its leases have ended."""
        if rank in self.ranks:
            self.ranks[rank].is_gone = True

    def load(self, rank: WorkerRank, chain: bytes = b"") -> Load:
        """Return the rank's load; its last number is about `chain`."""
        leases, blocks = self.of_rank(rank), blocks_of(lease.routed.blocks for lease in self.of_rank(rank))
        return Load(
            sum(lease.uncached_tokens for lease in leases),
            len(leases) + (self.ranks[rank].foreign if rank in self.ranks else 0),
            len(blocks) + sum(lease.routed.extra_blocks for lease in leases),
            depth(chain, blocks),
        )

    def _reports_row(self, rank: WorkerRank, at: RankReports) -> tuple[Any, ...]:
        """Return the rank's reports; `young` are its leases that are not settled, by generation, in a ring."""
        young = [0] * (REPORTS + 1)
        for lease in self.of_rank(rank):
            young[lease.generation % len(young)] += not at.is_settled(lease)
        return (
            at.generation, young, at.newest, at.foreign, at.excess, at.running, at.surpluses, at.reported_at_s
        )  # fmt: skip

    def tables(self) -> dict[str, list[Any]]:
        """Return the rows for a checkpoint; those of leases are only begun."""
        return {
            "totals": [self.expired, self.corrected],
            "ranks": [(rank, at.is_gone, self._reports_row(rank, at)) for rank, at in self.ranks.items()],
            "leases": [
                (
                    lease_id, lease.rank, lease.origin, lease.routed.blocks, lease.uncached_tokens,
                    lease.routed.extra_blocks, lease.generation, lease.expires_at_s, lease.routed.epoch,
                )
                for lease_id, lease in self.leases.items()
            ],
        }  # fmt: skip
