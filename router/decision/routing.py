"""Makes decisions: the pure core with the router's clock, index and log of decisions.

decide   makes a decision by the view of one moment, the policy in force and the next seed
take     carries a decision out: books its work at the rank, under a lease, and records it
lease    applies and records first token, flowing bytes and end of the answer (`router/native/leases.cpp`)
apply    applies and records anything else that changes the state: fleet events, heartbeats, policies
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

import msgspec

from indexer.embedded import OverlapColumns, is_blind
from kv_protocol.decided import RouteRequest
from kv_protocol.decision import Decision, Exclusion
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import JournalRecord, OutcomeKnown, PolicyChanged, Refused, TimePassed
from kv_protocol.splitmix import U64_MASK
from kv_runtime.clock import Clock
from router.decision.policy import Policy
from router.decision.state import RouterState
from router.decision.verdict import Verdict
from router.decision.view import OverlapAnswer
from router.fleet.trust import EXACT, Calibration, Compared, Trust, trust_of
from router.native import built

_NOTES_MAX = 64
_outcome_in = msgspec.msgpack.Decoder(OutcomeKnown).decode
_RENEWALS = 4
"""Largest number of renewals within the duration of a lease."""
_COMPARED = (EXACT, trust_of((), "overpredicted"))
"""Trust in a rank that the index does not doubt: without and with a doubt of the calibration."""


class OverlapIndex(Protocol):
    """The index of the blocks that ranks hold."""

    def columns(self, chain: bytes, ranks: tuple[WorkerRank, ...]) -> OverlapColumns:
        """Return how much of the prefix each rank holds, in the order of `ranks`, and each rank's doubt."""

    def catching_up(self) -> str:
        """Return the progress of the index at its start; empty once it has caught up with the log."""


class Readiness(NamedTuple):
    """Whether the router takes requests. `notes` are problems that do not prevent it."""

    ready: bool
    reasons: list[str]
    notes: list[str]


class Lease(built.Lease):
    """The work of a decision at one rank, and its outcome. Its creation books the work and records the decision.

    first_token   the answer has begun: the prompt is computed. Further calls do nothing
    on_bytes      bytes of the answer came: `first_token`, later a renewal, at most `_RENEWALS` in a lease's duration
    end           the request ended at this rank: its promise is withdrawn. No call has an effect after the first `end`.
                  `answer` is what a complete answer says (`router/native/answer.hpp`); `sums` count it if it is ok.
                  Requests end theirs only in `FleetRecords.settle` (`router/request/records.py`). A lease that is not
                  ended, and gets no bytes, expires after the duration of a lease
    first_byte_s  seconds from the decision to the answer's first byte; None until then
    ttft_s, itl_s as `latency_of` of `router/native/answer.hpp` says; None until the end
    number        which of the router's leases it is, from 1
    """

    __slots__ = ()
    verdict: Verdict

    @property
    def outcome(self) -> OutcomeKnown | None:
        """The outcome of the decision; None: the request runs."""
        return _outcome_in(self.ended) if self.ended else None

    @property
    def decision(self) -> Decision:
        """Return the decision for people; not cheap."""
        return self.verdict.decision()


