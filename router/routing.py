"""Decisions in motion: the pure core with the router's clock, index and log of decisions around it.

decide   one moment's view, the policy in force, the next seed
take     the decision counts: it is recorded, and its work is promised under a lease
lease    first token, bytes flowing, the end; each told to the ledger
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from indexer.embedded import RankView, is_blind
from kv_protocol.decision import Decision
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import BreakerChanged, Decided, LedgerApplied, OutcomeKnown
from kv_protocol.ledger import Cancelled, Finished, FirstToken, LedgerEvent, Renewed, Routed
from kv_protocol.splitmix import splitmix64
from kv_runtime.clock import Clock
from router.core.decide import Policy, decide
from router.core.state import Overlap, RouterState
from router.core.trust import Trust, trust_of
from router.core.view import RouteRequest

OutcomeName = Literal["ok", "refused", "failed", "cancelled"]


class OverlapIndex(Protocol):
    """Whoever knows what the ranks hold."""

    def overlap(self, sequence_hashes: Sequence[int], ranks: Sequence[WorkerRank]) -> Sequence[RankView]:
        """Return how much of the prefix each rank holds, in the order of `ranks`, and what is wrong with each."""

    def catching_up(self) -> str:
        """Return how far the index has come at its start; empty once it has caught up with the log."""


class Readiness(msgspec.Struct, frozen=True):
    """Whether requests should be sent here. `notes` say what is not as it should be, and keeps nobody from it."""

    ready: bool
    reasons: list[str]
    notes: list[str]


class DecisionRecord(msgspec.Struct, kw_only=True):
    """A decision and, once known, its outcome."""

    decision: Decision
    outcome: OutcomeKnown | None = None


class DecisionLog:
    """The newest decisions, by their id and by their request's."""

    def __init__(self, decisions_max: int) -> None:
        self._decisions_max = decisions_max
        self._records: OrderedDict[str, DecisionRecord] = OrderedDict()
        self._of_request: dict[str, str] = {}

    def add(self, decision: Decision) -> DecisionRecord:
        """Keep a decision; the oldest gives way."""
        record = self._records[decision.decision_id] = DecisionRecord(decision=decision)
        self._of_request[decision.request_id] = decision.decision_id
        if len(self._records) > self._decisions_max:
            decision_id, oldest = self._records.popitem(last=False)
            if self._of_request.get(oldest.decision.request_id) == decision_id:
                del self._of_request[oldest.decision.request_id]
        return record

    def find(self, any_id: str) -> DecisionRecord | None:
        """Return the decision with this id, or a request's last one."""
        return self._records.get(any_id) or self._records.get(self._of_request.get(any_id, ""))

    def newest(self, count: int) -> list[DecisionRecord]:
        """Return the newest decisions, newest first."""
        return list(reversed(self._records.values()))[:count]


class Lease:
    """One request's promise at one rank; `end` is idempotent."""

    def __init__(self, routing: "Routing", record: DecisionRecord, lease_s: float) -> None:
        self._routing = routing
        self._record = record
        self._renew_every_s = lease_s / 4
        self._began_s = self._renewed_s = routing.clock.now()
        self._first_token_s: float | None = None
        self._ended = False

    @property
    def ttft_s(self) -> float | None:
        """From being routed to the first byte of the answer."""
        return None if self._first_token_s is None else self._first_token_s - self._began_s

    def on_bytes(self) -> None:
        """Bytes of the answer have come."""
        lease_id = self._record.decision.decision_id
        now_s = self._routing.clock.now()
        if self._first_token_s is None:
            self._first_token_s = self._renewed_s = now_s
            self._routing.tell(FirstToken(lease_id=lease_id))
        elif now_s - self._renewed_s >= self._renew_every_s:
            self._renewed_s = now_s
            self._routing.tell(Renewed(lease_id=lease_id))

    def end(self, outcome: OutcomeName, cached_tokens: int | None = None) -> None:
        """The request is over at this rank; nothing is promised any more."""
        if self._ended:
            return
        self._ended = True
        decision_id = self._record.decision.decision_id
        ended = Cancelled(lease_id=decision_id) if outcome == "cancelled" else Finished(lease_id=decision_id)
        self._routing.tell(ended)
        now_s = self._routing.clock.now()
        self._record.outcome = OutcomeKnown(
            now_s=now_s,
            decision_id=decision_id,
            outcome=outcome,
            cached_tokens=cached_tokens,
            ttft_s=self.ttft_s,
            duration_s=now_s - self._began_s,
        )


