"""`decide`: view, request, policy and seed in, a decision with all its terms out. Pure: the same in, the same out.

eligible   the rank is fit, its role serves whole requests, the prompt fits, no pin forbids it, it has not failed
           this request before
kv         lowest cost (see `cost.py`, `choice.py`)
round-robin  the eligible ranks in turn
"""

from collections.abc import Callable, Sequence

import msgspec

from kv_protocol.decision import Candidate, CostTerms, Decision, Exclusion
from router.core.choice import Choice, choose
from router.core.cost import CostParameters, cost_terms
from router.core.errors import NoEligibleWorker
from router.core.view import RankRow, RouteRequest, View


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """How a router chooses: a mode of `MODES` and its parameters."""

    mode: str = "kv"
    parameters: CostParameters = CostParameters()
    temperature: float = 0.0
    predict_on_route: bool = True
    """Whether blocks on their way to a rank count as held by it."""


def _by_cost(_view: View, terms: Sequence[CostTerms], policy: Policy, seed: int) -> Choice:
    return choose([term.cost for term in terms], policy.temperature, seed)


def _in_turn(view: View, terms: Sequence[CostTerms], _policy: Policy, _seed: int) -> Choice:
    return Choice(view.turn % len(terms), None, None)


MODES: dict[str, Callable[[View, Sequence[CostTerms], Policy, int], Choice]] = {
    "kv": _by_cost,
    "round-robin": _in_turn,
}


def decide(view: View, request: RouteRequest, policy: Policy, seed: int) -> Decision:
    """Return who takes the request.

    Raises:
        NoEligibleWorker: nobody may.
    """
    rows, excluded = [], []
    for row in view.rows:
        reason = _ineligible(row, request)
        if reason:
            excluded.append(Exclusion(worker_id=row.rank.worker_id, dp_rank=row.rank.dp_rank, reason=reason))
        else:
            rows.append(row)
    if not rows:
        raise NoEligibleWorker(request.model, tuple(excluded))
    terms = cost_terms(request, rows, policy.parameters)
    choice = MODES[policy.mode](view, terms, policy, seed)
    return Decision(
        decision_id=request.decision_id,
        request_id=request.request_id,
        model=request.model,
        policy=policy.mode,
        seed=seed,
        now_s=view.now_s,
        block_size=request.block_size,
        isl_tokens=request.isl_tokens,
        reusable_blocks=request.reusable_blocks,
        winner=choice.winner,
        runner_up=choice.runner_up,
        margin_blocks=choice.margin,
        candidates=tuple(_candidate(row, term) for row, term in zip(rows, terms, strict=True)),
        excluded=tuple(excluded),
    )


def _ineligible(row: RankRow, request: RouteRequest) -> str:
    if row.unfit:
        return row.unfit
    if row.role != "aggregated":
        return f"role {row.role}: serves no whole requests"
    if row.max_seq_len and request.isl_tokens + max(1, request.max_tokens) > row.max_seq_len:
        return f"max_seq_len: {request.isl_tokens} + {max(1, request.max_tokens)} tokens, at most {row.max_seq_len}"
    if request.pinned_worker not in (None, row.rank.worker_id):
        return f"pinned to {request.pinned_worker}"
    if request.pinned_dp_rank not in (None, row.rank.dp_rank):
        return f"pinned to dp_rank {request.pinned_dp_rank}"
    return "failed this request" if row.rank in request.tried else ""


def _candidate(row: RankRow, terms: CostTerms) -> Candidate:
    return Candidate(
        worker_id=row.rank.worker_id,
        dp_rank=row.rank.dp_rank,
        overlap_blocks=row.overlap_blocks,
        overlap_source=row.overlap_source,
        predicted_blocks=row.predicted_blocks,
        trust=row.trust,
        trust_reason=row.trust_reason,
        epoch=row.epoch,
        seq=row.seq,
        terms=terms,
    )