class DecisionLog:
    """The newest decisions, for people. A look-up by id goes through all of them."""

    def __init__(self, decisions_max: int) -> None:
        self._leases: deque[Lease] = deque(maxlen=decisions_max)

    def add(self, lease: Lease) -> None:
        """Keep a decision. If there are too many, the oldest is dropped; if it is open, it keeps only its winner."""
        if len(self._leases) == self._leases.maxlen and not self._leases[0].ended:
            self._leases[0].verdict.forget_others()
        self._leases.append(lease)

    @property
    def added_total(self) -> int:
        """How many decisions there were."""
        return self._leases[-1].number if self._leases else 0

    def since(self, number: int, count_max: int) -> list[Lease]:
        """Return the decisions after the one with this number, newest first, at most the newest `count_max`."""
        return self.newest(min(self.added_total - number, count_max))

    def find(self, any_id: str) -> Lease | None:
        """Return the decision with this id, or the last one of the request with this id; None: none is kept."""
        by_id = (each for each in self._leases if each.verdict.request.decision_id == any_id)
        return next(by_id, None) or next(iter(self.of_request(any_id, 1)), None)

    def of_request(self, request_id: str, count_max: int) -> list[Lease]:
        """Return the newest decisions for the request, eldest first."""
        found = (each for each in reversed(self._leases) if each.verdict.request.request_id == request_id)
        return list(islice(found, count_max))[::-1]

    @property
    def oldest(self) -> Lease | None:
        """The eldest decision that is kept; None: there was none yet."""
        return self._leases[0] if self._leases else None

    def newest(self, count: int) -> list[Lease]:
        """Return the newest decisions, newest first."""
        return list(islice(reversed(self._leases), count))


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
        journal: built.Journal | None = None,
        recorders: Sequence[Callable[[JournalRecord], object]] = (),
        noted: Sequence[Callable[[], str]] = (),
    ) -> None:
        """Put the policy in force.

        `journal` gets the records of leases; `recorders` are called with all other records, in order, the policy's
        first. Each of `noted` returns a further note of `readiness`; empty: no note.
        """
        self.state = state
        self.clock = clock
        self.decisions = DecisionLog(decisions_max)
        self._index = index
        self._seed = seed
        self.leases = built.Leases(Lease, state.core, clock.now, lease_s / _RENEWALS, state.breakers, journal)
        self.records = list(recorders)
        """Called with every record except those of leases."""
        self.listeners = defaultdict[type[JournalRecord], list[Callable[[Any], object]]](list)
        """Called, after `records`, with the records of one type."""
        self._noted = noted
        self.calibration = Calibration()
        self._trust: dict[WorkerRank, Trust] = {}
        self._trust_of: object = None
        """What `_trust` was made of: the ranks, how their workers differ, and the doubts of their streams."""
        self.set_policy(policy)

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self.state.policy

    def set_policy(self, policy: Policy) -> None:
        """Put another policy in force. Its mode is one of the state's `modes`."""
        self.apply(PolicyChanged(now_s=self.clock.now(), policy=msgspec.to_builtins(policy)))

    def apply(self, record: JournalRecord) -> None:
        """Apply a record to the state, and hand it to the recorders."""
        self.state.apply(record)
        for tell in (*self.records, *self.listeners.get(type(record), ())):
            tell(record)

    def decide(self, request: RouteRequest) -> Verdict:
        """Return a decision for the request; nothing is promised yet.

        Raises:
            NoEligibleWorker: no rank is eligible.
            WorkerNotNamed: the mode requires the client to name a worker, and it did not.
        """
        ask = self._ask_doubtful if self.calibration.evidence else self._index.columns
        return self.state.decide(request, ask, self.clock.now(), self._seed)

    def _ask_doubtful(self, chain: bytes, ranks: tuple[WorkerRank, ...]) -> OverlapAnswer:
        """Ask the index, and the calibration for ranks that the index does not doubt."""
        answer = self._index.columns(chain, ranks)
        return answer._replace(doubts=self.calibration.doubts_of(ranks, answer.doubts))

    def take(self, verdict: Verdict) -> Lease:
        """Carry out `verdict`: promise the work to the winner, and record it."""
        self._seed = self._seed + 1 & U64_MASK
        lease: Lease = self.leases.take(verdict)
        self.decisions.add(lease)
        return lease

    def refuse(self, request: RouteRequest, exclusions: tuple[Exclusion, ...]) -> None:
        """Record why no rank was eligible for the request."""
        asked = msgspec.structs.replace(request, sequence_hashes=b"") if request.sequence_hashes else request
        refused = Refused(now_s=self.clock.now(), request=asked, exclusions=exclusions)
        for tell in self.records:
            tell(refused)

    def compare(self, verdict: Verdict, reported_tokens: int) -> None:
        """Compare the predicted reuse with the prompt tokens that the winner reported to have reused.

        Nothing is compared if the policy does not count blocks on their way to a rank (`predict_on_route`).
        """
        compared = compared_of(verdict, reported_tokens) if self.policy.predict_on_route else None
        if compared is not None:
            self.calibration.apply(compared, self.clock.now())

    def tick(self) -> list[JournalRecord]:
        """Apply the passing of time and the records that it causes; return those records."""
        now_s = self.clock.now()
        self.apply(TimePassed(now_s=now_s))
        brought = self.state.tick(now_s)
        for record in brought:
            self.apply(record)
        self.calibration.tick(now_s, self.state.fleet.ranks)
        return brought

    def readiness(self) -> Readiness:
        """Return whether the router takes requests now, and why not.

        It takes them once the index has read the log and a rank can serve. Whatever only makes predictions
        worse is a note: one worker must not make the probes of all routers fail.
        """
        now_s, fleet = self.clock.now(), self.state.fleet
        fit = {each.registration.worker_id for each in fleet.workers() if not fleet.unfit(each, now_s)}
        doubts = zip(fleet.ranks, self._index.columns(b"", fleet.ranks).doubts, strict=True)
        ranks = {
            rank: doubt
            for rank, doubt in doubts
            if rank.worker_id in fit and not self.state.breakers.unfit(rank, now_s)
        }
        notes = [] if fleet.is_log_connected else ["the event log is away: requests are routed from memory"]
        notes += [f"{rank}: {doubt}" for rank, doubt in ranks.items() if is_blind(doubt)]
        notes += filter(None, (each() for each in self._noted))
        progress = self._index.catching_up()
        reasons = [*([progress] if progress else []), *([] if ranks else ["no worker is fit"])]
        return Readiness(not reasons, reasons, notes[:_NOTES_MAX])

    def trust(self) -> dict[WorkerRank, Trust]:
        """Return the trust in what is known of each rank of the fleet; the same object while it stays the same."""
        fleet = self.state.fleet
        ranks, parity = fleet.ranks, fleet.parity(self.clock.now())
        doubts = self.calibration.doubts_of(ranks, self._index.columns(b"", ranks).doubts)
        if (ranks, parity, doubts) != self._trust_of:
            found = zip(ranks, doubts, strict=True)
            self._trust = {rank: trust_of(parity[rank.worker_id], doubt) for rank, doubt in found}
            self._trust_of = ranks, parity, doubts
        return self._trust


def compared_of(verdict: Verdict, reported_tokens: int) -> Compared | None:
    """Return the winner's predicted and reported reuse.

    None: the index was not asked, or had a doubt of its own.
    """
    if verdict.is_blank or verdict.trusts[verdict.place] not in _COMPARED:
        return None
    block_size = verdict.request.block_size
    return Compared(
        rank=verdict.winner,
        epoch=verdict.epoch,
        decision_id=verdict.decision_id,
        block_size=block_size,
        held_tokens=(verdict.overlap_blocks - verdict.lost_blocks) * block_size,
        possible_tokens=max(verdict.expected_blocks, verdict.most_blocks) * block_size,
        reported_tokens=reported_tokens,
    )
