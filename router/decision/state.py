"""All that a decision reads, except the index, as one fold over journal records.

    apply(record)         folds a record in
    take(verdict)         folds a decision in that is carried out: its promise counts from now on
    tick(now)             drops expired state, and returns the records that the passing of time causes; the caller
                          applies them
    decide(request, ...)  returns what the policy in force chooses at one moment

The core (`router/native/core.hpp`) has what changes with every request: leases, predictions, sessions, learnt
rates. The workers' registrations and the breakers are here: they change rarely, and what the core reads of them (which
ranks serve a model, and how far they are trusted) is made anew only then (`view.py`).
"""

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import astuple

from kv_protocol.decided import Decided, RouteRequest
from kv_protocol.fleet import FleetEvent, WorkerDraining, WorkerLeft, WorkerRegistered
from kv_protocol.hashing import Hashing
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import (
    AttemptEnded,
    CheckpointBegan,
    FleetApplied,
    JournalRecord,
    LearntRates,
    LedgerApplied,
    LoadApplied,
    LogConnection,
    OutcomeKnown,
    PolicyChanged,
    RatesRestored,
    TimePassed,
    WorkerHeard,
)
from kv_protocol.ledger import Expired, FirstToken, Unreported
from router.decision.eligibility import exclusions
from router.decision.policies import MODES, Mode, rule_of
from router.decision.policy import Policy
from router.decision.verdict import Verdict
from router.decision.view import ModelView, OverlapAnswer
from router.fleet.breakers import BreakerLimits, Breakers
from router.fleet.registry import Fleet, TextDigests, Worker
from router.native import built

AskIndex = Callable[[bytes, tuple[WorkerRank, ...]], OverlapAnswer]
"""Returns how much of a chain of blocks each rank holds: from the index, or from a recorded answer."""
Decide = Callable[[RouteRequest, AskIndex, float, int], Verdict]
"""Decides for a request, by the index, the time and a seed. The index is asked only if the mode reads overlap.

Raises:
    NoEligibleWorker: no rank is eligible.
    WorkerNotNamed: the mode requires the client to name a worker, and it did not.
    LimitExceeded: a user's mode chose a rank that does not exist.
"""
LEASE_S = 300.0
"""How long a lease lives that nothing renews."""
_STANDINGS_MAX = _RULES_MAX = 256
_KIND = ("model", "block_size", "hash_scheme", "phase", "endpoint")
"""The fields that are equal in all requests of one kind."""


class ApproximateLimits(NamedTuple):
    """How long a routed block counts (seconds), and how many blocks of one rank count at most."""

    ttl_s: float = 120.0
    blocks_max: int = 1 << 18


class AffinityLimits(NamedTuple):
    """How long an idle session stays bound (seconds), and how many sessions are kept."""

    idle_s: float = 600.0
    sessions_max: int = 65_536


class StateSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the state: with them and a journal it can be computed again. The policy is applied as a record."""

    text: TextDigests
    lease_s: float = LEASE_S
    approximate: ApproximateLimits = ApproximateLimits()
    affinity: AffinityLimits = AffinityLimits()
    breakers: BreakerLimits = BreakerLimits()


class RankLoad(NamedTuple):
    """One rank's load: promised, and reported by its engine; `foreign_requests` are reported ones without a lease."""

    active_requests: int = 0
    active_blocks: int = 0
    prefill_tokens_queued: int = 0
    foreign_requests: int = 0
    reported_running: int = 0
    reported_waiting: int = 0
    reported_used_blocks: int = 0


class RateFactors(NamedTuple):
    """A rank's measured times divided by the reference engine's (2.0: twice as slow), and how many were measured."""

    prefill: float
    decode: float
    prefills: int
    decodes: int


