"""`decide`: a verdict from a view, a request, a policy and a seed. Pure and reproducible.

excluded     ranks that may not take the request (`router/decision/eligibility.py`), and, for a full miss, of which no
             candidate holds or expects a block, newcomers with a spent share, unless all candidates are such newcomers
candidates   the other ranks; the mode chooses among them (`policies.py`)
reason       the mode's, but `pinned` if the client named the worker, `newcomer` if newcomers were excluded
"""

from typing import cast

from kv_protocol.decided import RouteRequest
from kv_protocol.decision import Exclusion
from router.decision.eligibility import NoEligibleWorker, RankColumns, exclusions
from router.decision.policy import Policy
from tests.reference.policies import MODES, choose
from tests.reference.verdict import Verdict
from tests.reference.view import View


def decide(view: View, request: RouteRequest, policy: Policy, seed: int) -> Verdict:
    """Choose a rank for the request, by the policy of its phase.

    Raises:
        NoEligibleWorker: no rank is eligible.
        WorkerNotNamed: the mode requires the client to name a worker, and it did not.
    """
    why = exclusions(cast("RankColumns", view), request)
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
