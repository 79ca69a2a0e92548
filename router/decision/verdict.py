"""A decision: what the core chose (`router/native/core.hpp`), and the names by which people read it.

It keeps the columns that it was made of, so that `decision()` can name every rank, every cost term and every reason
until `forget_others()`. A verdict promises nothing: `RouterState.take` does.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kv_protocol.decided import TERMS, RouteRequest, promise
from kv_protocol.decision import Candidate, CostTerms, CostUnit, Decision, Exclusion, TrustState
from kv_protocol.errors import LimitExceeded
from kv_protocol.hashing import TEXT_SCHEME
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import encode_record
from kv_protocol.ledger import Routed
from router.decision.eligibility import constraints, exclusions_of
from router.decision.policies import Candidates, Choice, Rule
from router.decision.view import COUNTS, RANK_NUMBERS, Depths, Ints, ModelView, RateColumns, View
from router.fleet.trust import Trust
from router.native import built

Reason = Literal["overlap", "load", "turn", "draw", "pinned", "affinity", "newcomer", "only", "predicted_ttft", "user"]
"""Why the winner won: its overlap, its low load, its turn, a draw or a tie decided by the seed, a pin of the client,
its session, newcomers with a spent share, no other candidate, its predicted time, a user's mode."""
SHARE_IS_SPENT = "newcomer: it had its share of requests of which no rank has a block"


