"""Makes decisions: the pure core with the router's clock, index and log of decisions.

decide   one moment's view, the policy in force, the next seed
take     the decision counts: it is recorded with its promise, under a lease
lease    first token, bytes flowing, the end; each applied to the ledger
apply    the one way by which the state changes: fleet, heartbeats, promises, outcomes, policy. All of it is recorded
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

import msgspec

from indexer.embedded import OverlapColumns, RankView, is_blind
from kv_protocol.decided import RouteRequest
from kv_protocol.decision import Decision, Exclusion
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import (
    JournalRecord,
    LedgerApplied,
    OutcomeKnown,
    OutcomeName,
    PolicyChanged,
    Refused,
    TimePassed,
)
from kv_protocol.ledger import FirstToken, LedgerEvent, Renewed
from kv_protocol.splitmix import U64_MASK
from kv_runtime.clock import Clock
from router.decision.latency import latency_of
from router.decision.policy import Policy
from router.decision.recorders import Recorder
from router.decision.state import RouterState
from router.decision.verdict import Verdict
from router.decision.view import OverlapAnswer
from router.fleet.calibration import Calibration, Compared, Move
from router.fleet.trust import EXACT, Trust, trust_of

_MOVES_MAX = 256
_NOTES_MAX = 64
_RENEWALS = 4
"""How often a lease is renewed, at most, in the time in which it would expire."""
_COMPARED = (EXACT, trust_of((), "overpredicted"))
"""Trust in ranks of which the index predicts the reuse, and has no doubt."""


class OverlapIndex(Protocol):
    """The index of the blocks that ranks hold."""

    def columns(self, chain: bytes, ranks: tuple[WorkerRank, ...]) -> OverlapColumns:
        """Return how much of the prefix each rank holds, in the order of `ranks`, and each rank's doubt."""

    def overlap(self, sequence_hashes: Sequence[int], ranks: Sequence[WorkerRank]) -> Sequence[RankView]:
        """Return the same rank by rank, for callers that are not on the request path."""

    def catching_up(self) -> str:
        """Return the progress of the index at its start; empty once it has caught up with the log."""


class Readiness(NamedTuple):
    """Whether the router takes requests. `notes` are problems that do not prevent it."""

    ready: bool
    reasons: list[str]
    notes: list[str]


class DecisionRecord:
    """A verdict and, once known, its outcome."""

    __slots__ = ("outcome", "verdict")

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict
        self.outcome: OutcomeKnown | None = None

    @property
    def decision(self) -> Decision:
        """Return the decision for people; not cheap."""
        return self.verdict.decision()


class DecisionLog:
    """The newest decisions, for people: who asks for one by its id looks at all."""

    def __init__(self, decisions_max: int) -> None:
        self._records: deque[DecisionRecord] = deque(maxlen=decisions_max)
        self.added_total = 0

    def add(self, record: DecisionRecord) -> None:
        """Keep a decision; drop the oldest if there are too many."""
        self.added_total += 1
        self._records.append(record)

    def find(self, any_id: str) -> DecisionRecord | None:
        """Return the decision with this id, or a request's last one."""
        by_id = (each for each in self._records if each.verdict.request.decision_id == any_id)
        return next(by_id, None) or next(iter(self.of_request(any_id, 1)), None)

    def of_request(self, request_id: str, count_max: int) -> list[DecisionRecord]:
        """Return the newest decisions for the request, eldest first."""
        found = (each for each in reversed(self._records) if each.verdict.request.request_id == request_id)
        return list(islice(found, count_max))[::-1]

    @property
    def oldest(self) -> DecisionRecord | None:
        """The eldest decision that is kept."""
        return self._records[0] if self._records else None

    def newest(self, count: int) -> list[DecisionRecord]:
        """Return the newest decisions, newest first."""
        return list(islice(reversed(self._records), count))


