"""The result of a decision as columns: cheap to make, rendered on request.

A verdict keeps its view, so that `decision()` can name every rank, every cost term and every reason at any later time.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from kv_protocol.decided import promise
from kv_protocol.decision import Candidate, CostTerms, Decision, Exclusion, TrustState
from kv_protocol.fleet import WorkerRegistered
from kv_protocol.ids import WorkerRank
from kv_protocol.ledger import Routed
from router.decision.cost import CostColumns
from router.decision.view import RouteRequest, View

Reason = Literal["overlap", "load", "turn", "draw", "pinned", "affinity", "newcomer", "only", "predicted_ttft", "user"]
"""Why the winner won: its overlap, its low load, its turn, a draw or a tie decided by the seed, a pin of the client,
its session, newcomers with a spent share, no other candidate, its forecast, a user's mode."""
Action = Literal["admit", "queue", "reject"]
_NOT_WEIGHED = CostTerms()


class Verdict(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A decision. `winner_at` and `runner_up` index the candidates; their indices in `view` are `rank_indices`."""

    request: RouteRequest
    policy: str
    """The mode that chose."""
    reason: Reason
    action: Action = "admit"
    """What happens to the request; other than admit if the winner is not predicted to meet its targets."""
    meets_targets: bool = True
    seed: int
    now_s: float
    view: View
    """All ranks at the time of the decision."""
    exclusions: tuple[str, ...]
    """For each rank of the view, why it was no candidate; empty if it was."""
    rank_indices: Sequence[int]
    costs: CostColumns | None
    """Of the candidates; None if the mode computes no costs."""
    winner: WorkerRank
    winner_at: int
    runner_up: int | None
    margin: float | None
    overlap_blocks: int
    """Leading blocks that the winner holds on its GPU. 0, like the next three, if the mode reads no overlap."""
    expected_blocks: int
    """The same, including expected blocks."""
    regret_blocks: int
    """The longest overlap of a candidate minus the winner's."""
    epoch: int
    """Of the winner's stream; 0: nothing was received."""
    trust: TrustState
    """Trust in what is known of the winner."""
    ttft_s: float | None = None
    """Predicted latency of the request at the winner; None: not predicted."""
    itl_s: float | None = None

    @property
    def decision_id(self) -> str:
        """The id of the request's attempt."""
        return self.request.decision_id

    @property
    def registration(self) -> WorkerRegistered:
        """The winner's registration when it was chosen."""
        return self.view.registrations[self.rank_indices[self.winner_at]]

    def decision(self) -> Decision:
        """Return the decision with every candidate and every term by name, for people; not cheap."""
        candidates = tuple(self._candidate(at, place) for at, place in enumerate(self.rank_indices))
        return self._decision(candidates, self.winner_at, self.runner_up, exclusions_of(self.view, self.exclusions))

    def brief(self) -> Decision:
        """Return the decision with the winner as its only candidate: as cheap with a thousand ranks as with one."""
        return self._decision((self._candidate(self.winner_at, self.rank_indices[self.winner_at]),), 0, None, ())

    def _decision(
        self, candidates: tuple[Candidate, ...], winner: int, runner_up: int | None, excluded: tuple[Exclusion, ...]
    ) -> Decision:
        request, bound = self.request, self.view.bound
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
            cost_unit="blocks" if self.costs is None else self.costs.unit,
            session_rank="" if bound is None else str(bound),
            ttft_target_s=request.ttft_target_s,
        )

    def _candidate(self, at: int, place: int) -> Candidate:
        view, costs = self.view, self.costs
        gpu, host, disk, external = view.overlap[:, place].tolist()
        return Candidate(
            worker_id=view.ranks[place].worker_id,
            dp_rank=view.ranks[place].dp_rank,
            overlap_blocks=(gpu, host, disk, external),
            overlap_source=view.trust[place].overlap_source,
            predicted_blocks=int(view.predicted[place]),
            trust=view.trust[place].state,
            trust_reason=view.trust[place].reason,
            epoch=view.epochs[place],
            seq=view.seqs[place],
            terms=_NOT_WEIGHED if costs is None else costs.terms(at),
            is_weighed=costs is not None,
            is_spilled=costs is not None and costs.spilled is not None and bool(costs.spilled[at]),
            predicted_ttft_s=None if view.forecast is None else float(view.forecast.ttft_s[place]),
            predicted_itl_s=None if view.forecast is None else float(view.forecast.itl_s[place]),
        )


class Taken(NamedTuple):
    """A decision that is carried out, and its promise."""

    verdict: Verdict
    promise: Routed


def taken(verdict: Verdict) -> Taken:
    """Return the decision with its promise: the request's blocks, and the tokens not expected to be cached."""
    request, uncached_tokens = verdict.request, verdict.request.isl_tokens
    if uncached_tokens:
        uncached_tokens -= min(verdict.expected_blocks, request.reusable_blocks) * request.block_size
    return Taken(verdict, promise(request, verdict.winner, uncached_tokens, verdict.epoch))


def exclusions_of(view: View, why: Sequence[str]) -> tuple[Exclusion, ...]:
    """Return the ranks that have a reason, and the reason."""
    rows = zip(view.ranks, why, strict=True)
    return tuple(Exclusion(worker_id=rank.worker_id, dp_rank=rank.dp_rank, reason=each) for rank, each in rows if each)