class Verdict(built.Verdict):
    """A decision. `winner_at` and `runner_up` index the candidates; their indices among `ranks` are `rank_indices`.

    overlap_blocks    leading blocks that the winner holds on its GPU. 0, like the next two, if the index was not asked
    expected_blocks   the same, including blocks that requests routed before will bring
    regret_blocks     the longest overlap of a candidate minus the winner's
    uncached_tokens   the prompt's tokens that the winner has to compute
    epoch             of the winner's event stream; 0: nothing was received of it
    ttft_s            predicted time to the winner's first token; None: its costs are not in ms, or it decodes only
    action            what happens to the request: admit, or if no rank is predicted to meet its targets, `policy.unmet`
    decision_id       the id of the request's attempt
    model_view        all ranks at the time of the decision; `trusts` has the trust in each, in the same order
    why               for each rank, why it may not take the request, empty if it may; None: all may
    epochs, seqs      how far each rank's event stream was read; None: the index was not asked
    registration      the winner's registration when it was chosen
    """

    __slots__ = ()
    request: RouteRequest
    model_view: ModelView
    trusts: tuple[Trust, ...]

    def _let_choose(self, rule: Rule) -> None:
        """Take the choice of a user's mode."""
        assert rule.mode.choose is not None
        places = self.rank_indices
        chosen = rule.mode.choose(Candidates(self.view(places), places), self.request, rule.policy, self.seed)
        choice = chosen if isinstance(chosen, Choice) else Choice(int(chosen), "user")
        if not 0 <= choice.winner < len(places):
            raise LimitExceeded(f"{rule.policy.mode}: winner", choice.winner, f"one of {len(places)} candidates")
        self.take_choice(
            choice.winner, choice.reason, choice.runner_up, choice.margin, choice.meets_targets, list(choice.costs)
        )

    @property
    def ranks(self) -> tuple[WorkerRank, ...]:
        """All ranks at the time of the decision."""
        return self.model_view.ranks

    @property
    def trust(self) -> TrustState:
        """Trust in what is known of the winner."""
        return self.trusts[self.place].state

    @property
    def exclusions(self) -> tuple[str, ...]:
        """For each rank, why it was no candidate; empty if it was."""
        why = self.why or ("",) * len(self.ranks)
        if not self.passes_over:
            return tuple(why)
        candidates = set(self.rank_indices)
        return tuple(reason or SHARE_IS_SPENT * (place not in candidates) for place, reason in enumerate(why))

    @property
    def promise(self) -> Routed:
        """The lease that the decision begins if it is carried out."""
        return promise(self.request, self.winner, self.uncached_tokens, self.epoch)

    @property
    def cost_unit(self) -> CostUnit:
        """The unit of costs; `own`: a user's mode has its own, or there are no costs."""
        return "ms" if self.is_timed else "own"

    def terms(self, at: int) -> CostTerms:
        """Return the cost terms of one candidate."""
        return CostTerms(**dict(zip(TERMS, self.cost_terms(at), strict=True)))

    def journal_record(self, kv_seq: int) -> bytes:
        """Return the record of the journal; `kv_seq` is how far the index had read the log of events."""
        return self.record(encode_record(self.request), kv_seq)

    @property
    def numbers(self) -> NDArray[np.void]:
        """The `RANK_NUMBERS` of all ranks."""
        return np.frombuffer(self.packed_numbers, RANK_NUMBERS)

    @property
    def overlap(self) -> Depths:
        """(4, n): leading blocks that each rank holds on the tiers 0..t."""
        return self.numbers["held"].T

    @property
    def expected(self) -> Ints:
        """Leading blocks that each rank is expected to have on its GPU."""
        expected: Ints = np.maximum(self.overlap[0], self.numbers["predicted"])
        return expected

    def view(self, places: Sequence[int] | None = None) -> View:
        """Return the columns of the ranks at these indices, by default of all; not cheap."""
        indices, zeros = list(range(len(self.ranks)) if places is None else places), (0,) * len(self.ranks)
        numbers = self.numbers[indices]
        rates = None
        if self.has_rates:
            rates = RateColumns(numbers["prefill"], numbers["decode"], self.output_tokens, self.is_learnt)

        def of(column: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(column[at] for at in indices)

        return View(
            now_s=self.now_s,
            turn=self.turn,
            ranks=of(self.ranks),
            registrations=of(self.model_view.registrations),
            trust=of(self.trusts),
            overlap=numbers["held"].T,
            epochs=of(self.epochs or zeros),
            seqs=of(self.seqs or zeros),
            newcomer=tuple(map(bool, of(self.spent or zeros))),
            bound=None if self.bound is None else WorkerRank(*self.bound),
            rates=rates,
            is_blank=self.is_blank,
            **{name: numbers[name] for name in (*COUNTS, "trust_factor")},
        )

    def decision(self) -> Decision:
        """Return the decision with every candidate and every term by name, for people; not cheap."""
        candidates = tuple(self._candidate(at, place) for at, place in enumerate(self.rank_indices))
        return self._decision(candidates, self.winner_at, self.runner_up, exclusions_of(self.ranks, self.exclusions))

    def brief(self) -> Decision:
        """Return the decision with the winner as its only candidate: as cheap with a thousand ranks as with one."""
        return self._decision((self._candidate(self.winner_at, self.place),), 0, None, ())

    def _decision(
        self, candidates: tuple[Candidate, ...], winner: int, runner_up: int | None, excluded: tuple[Exclusion, ...]
    ) -> Decision:
        request, bound = self.request, self.bound
        return Decision(
            decision_id=request.decision_id,
            request_id=request.request_id,
            model=request.model,
            phase=request.phase,
            endpoint=request.endpoint,
            policy=self.policy,
            seed=self.seed,
            now_s=self.now_s,
            block_size=request.block_size,
            isl_tokens=request.isl_tokens,
            reusable_blocks=request.reusable_blocks,
            winner=winner,
            runner_up=runner_up,
            margin=self.margin,
            candidates=candidates,
            excluded=excluded,
            reason=self.reason,
            action=self.action,
            regret_blocks=self.regret_blocks,
            cost_unit=self.cost_unit,
            session_rank="" if bound is None else str(WorkerRank(*bound)),
            ttft_target_s=request.ttft_target_s,
        )

    def _candidate(self, at: int, place: int) -> Candidate:
        rank, trust = self.ranks[place], self.trusts[place]
        (gpu, host, disk, external), predicted_blocks = self.held(place)
        ttft_s, itl_s = self.predicted_s(at)
        return Candidate(
            worker_id=rank.worker_id,
            dp_rank=rank.dp_rank,
            overlap_blocks=(gpu, host, disk, external),
            overlap_source=trust.overlap_source,
            predicted_blocks=predicted_blocks,
            trust=trust.state,
            trust_reason=trust.reason,
            epoch=self.epochs[place] if self.epochs else 0,
            seq=self.seqs[place] if self.seqs else 0,
            terms=self.terms(at) if self.has_costs else CostTerms(),
            is_weighed=self.has_costs,
            predicted_ttft_s=ttft_s,
            predicted_itl_s=itl_s,
        )


built.name_types(RouteRequest, Verdict, constraints, TEXT_SCHEME)