class Lease(DecisionRecord):
    """The work of one request that is booked at one rank; only the first call of `end` has an effect."""

    __slots__ = ("_renewed_s", "_routing", "first_byte_s", "itl_s", "ttft_s")

    def __init__(self, routing: "Routing", verdict: Verdict) -> None:
        self.verdict, self.outcome, self._routing, self._renewed_s = verdict, None, routing, 0.0
        self.first_byte_s: float | None = None
        """From the decision to the answer's first byte; None until then."""
        self.ttft_s: float | None = None
        self.itl_s: float | None = None
        """As `latency_of` says; None until the end."""

    def first_token(self) -> None:
        """The answer has begun: the prompt is computed. Further calls do nothing."""
        if self.first_byte_s is None:
            self._renewed_s = self._routing.clock.now()
            self.first_byte_s = self._renewed_s - self.verdict.now_s
            self._routing.tell(FirstToken(lease_id=self.verdict.decision_id))

    def on_bytes(self) -> None:
        """Bytes of the answer came."""
        if self.first_byte_s is None:
            self.first_token()
            return
        now_s = self._routing.clock.now()
        if now_s - self._renewed_s >= self._routing.lease_s / _RENEWALS:
            self._renewed_s = now_s
            self._routing.tell(Renewed(lease_id=self.verdict.decision_id))

    def end(
        self,
        outcome: OutcomeName,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
        *,
        came_whole: bool = False,
        is_streamed: bool = True,
        later_tokens: int | None = None,
        decode_s: float | None = None,
    ) -> None:
        """The request ended at this rank: withdraw its promise.

        `cached_tokens` and `output_tokens` are the worker's counts of reused prompt tokens and of answered tokens;
        `came_whole`: the answer's first byte came with its last. The others are as in `latency_of`; `later_tokens`
        None: all of `output_tokens` but the first.
        """
        if self.outcome is not None:
            return
        routing, verdict = self._routing, self.verdict
        now_s = routing.clock.now()
        duration_s = now_s - verdict.now_s
        if came_whole and self.first_byte_s is None:
            self.first_byte_s = duration_s
        if later_tokens is None:
            later_tokens = (output_tokens or 1) - 1
        ttft_s, itl_s = latency_of(self.first_byte_s, duration_s, later_tokens, decode_s, is_streamed=is_streamed)
        self.ttft_s, self.itl_s = ttft_s, itl_s
        known = self.outcome = OutcomeKnown(
            now_s=now_s,
            decision_id=verdict.decision_id,
            outcome=outcome,
            cached_tokens=cached_tokens,
            ttft_s=ttft_s,
            duration_s=duration_s,
            output_tokens=output_tokens,
            itl_s=itl_s,
            came_whole=came_whole,
        )
        routing.state.end(known)
        for record in routing.records:
            record(known)


