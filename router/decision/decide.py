"""`decide`: a verdict from a view, a request, a policy and a seed. Pure and reproducible.

excluded     ranks that may not take the request (`eligibility.py`), and, for a full miss, of which no candidate
             holds or expects a block, newcomers with a spent share, unless all candidates are such newcomers
candidates   the other ranks; the mode chooses among them (`policies.py`)
reason       the mode's, but `pinned` if the client named the worker, `newcomer` if newcomers were excluded
"""

from collections.abc import Mapping, Sequence

from kv_protocol.errors import LimitExceeded
from router.decision.eligibility import exclusions
from router.decision.errors import NoEligibleWorker
from router.decision.policies import MODES, Candidates, Choice, Mode, choose_by, policy_for
from router.decision.policy import Policy
from router.decision.verdict import Reason, Verdict, exclusions_of
from router.decision.view import RouteRequest, View

HAD_ITS_SHARE = "newcomer: it had its share of requests of which no rank has a block"


def decide(view: View, request: RouteRequest, policy: Policy, seed: int, modes: Mapping[str, Mode] = MODES) -> Verdict:
    """Choose a rank for the request, by the mode of `modes` that the policy of its phase names.

    Raises:
        NoEligibleWorker: no rank is eligible.
        WorkerNotNamed: the mode requires the client to name a worker, and it did not.
        LimitExceeded: a user's mode chose a rank that does not exist.
    """
    policy = policy_for(policy, request, modes)
    mode, why = modes[policy.mode], exclusions(view, request)
    rank_indices: Sequence[int] = range(len(why))
    if not (why is view.unfit and view.is_uniform) and any(why):
        rank_indices = [place for place, reason in enumerate(why) if not reason]
    if not rank_indices:
        raise NoEligibleWorker(request.model, exclusions_of(view, why))
    others = rank_indices
    if mode.reads_overlap and policy.newcomers and any(view.newcomer) and request.reusable_blocks:
        others = _settled(view, rank_indices)
    if others is not rank_indices:
        why = tuple(reason or HAD_ITS_SHARE * view.newcomer[place] for place, reason in enumerate(why))
    choice = choose_by(mode, Candidates(view, others), request, policy, seed)
    if not 0 <= choice.winner < len(others):
        raise LimitExceeded(f"{policy.mode}: winner", choice.winner, f"one of {len(others)} candidates")
    place = others[choice.winner]
    overlap, expected, regret = _held_blocks(view, others, place) if mode.reads_overlap else (0, 0, 0)
    forecast = view.forecast
    return Verdict(
        request=request,
        policy=policy.mode,
        reason=_reason(choice, request, is_one_passed_over=others is not rank_indices),
        action="admit" if choice.meets_targets else policy.unmet,
        meets_targets=choice.meets_targets,
        seed=seed,
        now_s=view.now_s,
        view=view,
        exclusions=why,
        rank_indices=others,
        costs=choice.costs,
        winner=view.ranks[place],
        winner_at=choice.winner,
        runner_up=choice.runner_up,
        margin=choice.margin,
        overlap_blocks=overlap,
        expected_blocks=expected,
        regret_blocks=regret,
        epoch=view.epochs[place],
        trust=view.trust[place].state,
        ttft_s=None if forecast is None else float(forecast.ttft_s[place]),
        itl_s=None if forecast is None else float(forecast.itl_s[place]),
    )


def _settled(view: View, rank_indices: Sequence[int]) -> Sequence[int]:
    """For a full miss, return the ranks except newcomers with a spent share; otherwise, or if none is left, all."""
    others = [place for place in rank_indices if not view.newcomer[place]]
    if not others or len(others) == len(rank_indices) or view.expected[rank_indices].any():
        return rank_indices
    return others


def _reason(choice: Choice, request: RouteRequest, *, is_one_passed_over: bool) -> Reason:
    if request.pinned_worker is not None:
        return "pinned"
    return "newcomer" if is_one_passed_over and choice.reason != "affinity" else choice.reason


def _held_blocks(view: View, rank_indices: Sequence[int], place: int) -> tuple[int, int, int]:
    """Return the blocks held at one rank, the blocks expected there, and how many more the best candidate holds."""
    depths: list[int] = view.overlap[0].tolist()
    overlap = depths[place]
    best = max(depths) if len(rank_indices) == len(depths) else max([depths[each] for each in rank_indices])
    return overlap, max(overlap, view.predicted.item(place)), best - overlap
