"""All that a decision reads, except the index, as one fold over journal records.

    apply(record)         the only place where this state changes
    tick(now)             drops expired state, and returns the records that the passing of time causes; the caller
                          applies them
    view(request, ...)    one moment, as columns

A decision that is carried out is applied with its promise (`Taken`), or as the journal has it (`Decided`), which states
only its turn and its promise: a replay decides again, and applies the result. A promise without blocks, from a mode
that reads no overlap, changes only the ledger. A view's fleet part is recomputed after a record or a point in time that
changes it, and cached until then (`model_view.py`).
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from kv_protocol.checkpoint import CheckpointBegan
from kv_protocol.decided import Decided
from kv_protocol.fleet import FleetEvent, WorkerDraining, WorkerLeft, WorkerRegistered
from kv_protocol.hashing import Hashing
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import (
    AttemptEnded,
    FleetApplied,
    JournalRecord,
    LedgerApplied,
    LoadApplied,
    LogConnection,
    OutcomeKnown,
    PolicyChanged,
    RatesRestored,
    TimePassed,
    WorkerHeard,
)
from kv_protocol.ledger import FirstToken, LedgerEvent, Reconciled, Routed
from router.decision.affinity import Affinity
from router.decision.approximate import ApproximateIndex
from router.decision.history import History
from router.decision.model_view import ModelView
from router.decision.newcomers import Newcomers
from router.decision.policies import MODES, Mode, policy_for
from router.decision.policy import Policy
from router.decision.time_cost import expected_of
from router.decision.verdict import Taken
from router.decision.view import Depths, Ints, OverlapAnswer, RouteRequest, View
from router.fleet.breakers import Breakers
from router.fleet.forecasts import Forecasts
from router.fleet.ledger import Ledger
from router.fleet.predictions import Predictions
from router.fleet.rates import RateColumns, Rates
from router.fleet.registry import Fleet

Applied = JournalRecord | Taken
AskIndex = Callable[[bytes, tuple[WorkerRank, ...]], OverlapAnswer]
"""Returns how much of a chain each rank holds: from the index, or from a recorded answer."""
_STANDINGS_MAX = 256


class RouterState:
    """Fleet, ledger and all other state that one router decides by. `modes` are those that a policy can name."""

    def __init__(
        self,
        fleet: Fleet,
        ledger: Ledger,
        approximate: ApproximateIndex | None = None,
        *,
        affinity: Affinity | None = None,
        breakers: Breakers | None = None,
        modes: Mapping[str, Mode] = MODES,
    ) -> None:
        self.fleet = fleet
        self.ledger = ledger
        self.approximate = approximate or ApproximateIndex()
        self.affinity = affinity or Affinity()
        self.breakers = breakers or Breakers()
        self.policy = Policy()
        """The policy in force: the one applied last."""
        self.modes = modes
        self.history = History()
        self.predictions = Predictions()
        self.newcomers = Newcomers()
        self.forecasts = Forecasts()
        self.rates = Rates()
        self.decisions_by_model: Counter[str] = Counter()
        self._standings: dict[tuple[str, int, str], ModelView] = {}
        self._standings_of = (0, 0)
        self._folds: dict[type, Callable[[Any], None]] = {
            Taken: self._take,
            Decided: self._repeat,
            OutcomeKnown: self._end,
            LedgerApplied: self._apply_to_ledger,
            WorkerHeard: lambda record: self.fleet.on_heartbeat(record.worker_id, record.instance, record.now_s),
            LoadApplied: self._reconcile,
            AttemptEnded: self._attempted,
            FleetApplied: self._apply_to_fleet,
            LogConnection: lambda record: self.fleet.on_log_connection(connected=record.heard, now_s=record.now_s),
            PolicyChanged: self._change_policy,
            RatesRestored: lambda record: self.rates.restore_learnt(record.models),
            TimePassed: lambda record: self._let_go(record.now_s),
            CheckpointBegan: lambda record: self._let_go(record.now_s),
        }

    # ------------------------------------------------------------------------------------------------- records

    def apply(self, record: Applied) -> None:
        """Fold one record in. Records that do not concern this state are ignored."""
        fold = self._folds.get(type(record))
        if fold is not None:
            fold(record)

    def _change_policy(self, record: PolicyChanged) -> None:
        self.policy = msgspec.convert(record.policy, Policy)

    def _attempted(self, record: AttemptEnded) -> None:
        """Update the rank's breaker; a worker outside the fleet has none."""
        if self.fleet.worker(record.worker_id) is None:
            return
        known = tuple(rank for rank in record.erred_before if self.fleet.worker(rank.worker_id) is not None)
        self.breakers.apply(
            record if known == record.erred_before else msgspec.structs.replace(record, erred_before=known)
        )

    def _apply_to_fleet(self, record: FleetApplied) -> None:
        if self.fleet.refusal(record.event) is None:
            self._begin_or_end_a_life(record.event, record.now_s)
        self.fleet.apply(record.event)

    def tick(self, now_s: float) -> list[JournalRecord]:
        """Return the records that the passing of time causes, for the caller to apply, and drop expired state."""
        self._let_go(now_s)
        return [LedgerApplied(now_s=now_s, event=event) for event in self.ledger.tick(now_s)]

    def _let_go(self, now_s: float) -> None:
        self.approximate.tick(now_s)
        self.predictions.tick(now_s)
        self.affinity.tick(now_s)

    def _begin_or_end_a_life(self, event: FleetEvent, now_s: float) -> None:
        known = self.fleet.worker(event.worker_id)
        is_same = known is not None and known.registration.instance == event.instance
        if isinstance(event, WorkerDraining) or isinstance(event, WorkerLeft) != is_same:
            return
        if known is not None:
            self._forget(event.worker_id, now_s)
        if isinstance(event, WorkerRegistered):
            self.newcomers.joined(event, now_s)

    def _forget(self, worker_id: str, now_s: float) -> None:
        self.approximate.forget(worker_id, now_s)
        for fold in (self.ledger, self.history, self.predictions, self.newcomers, self.forecasts, self.rates):
            fold.forget(worker_id)
        self.affinity.forget(worker_id)
        self.breakers.forget(worker_id)

    def _reconcile(self, record: LoadApplied) -> None:
        report, known = record.report, self.fleet.worker(record.worker_id)
        if known is None or known.registration.instance != report.instance:
            return  # of an unknown worker, or of a former epoch
        if record.dp_rank not in known.registration.dp_ranks:
            return
        reconciled = Reconciled(
            worker_id=record.worker_id,
            dp_rank=record.dp_rank,
            running_requests=report.running_requests,
            waiting_requests=report.waiting_requests,
            used_blocks=report.used_blocks,
        )
        self.ledger.apply(reconciled, record.now_s)
        self.newcomers.used(WorkerRank(record.worker_id, record.dp_rank), report.used_blocks)

    def _apply_to_ledger(self, record: LedgerApplied) -> None:
        event = record.event
        if type(event) is Routed:
            self._promise(event, record.now_s, record.router)
        else:
            self._go_on(event, record.now_s, record.router)

    def _promise(self, routed: Routed, now_s: float, router: str = "") -> None:
        if routed.blocks or routed.uncached_tokens:
            self._fill(routed, now_s)
        if routed.session_id:
            self.affinity.apply(routed, now_s)
        if not router:
            self.breakers.follow(routed, now_s)
        self.ledger.apply(routed, now_s, router)
        if router and self.fleet.worker(routed.worker_id) is None:
            self.ledger.mark_gone(WorkerRank(routed.worker_id, routed.dp_rank))

    def _fill(self, routed: Routed, now_s: float) -> None:
        """Account for the rank's prefill work and blocks."""
        worker = self.fleet.worker(routed.worker_id)
        if worker is not None:
            registration, rank = worker.registration, WorkerRank(routed.worker_id, routed.dp_rank)
            uncached_blocks = routed.uncached_tokens / registration.block_size
            self.history.add(rank, uncached_blocks, now_s)
            self.newcomers.promised(rank, uncached_blocks)
            self.approximate.routed(rank, routed.blocks, now_s, registration.total_kv_blocks)
        self.predictions.apply(routed, now_s)

    def _go_on(self, event: LedgerEvent, now_s: float, router: str = "") -> None:
        """Fold in a request's progress or end."""
        self.predictions.apply(event, now_s)
        self.affinity.apply(event, now_s)
        if not router:
            self.breakers.follow(event, now_s)
        self.ledger.apply(event, now_s, router)

    def _end(self, known: OutcomeKnown) -> None:
        lease_id, now_s = known.decision_id, known.now_s
        if not self.breakers.are_all_closed:
            if known.is_unstreamed:
                self.breakers.follow(FirstToken(lease_id=lease_id), now_s)
            self.breakers.follow(known.ending, now_s)
        self.predictions.end(lease_id)
        self.affinity.end(lease_id, now_s)
        self.ledger.end(lease_id)
        self.forecasts.ended(known)
        self.rates.ended(known)

    def _take(self, taken: Taken) -> None:
        verdict, promised = taken
        self.decisions_by_model[verdict.request.model] += 1
        mode = self.modes[verdict.policy]
        if mode.reads_overlap and self.newcomers.is_any:
            is_cold = not verdict.expected_blocks and verdict.request.reusable_blocks
            if is_cold and not verdict.view.expected.any():
                self.newcomers.missed(verdict.winner, verdict.view.ranks)
        if mode.reads_forecast:
            self.forecasts.decided(verdict)
        if verdict.view.rates is not None:
            place = verdict.rank_indices[verdict.winner_at]
            self.rates.decided(expected_of(verdict.view, verdict.request, place))
        self._promise(promised, verdict.now_s)

    def _repeat(self, decided: Decided) -> None:
        self.decisions_by_model[decided.request.model] += 1
        self._promise(decided.promise, decided.now_s)

    # ------------------------------------------------------------------------------------------------- the view

    def view(self, request: RouteRequest, ask: AskIndex, now_s: float) -> View:
        """Return the view of the request's model, as far as the mode in force reads it.

        `ask` returns the overlap of exactly those ranks; it is called only if the mode reads overlap.
        """
        policy = policy_for(self.policy, request, self.modes)
        mode = self.modes[policy.mode]
        model_view = self.model_view(request.model, request.block_size, request.hash_scheme, now_s)
        turn = self.decisions_by_model[request.model]
        if mode.reads_overlap and model_view.ranks:
            reads_rates = mode.reads_rates and policy.cost == "ms"
            rates = (
                self.rates.columns(request.model, model_view.ranks, now_s, policy.rate_spread) if reads_rates else None
            )
            view = self._overlap_view(request, model_view, ask, now_s, turn, rates)
            if mode.reads_forecast:
                view = view._replace(forecast=self.forecasts.forecast(view, request))
        else:
            view = model_view.blank(now_s, turn)
            if mode.reads_load:
                view = view._replace(**self.ledger.columns(model_view.ranks)._asdict())
        if policy.affinity != "off":
            view = view._replace(bound=self.affinity.bound(request.session_id, now_s))
        return view

    def _overlap_view(
        self,
        request: RouteRequest,
        model_view: ModelView,
        ask: AskIndex,
        now_s: float,
        turn: int,
        rates: RateColumns | None,
    ) -> View:
        chain, ranks = request.reusable_hashes, model_view.ranks
        answer = ask(chain, ranks)
        trusted = model_view.trusted(answer.doubts)
        if trusted.without_events:
            self._put_routed(answer.depths, chain, model_view, trusted.without_events, now_s)
        queued_tokens, active_requests, active_blocks, shared = self.ledger.columns(ranks, request.sequence_hashes)
        return View(
            now_s=now_s,
            turn=turn,
            ranks=ranks,
            registrations=model_view.registrations,
            unfit=model_view.unfit,
            trust=trusted.trust,
            overlap=answer.depths,
            predicted=self._predicted(chain, model_view, answer.epochs, now_s),
            epochs=answer.epochs,
            seqs=answer.seqs,
            queued_tokens=queued_tokens,
            active_requests=active_requests,
            active_blocks=active_blocks,
            shared_blocks=shared,
            history_blocks=self.history.columns(ranks, now_s),
            newcomer=self.newcomers.flags(ranks),
            trust_factor=trusted.factor,
            rates=rates,
            is_uniform=model_view.is_uniform,
            seq_len_min=model_view.seq_len_min,
            misfits=model_view.misfits,
        )

    def model_view(self, model: str, block_size: int, scheme: str, now_s: float) -> ModelView:
        """Return the ranks that serve a model with this hashing, their fitness and trust."""
        known = self._standings.get((model, block_size, scheme))
        changes = self._standings_of
        if (
            known is None
            or now_s >= known.valid_until_s
            or changes[0] != self.fleet.changes
            or changes[1] != self.breakers.changes
        ):
            known = self._look(model, Hashing(block_size, scheme), now_s)
        return known

    def _look(self, model: str, hashing: Hashing, now_s: float) -> ModelView:
        changes = self.fleet.changes, self.breakers.changes
        if changes != self._standings_of or len(self._standings) > _STANDINGS_MAX:
            self._standings.clear()
            self._standings_of = changes
        found = self._standings[model, *hashing] = ModelView(self.fleet, model, hashing, now_s, self.breakers)
        return found

    def _put_routed(
        self, depths: Depths, chain: bytes, model_view: ModelView, rank_indices: tuple[int, ...], now_s: float
    ) -> None:
        """For ranks without events, set the overlap to what was routed to them."""
        ranks = [model_view.ranks[place] for place in rank_indices]
        routed = self.approximate.overlap(chain, ranks, now_s)
        if len(ranks) == len(model_view.ranks):
            depths[:] = routed  # a slice takes a third of the time of indices
        else:
            depths[:, rank_indices] = routed

    def _predicted(self, chain: bytes, model_view: ModelView, epochs: tuple[int, ...], now_s: float) -> Ints:
        if not self.policy.predict_on_route:
            return model_view.no_ints
        found = self.predictions.column(chain, model_view.ranks, epochs, now_s)
        return model_view.no_ints if found is None else found