class Routing:
    """The decisions of one router."""

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
        recorders: Sequence[Recorder] = (),
        noted: Sequence[Callable[[], str]] = (),
    ) -> None:
        """Put the policy in force. `recorders` get all that is applied, the policy first.

        `noted` return further notes of `readiness`; empty: there is nothing to say.
        """
        self.state = state
        self.clock = clock
        self.decisions = DecisionLog(decisions_max)
        self._index = index
        self._seed = seed
        self.lease_s = lease_s
        self.records = [each.record for each in recorders]
        """Get all that is applied."""
        self._noted = noted
        self.calibration = Calibration()
        self._moves: deque[Move] = deque(maxlen=_MOVES_MAX)
        self.set_policy(policy)

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self.state.policy

    def set_policy(self, policy: Policy) -> None:
        """Put another policy in force. Its mode is one of the state's `modes`."""
        self.apply(PolicyChanged(now_s=self.clock.now(), policy=msgspec.to_builtins(policy)))

    def apply(self, record: JournalRecord) -> None:
        """Apply a record to the state, and hand it to the recorder."""
        self.state.apply(record)
        for tell in self.records:
            tell(record)

    def decide(self, request: RouteRequest) -> Verdict:
        """Return a decision for the request; nothing is promised yet.

        Raises:
            NoEligibleWorker: no rank is eligible.
            WorkerNotNamed: the mode requires the client to name a worker, and it did not.
        """
        ask = self._ask_doubtful if self.calibration.doubts else self._index.columns
        return self.state.decide(request, ask, self.clock.now(), self._seed)

    def _ask_doubtful(self, chain: bytes, ranks: tuple[WorkerRank, ...]) -> OverlapAnswer:
        """Ask the index, and the calibration for the ranks of which the index has no doubt."""
        answer = self._index.columns(chain, ranks)
        return answer._replace(doubts=self.calibration.doubts_of(ranks, answer.doubts))

    @property
    def match_s(self) -> float:
        """Seconds that the index took for the last decision."""
        return self.state.core.match_s

    @property
    def choose_s(self) -> float:
        """Seconds that the last decision took besides."""
        return self.state.core.choose_s

    def take(self, verdict: Verdict) -> Lease:
        """Carry out `verdict`: record it, and promise the work to the winner."""
        self._seed = self._seed + 1 & U64_MASK
        self.state.take(verdict)
        for record in self.records:
            record(verdict)
        lease = Lease(self, verdict)
        self.decisions.add(lease)
        return lease

    def refuse(self, request: RouteRequest, exclusions: tuple[Exclusion, ...]) -> None:
        """Record why no rank was eligible for the request."""
        asked = msgspec.structs.replace(request, sequence_hashes=b"") if request.sequence_hashes else request
        refused = Refused(now_s=self.clock.now(), request=asked, exclusions=exclusions)
        for record in self.records:
            record(refused)

    def tell(self, event: LedgerEvent) -> None:
        """Apply a ledger event now."""
        self.apply(LedgerApplied(now_s=self.clock.now(), event=event))

    def compare(self, verdict: Verdict, reported_tokens: int) -> None:
        """The winner answered, and reported how many tokens of the prompt it reused.

        Nothing is compared if the policy does not predict what requests in flight bring.
        """
        compared = compared_of(verdict, reported_tokens) if self.state.policy.predict_on_route else None
        if compared is not None:
            self._moves += self.calibration.apply(compared, self.clock.now())

    def moves(self) -> list[Move]:
        """Return the doubts that began and ended since the last call; the newest, if they are too many."""
        moves = list(self._moves)
        self._moves.clear()
        return moves

    def tick(self) -> list[JournalRecord]:
        """Apply the passing of time and the records that it causes; return those records."""
        now_s = self.clock.now()
        self.apply(TimePassed(now_s=now_s))
        brought = self.state.tick(now_s)
        for record in brought:
            self.apply(record)
        ranks = {rank for worker in self.state.fleet.workers() for rank in worker.registration.ranks}
        self._moves += self.calibration.tick(now_s, ranks)
        return brought

    def readiness(self) -> Readiness:
        """Return whether the router takes requests now, and why not.

        It does once the log was read and a rank can serve. What makes predictions worse is a note: a probe must not
        take all routers away for one worker.
        """
        now_s, fleet = self.clock.now(), self.state.fleet
        fit = [worker for worker in fleet.workers() if not fleet.unfit(worker, now_s)]
        every = [rank for worker in fit for rank in worker.registration.ranks]
        ranks = [rank for rank in every if not self.state.breakers.unfit(rank, now_s)]
        stale = {str(rank): view.stale for rank, view in zip(ranks, self._index.overlap((), ranks), strict=True)}
        notes = [] if fleet.is_log_connected else ["the event log is away: requests are routed from memory"]
        notes += [f"{rank}: {reason}" for rank, reason in stale.items() if is_blind(reason)]
        notes += filter(None, (each() for each in self._noted))
        progress = self._index.catching_up()
        reasons = [*([progress] if progress else []), *([] if ranks else ["no worker is fit"])]
        return Readiness(not reasons, reasons, notes[:_NOTES_MAX])

    def trust(self) -> dict[WorkerRank, Trust]:
        """Return the trust in what is known of each rank of the fleet."""
        fleet = self.state.fleet
        parity = fleet.parity(self.clock.now())
        ranks = [rank for worker in fleet.workers() for rank in worker.registration.ranks]
        views = zip(ranks, self._index.overlap((), ranks), strict=True)
        doubts = self.calibration.doubts
        return {rank: trust_of(parity[rank.worker_id], view.stale or doubts.get(rank, "")) for rank, view in views}


def compared_of(verdict: Verdict, reported_tokens: int) -> Compared | None:
    """Return what was predicted of the winner beside what it reported to reuse.

    None: the index was not asked, or had a doubt of its own.
    """
    place = verdict.place
    if verdict.is_blank or verdict.trusts[place] not in _COMPARED:
        return None
    block_size = verdict.request.block_size
    return Compared(
        rank=verdict.winner,
        epoch=verdict.epoch,
        decision_id=verdict.request.decision_id,
        block_size=block_size,
        held_tokens=(verdict.overlap_blocks - verdict.lost_blocks) * block_size,
        possible_tokens=max(verdict.expected_blocks, verdict.most_blocks) * block_size,
        reported_tokens=reported_tokens,
    )