class RouterState:
    """Fleet, core and all other state that one router decides by. `modes` are those that a policy can name."""

    def __init__(self, settings: StateSettings, modes: Mapping[str, Mode] = MODES) -> None:
        self.fleet = Fleet(settings.text)
        self.breakers = Breakers(settings.breakers)
        self.core = built.Core(settings.lease_s, *settings.approximate, *settings.affinity)
        self.modes = modes
        self._standings: dict[tuple[str, int, str], ModelView] = {}
        self._standings_of = 0
        self._bases: dict[tuple[str, int, str, str, str], built.Basis] = {}
        """What decisions on requests of one kind are made of, by the values of `_KIND`."""
        self.policy = Policy()
        """The policy in force: the one applied last."""
        self.rule = lru_cache(_RULES_MAX)(partial(rule_of, modes))
        """Returns the rule of a policy for requests of a phase and an endpoint."""
        core = self.core
        self.decide: Decide = partial(core.decide, self._bases, self._basis, self.fleet, self.breakers)
        """Returns what the policy in force chooses for the request; nothing is promised yet."""
        self._folds: dict[type, Callable[[Any], None]] = {
            Decided: self._repeat,
            OutcomeKnown: self._end,
            LedgerApplied: self._follow,
            WorkerHeard: lambda record: self.fleet.on_heartbeat(record.worker_id, record.instance, record.now_s),
            LoadApplied: self._reconcile,
            AttemptEnded: self._attempted,
            FleetApplied: self._apply_to_fleet,
            LogConnection: lambda record: self.fleet.on_log_connection(connected=record.heard, now_s=record.now_s),
            PolicyChanged: self._change_policy,
            RatesRestored: self._restore_rates,
            TimePassed: lambda record: core.let_go(record.now_s),
            CheckpointBegan: lambda record: core.let_go(record.now_s),
        }

    # ------------------------------------------------------------------------------------------------- what happens

    def apply(self, record: JournalRecord) -> None:
        """Fold one record in. Records that do not concern this state are ignored."""
        fold = self._folds.get(type(record))
        if fold is not None:
            fold(record)

    def take(self, verdict: Verdict) -> None:
        """Carry a decision out: its promise counts from now on."""
        self.core.take(verdict)
        if self.breakers.by_key:
            self.breakers.follow(verdict.promise, verdict.now_s)

    def tick(self, now_s: float) -> list[JournalRecord]:
        """Return the records that the passing of time causes, for the caller to apply, and drop expired state."""
        self.core.let_go(now_s)
        return [
            LedgerApplied(
                now_s=now_s,
                event=Expired(lease_id=lease_id, cause="engine" if is_by_engine else "silence")
                if lease_id
                else Unreported(worker_id=worker_id, dp_rank=dp_rank),
            )
            for lease_id, is_by_engine, (worker_id, dp_rank) in self.core.tick(now_s)
        ]

    def _repeat(self, decided: Decided) -> None:
        self.core.turned(decided.request.model)
        self._follow(LedgerApplied(now_s=decided.now_s, event=decided.promise))

    def _follow(self, record: LedgerApplied) -> None:
        """Fold in an event of a lease of this router, or of a replica."""
        if self.breakers.by_key and not record.router:
            self.breakers.follow(record.event, record.now_s)
        self.core.follow(record.event, record.now_s, record.router)

    def _end(self, known: OutcomeKnown) -> None:
        """Fold in the outcome of a decision of this router."""
        if self.breakers.by_key:
            if known.came_whole:
                self.breakers.follow(FirstToken(lease_id=known.decision_id), known.now_s)
            self.breakers.follow(known.ending, known.now_s)
        self.core.ended(*astuple(known))

    def _reconcile(self, record: LoadApplied) -> None:
        report, known = record.report, self.fleet.worker(record.worker_id)
        if known is None or known.registration.instance != report.instance:
            return  # the report is of an unknown worker, or of a former instance
        if record.dp_rank in known.registration.dp_ranks:
            figures = report.running_requests, report.waiting_requests, report.used_blocks
            self.core.reported((record.worker_id, record.dp_rank), *figures, record.now_s)

    def _attempted(self, record: AttemptEnded) -> None:
        """Update the rank's breaker; a worker outside the fleet has none."""
        if self.fleet.worker(record.worker_id) is None:
            return
        known = tuple(rank for rank in record.erred_before if self.fleet.worker(rank.worker_id) is not None)
        self.breakers.apply(
            record if known == record.erred_before else msgspec.structs.replace(record, erred_before=known)
        )

    def _restore_rates(self, record: RatesRestored) -> None:
        for each in record.models:
            self.core.restore_learnt(*astuple(each))

    def _change_policy(self, record: PolicyChanged) -> None:
        self.policy = msgspec.convert(record.policy, Policy)
        self._bases.clear()

    def _apply_to_fleet(self, record: FleetApplied) -> None:
        event, known = record.event, self.fleet.worker(record.event.worker_id)
        if self.fleet.apply(event):
            self._begin_or_end_a_life(event, known, record.now_s)
            self.show_worker(event.worker_id)

    def show_worker(self, worker_id: str) -> None:
        """Give the core the worker's present registration; a worker that left is removed from it."""
        worker = self.fleet.worker(worker_id)
        if worker is None:
            self.core.left(worker_id)
        else:
            registration = worker.registration
            group = registration.model, registration.role
            self.core.registered(worker_id, group, registration.block_size, registration.total_kv_blocks)

    def _begin_or_end_a_life(self, event: FleetEvent, known: Worker | None, now_s: float) -> None:
        """Begin or end an instance of the worker, if the event does so. `known` is the worker before the event."""
        is_same = known is not None and known.registration.instance == event.instance
        # a known instance that registers again begins no life, and another instance that leaves ends none
        if isinstance(event, WorkerDraining) or isinstance(event, WorkerLeft) != is_same:
            return
        if known is not None:
            self.core.forget(event.worker_id, now_s)
            self.breakers.forget(event.worker_id)
        if isinstance(event, WorkerRegistered):
            self.core.joined(event.worker_id, event.dp_ranks, event.model, event.total_kv_blocks, now_s)

    # ------------------------------------------------------------------------------------------------- decisions

    def _basis(self, request: RouteRequest, now_s: float) -> built.Basis:
        """Return what decisions on requests like this one are made of."""
        ranks = self.model_view(request.model, request.block_size, request.hash_scheme, now_s)
        rule = self.rule(self.policy, request.phase, request.endpoint)
        of_kind = {name: getattr(request, name) for name in _KIND}
        why = exclusions(ranks, RouteRequest(decision_id="", request_id="", isl_tokens=0, **of_kind))
        return built.Basis(ranks, rule, self._standings_of, why)

    def decide_instead(self, live: Verdict, policy: Policy) -> Verdict:
        """Return what another policy chooses in the place of `live`; errors as `decide`.

        Columns that the policy of `live` did not need are read now; the index's answer is that of `live`.

        Raises:
            ValueError: the index was not asked, and the other mode's costs need its answer.
        """
        return self.core.decide_instead(live, self.rule(policy, live.request.phase, live.request.endpoint))

    def model_view(self, model: str, block_size: int, scheme: str, now_s: float) -> ModelView:
        """Return the ranks that serve a model with this hashing, their fitness and trust."""
        key, changes = (model, block_size, scheme), self.fleet.changes + self.breakers.changes
        known = self._standings.get(key)
        if known is None or now_s >= known.valid_until_s or changes != self._standings_of:
            if changes != self._standings_of or len(self._standings) > _STANDINGS_MAX:
                self._standings.clear()
                self._bases.clear()
                self._standings_of = changes
            hashing = Hashing(block_size, scheme)
            known = self._standings[key] = ModelView(self.fleet, model, hashing, now_s, self.breakers, self.core)
        return known

    # ------------------------------------------------------------------------------------------------- figures

    @property
    def reads_overlap(self) -> bool:
        """Whether the mode of the policy in force reads how much of a prompt each rank holds."""
        return self.modes[self.policy.mode].reads_overlap

    def load_of(self, rank: WorkerRank) -> RankLoad:
        """Return the rank's present load; zeroes for an unknown rank."""
        return RankLoad(*(self.core.load_of(rank) or ()))

    def loads(self) -> dict[WorkerRank, RankLoad]:
        """Return the load of every rank that work was promised to, or that has reported."""
        return {WorkerRank(*rank): RankLoad(*load) for rank, load in self.core.loads()}

    def rate_factors(self) -> dict[WorkerRank, RateFactors]:
        """Return how slow each measured rank is."""
        return {WorkerRank(*rank): RateFactors(*factors) for rank, factors in self.core.rate_factors()}

    def learnt(self) -> tuple[LearntRates, ...]:
        """Return the rates learnt for each model, with which a router that starts can begin."""
        return tuple(LearntRates(*each) for each in self.core.learnt())
