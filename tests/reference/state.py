"""All that a decision reads, except the index, as one fold over journal records.

    apply(record)         the only place where this state changes
    tick(now)             drops expired state, and returns the records that the passing of time causes; the caller
                          applies them
    decide(request, ...)  one moment's view, and the choice by the policy in force; nothing is promised yet
    take(verdict)         the decision is carried out
    tables()              the rows of a checkpoint

A decision that is carried out is applied as its verdict, or as the journal has it (`Decided`), which states only its
turn and its promise: a replay decides again, and takes the result. A promise without blocks, from a mode that reads no
overlap, changes only the ledger.

A verdict is made of a view, a request, a policy and a seed:

excluded     ranks that may not take the request (`router/decision/eligibility.py`), and, for a full miss, of which no
             candidate holds or expects a block, newcomers with a spent share, unless all candidates are such newcomers
candidates   the other ranks; the mode chooses among them (`policies.py`)
reason       the mode's, but `pinned` if the client named the worker, `newcomer` if newcomers were excluded
"""

from collections import Counter
from typing import Any, cast

import msgspec

from kv_protocol import journal
from kv_protocol.decided import Decided, RouteRequest
from kv_protocol.decision import Exclusion
from kv_protocol.fleet import FleetEvent, WorkerDraining, WorkerLeft, WorkerRegistered
from kv_protocol.hashing import Hashing
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import CheckpointBegan, JournalRecord, LedgerApplied, LoadApplied, OutcomeKnown
from kv_protocol.ledger import Cancelled, Expired, Finished, FirstToken, LedgerEvent, Routed
from router.decision.eligibility import NoEligibleWorker, exclusions
from router.decision.policy import Policy
from router.decision.state import StateSettings
from router.fleet.breakers import Breakers
from router.fleet.registry import Fleet, Worker, misfit
from router.fleet.trust import trust_of
from tests.reference.affinity import Affinity
from tests.reference.approximate import ApproximateIndex
from tests.reference.ledger import Ledger
from tests.reference.newcomers import Newcomers
from tests.reference.policies import MODES, choose, policy_for
from tests.reference.predictions import Predictions
from tests.reference.rates import Rates
from tests.reference.time_cost import TRUST_FACTOR, expected_latency
from tests.reference.verdict import Verdict
from tests.reference.view import AskIndex, Row, View


def decide(view: View, request: RouteRequest, policy: Policy, seed: int) -> Verdict:
    """Choose a rank for the request, by the policy of its phase.

    Raises:
        NoEligibleWorker: no rank is eligible.
        WorkerNotNamed: the mode requires the client to name a worker, and it did not.
    """
    why = exclusions(cast("Any", view), request)
    eligible = [place for place, reason in enumerate(why) if not reason]
    if not eligible:
        excluded = [
            Exclusion(worker_id=row.rank.worker_id, dp_rank=row.rank.dp_rank, reason=reason)
            for row, reason in zip(view.rows, why, strict=True)
        ]
        raise NoEligibleWorker(request.model, tuple(excluded))
    places = eligible
    if MODES[policy.mode].reads_overlap and policy.newcomers and request.reusable_blocks:
        places = _settled(view, eligible)
    choice = choose(view._replace(rows=tuple(view.rows[place] for place in places)), request, policy, seed)
    reason = choice.reason
    if request.pinned_worker is not None:
        reason = "pinned"
    elif places != eligible and reason != "affinity":
        reason = "newcomer"
    return Verdict(request, policy, reason, seed, view, places, choice)


def _settled(view: View, places: list[int]) -> list[int]:
    """For a full miss, return the ranks except newcomers with a spent share; otherwise, or if none is left, all."""
    if any(view.rows[place].expected for place in places):
        return places
    return [place for place in places if not view.rows[place].is_newcomer] or places


PART_BYTES = 32 * 1024
"""A part of the leases of a checkpoint ends with the row that reaches this size."""
LONG_ARRAY = b"\xdd"
"""First byte of a msgpack list whose length follows as a u32."""