class Routing:
    """One router's decisions."""

    def __init__(
        self,
        state: RouterState,
        index: OverlapIndex,
        clock: Clock,
        policy: Policy,
        *,
        seed: int,
        lease_s: float,
        decisions_max: int,
    ) -> None:
        self.state = state
        self.clock = clock
        self.policy = policy
        self.decisions = DecisionLog(decisions_max)
        self._index = index
        self._seed = seed
        self._lease_s = lease_s
        self._taken = 0

    def decide(self, request: RouteRequest) -> Decision:
        """Return who should take the request; nothing is promised yet. Raises `NoEligibleWorker`."""
        predict_on_route = self.policy.predict_on_route
        view = self.state.view(request, self._overlap, self.clock.now(), predict_on_route=predict_on_route)
        return decide(view, request, self.policy, splitmix64(self._seed + self._taken))

    def take(self, request: RouteRequest, decision: Decision) -> Lease:
        """The request goes where `decision` says: recorded and promised."""
        now_s, chosen = self.clock.now(), decision.chosen
        self._taken += 1
        self.state.apply(Decided(now_s=now_s, decision=decision, sequence_hashes=request.sequence_hashes))
        held = min(chosen.expected_blocks, request.reusable_blocks)
        self.tell(
            Routed(
                lease_id=decision.decision_id,
                worker_id=chosen.worker_id,
                dp_rank=chosen.dp_rank,
                blocks=request.sequence_hashes,
                uncached_tokens=request.isl_tokens - held * request.block_size,
                extra_blocks=int(request.isl_tokens % request.block_size > 0),
                epoch=chosen.epoch,
            )
        )
        return Lease(self, self.decisions.add(decision), self._lease_s)

    def tell(self, event: LedgerEvent) -> None:
        """Apply a ledger event now."""
        self.state.apply(LedgerApplied(now_s=self.clock.now(), event=event))

    def open_breaker(self, worker_id: str, reason: str, open_s: float) -> None:
        """The worker failed: leave it alone for a while."""
        now_s = self.clock.now()
        self.state.apply(BreakerChanged(now_s=now_s, worker_id=worker_id, reason=reason, open_until_s=now_s + open_s))

    def readiness(self) -> Readiness:
        """Return whether requests should be sent here now, and why not.

        A log that is away is no reason: requests are routed from memory.
        """
        reasons = self.unready()
        notes = [] if self.state.fleet.is_log_heard else ["the event log is away: requests are routed from memory"]
        return Readiness(not reasons, reasons, notes)

    def unready(self) -> list[str]:
        """Return why requests would be refused or routed blindly now; nothing when all is well.

        An overfull rank is served by what fitted in the index: a full index is no reason to take no requests.
        """
        now_s, fleet = self.clock.now(), self.state.fleet
        fit = [worker for worker in fleet.workers() if not fleet.unfit(worker, now_s)]
        ranks = [rank for worker in fit for rank in worker.registration.ranks]
        views = zip(ranks, self._index.overlap((), ranks), strict=True)
        blind = [f"{rank}: {view.stale}" for rank, view in views if is_blind(view.stale)]
        progress = self._index.catching_up()
        return [*([progress] if progress else []), *(blind if fit else ["no worker is fit"])]

    def trust(self) -> dict[WorkerRank, Trust]:
        """Return how far what is known of each rank of the fleet is trusted now."""
        fleet = self.state.fleet
        parity = fleet.parity(self.clock.now())
        ranks = [rank for worker in fleet.workers() for rank in worker.registration.ranks]
        views = zip(ranks, self._index.overlap((), ranks), strict=True)
        return {rank: trust_of(parity[rank.worker_id], view.stale) for rank, view in views}

    def _overlap(self, sequence_hashes: Sequence[int], ranks: Sequence[WorkerRank]) -> list[Overlap]:
        views = self._index.overlap(sequence_hashes, ranks)
        return [(view.overlap_blocks, view.epoch, view.seq, view.stale) for view in views]