class ReferenceState:
    """Fleet, ledger and all other state that one router decides by."""

    def __init__(self, settings: StateSettings) -> None:
        self.fleet = Fleet(settings.text)
        self.breakers = Breakers(settings.breakers)
        self.ledger = Ledger(settings.lease_s)
        self.approximate = ApproximateIndex(settings.approximate.ttl_s, settings.approximate.blocks_max)
        self.affinity = Affinity(settings.affinity.idle_s, settings.affinity.sessions_max)
        self.policy = Policy()
        """The policy in force: the one applied last."""
        self.predictions = Predictions()
        self.newcomers = Newcomers()
        self.rates = Rates()
        self.turns: Counter[str] = Counter()
        """Number of decisions for a model."""

    # ------------------------------------------------------------------------------------------------- records

    def apply(self, record: JournalRecord) -> None:  # noqa: C901, PLR0912 - a list of records
        """Fold one record in. Records that do not concern this state are ignored."""
        match record:
            case Decided():
                self.turns[record.request.model] += 1
                self._promise(record.promise, record.now_s)
            case OutcomeKnown():
                self._end(record)
            case LedgerApplied(event=Routed() as routed):
                self._promise(routed, record.now_s, record.router)
            case LedgerApplied():
                self._go_on(record.event, record.now_s, record.router)
            case journal.WorkerHeard():
                self.fleet.on_heartbeat(record.worker_id, record.instance, record.now_s)
            case LoadApplied():
                self._reconcile(record)
            case journal.AttemptEnded() if self.fleet.worker(record.worker_id) is not None:
                known = tuple(rank for rank in record.erred_before if self.fleet.worker(rank.worker_id) is not None)
                self.breakers.apply(msgspec.structs.replace(record, erred_before=known))
            case journal.FleetApplied():
                if self.fleet.refusal(record.event) is None:
                    self._begin_or_end_a_life(record.event, record.now_s)
                self.fleet.apply(record.event)
            case journal.LogConnection():
                self.fleet.on_log_connection(connected=record.heard, now_s=record.now_s)
            case journal.PolicyChanged():
                self.policy = msgspec.convert(record.policy, Policy)
            case journal.RatesRestored():
                self.rates.restore(record.models)
            case journal.TimePassed() | CheckpointBegan():
                self._let_go(record.now_s)
            case _:
                pass

    def tick(self, now_s: float) -> list[JournalRecord]:
        """Return the records that the passing of time causes, for the caller to apply, and drop expired state."""
        self._let_go(now_s)
        return [LedgerApplied(now_s=now_s, event=event) for event in self.ledger.tick(now_s)]

    def _let_go(self, now_s: float) -> None:
        for fold in (self.approximate, self.predictions, self.affinity):
            fold.tick(now_s)

    def _begin_or_end_a_life(self, event: FleetEvent, now_s: float) -> None:
        """Another instance of a worker has nothing of the former one; the same one keeps all."""
        known = self.fleet.worker(event.worker_id)
        is_same = known is not None and known.registration.instance == event.instance
        if isinstance(event, WorkerDraining) or isinstance(event, WorkerLeft) != is_same:
            return
        if known is not None:
            self.approximate.forget(event.worker_id, now_s)
            for fold in (
                self.ledger, self.predictions, self.newcomers, self.rates, self.affinity,
                self.breakers,
            ):  # fmt: skip
                fold.forget(event.worker_id)
        if isinstance(event, WorkerRegistered):
            self.newcomers.joined(event, now_s)

    def _reconcile(self, record: LoadApplied) -> None:
        report, known = record.report, self.fleet.worker(record.worker_id)
        if known is None or known.registration.instance != report.instance:
            return  # of an unknown worker, or of a former epoch
        if record.dp_rank not in known.registration.dp_ranks:
            return
        rank = WorkerRank(record.worker_id, record.dp_rank)
        self.ledger.reconcile(rank, report, record.now_s)
        self.newcomers.used(rank, report.used_blocks)

    def _promise(self, routed: Routed, now_s: float, router: str = "") -> None:
        """Promise work to a rank. `router`: the replica that did; its rank may be of a worker that is not known yet."""
        rank, worker = WorkerRank(routed.worker_id, routed.dp_rank), self.fleet.worker(routed.worker_id)
        if worker is not None:
            uncached_blocks = routed.uncached_tokens / worker.registration.block_size
            self.newcomers.promised(rank, uncached_blocks)
            self.approximate.routed(rank, routed.blocks, now_s, worker.registration.total_kv_blocks)
        if routed.lease_id not in self.ledger.leases:
            self.predictions.apply(routed, now_s)
            self.affinity.routed(routed, now_s)
        if not router:
            self.breakers.follow(routed, now_s)
        self.ledger.apply(routed, now_s, router)
        if router and worker is None:
            self.ledger.mark_gone(rank)

    def _go_on(self, event: LedgerEvent, now_s: float, router: str) -> None:
        """Fold in a request's progress or end, or what an engine reports."""
        self.predictions.apply(event, now_s)
        if isinstance(event, Finished | Cancelled | Expired):
            self.affinity.end(event.lease_id, now_s)
            self.rates.pending.pop(event.lease_id, None)
        if not router:
            self.breakers.follow(event, now_s)
        self.ledger.apply(event, now_s, router)

    def _end(self, known: OutcomeKnown) -> None:
        if known.came_whole:
            self.breakers.follow(FirstToken(lease_id=known.decision_id), known.now_s)
        self.breakers.follow(known.ending, known.now_s)
        self.predictions.end(known.decision_id)
        self.affinity.end(known.decision_id, known.now_s)
        self.ledger.end(known.decision_id)
        self.rates.ended(known)

    # ------------------------------------------------------------------------------------------------- decisions

    def decide(
        self, request: RouteRequest, ask: AskIndex, now_s: float, seed: int, policy: Policy | None = None
    ) -> Verdict:
        """Return a decision by the policy in force, or by `policy`.

        `ask` is called with the blocks that a cache could provide and with exactly the ranks that serve the model, if
        there are any and the mode reads overlap.

        Raises:
            NoEligibleWorker: no rank is eligible.
            WorkerNotNamed: the mode requires the client to name a worker, and it did not.
        """
        of_phase = policy_for(policy or self.policy, request)
        return decide(self._view(request, ask, now_s, of_phase), request, of_phase, seed)

    def take(self, verdict: Verdict) -> None:
        """Carry a decision out."""
        request, winner, mode = verdict.request, verdict.winner, MODES[verdict.policy.mode]
        self.turns[request.model] += 1
        is_miss = request.reusable_blocks and not any(row.expected for row in verdict.view.rows)
        if mode.reads_overlap and is_miss:
            self.newcomers.missed(winner.rank, verdict.view.ranks)
        if verdict.view.output_tokens is not None and request.decision_id not in self.ledger.leases:
            self.rates.decided(expected_latency(winner, request))
        self._promise(verdict.promise, verdict.view.now_s)

    def _view(self, request: RouteRequest, ask: AskIndex, now_s: float, policy: Policy) -> View:
        """Return the view of the request's model, as far as the mode reads it."""
        mode, workers = MODES[policy.mode], self.fleet.serving(request.model)
        placed = [(rank, worker) for worker in workers for rank in worker.registration.ranks]
        rows = [
            Row(rank, worker.registration, self.fleet.unfit(worker, now_s) or self.breakers.unfit(rank, now_s))
            for rank, worker in placed
        ]
        if mode.reads_load:
            rows = [row._replace(**self.ledger.load(row.rank)._asdict()) for row in rows]
        view = View(
            now_s=now_s,
            turn=self.turns[request.model],
            rows=tuple(rows),
            has_misfits=any(
                misfit(one.registration, other.registration)
                for one in workers
                for other in workers
                if (one.registration.role, other.registration.role) == ("prefill", "decode")
            ),
            apart={},
            bound=None if policy.affinity == "off" else self.affinity.bound(request.session_id, now_s),
        )
        if not (mode.reads_overlap and rows):
            return view
        rows = self._with_overlap(rows, [worker for _, worker in placed], request, ask, now_s)
        if not policy.predict_on_route:
            rows = [row._replace(predicted=0) for row in rows]
        output_tokens = None
        if mode.reads_rates:
            output_tokens = self.rates.output_tokens(request.model)
            rows = [row._replace(factors=self.rates.used(request.model, row.rank, now_s)) for row in rows]
        return view._replace(rows=tuple(rows), is_blank=False, output_tokens=output_tokens)

    def _with_overlap(
        self, rows: list[Row], workers: list[Worker], request: RouteRequest, ask: AskIndex, now_s: float
    ) -> list[Row]:
        chain = request.sequence_hashes[: 8 * request.reusable_blocks]
        ranks, found = tuple(row.rank for row in rows), list[Row]()
        answer, spent = ask(chain, ranks), self.newcomers.spent(ranks)
        hashing, images = Hashing(request.block_size, request.hash_scheme), self.fleet.images(request.model, now_s)
        for at, row in enumerate(rows):
            depths = tuple(int(tier[at]) for tier in answer.depths)
            trust = trust_of(self.fleet.disparities(workers[at], hashing, images), answer.doubts[at])
            if trust.overlap_source == "approximate":
                depths = (self.approximate.overlap(chain, row.rank, now_s),) * len(depths)
            found.append(
                row._replace(
                    depths=depths,
                    predicted=self.predictions.expected(chain, row.rank, answer.epochs[at], now_s),
                    epoch=answer.epochs[at],
                    trust_factor=TRUST_FACTOR[trust.state],
                    shared_blocks=self.ledger.load(row.rank, request.sequence_hashes).shared_blocks,
                    is_newcomer=spent[at],
                )
            )
        return found

    # ------------------------------------------------------------------------------------------------- checkpoints

    def tables(self) -> dict[str, list[bytes]]:
        """Return the parts of a checkpoint's tables, but for that of the policy, the fleet and the breakers."""
        rows: dict[str, list[Any]] = {"turns": list(self.turns.items())}
        totals = list[int]()
        for fold in (self.ledger, self.approximate, self.affinity, self.rates, self.newcomers):
            found = fold.tables()
            totals += found.pop("totals", ())
            rows |= found
        rows["leases"] = [
            (
                lease_id, rank, [*fields, self.predictions.until_s(lease_id)], self.affinity.name_of(lease_id),
                self.rates.expected_of(lease_id),
            )
            for lease_id, rank, *fields in rows["leases"]
        ]  # fmt: skip
        return {name: _parts(each, name) for name, each in (rows | {"totals": [[totals]]}).items()}


def _parts(rows: list[Any], table: str) -> list[bytes]:
    """Return msgpack lists of the rows; the last may be empty."""
    parts, part = [], list[bytes]()
    for row in rows:
        part.append(msgspec.msgpack.encode(row))
        if table == "leases" and sum(map(len, part)) >= PART_BYTES:
            parts.append(part)
            part = []
    return [LONG_ARRAY + len(each).to_bytes(4) + b"".join(each) for each in [*parts, part]]
