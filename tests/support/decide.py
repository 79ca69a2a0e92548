"""`decide`: what a policy chooses of a view that a test made. Pure and reproducible.

excluded     ranks that may not take the request (`eligibility.py`), and, for a full miss, of which no candidate
             holds or expects a block, newcomers with a spent share, unless all candidates are such newcomers
candidates   the other ranks; the mode chooses among them (`policies.py`)
reason       the mode's, but `pinned` if the client named the worker, `newcomer` if newcomers were excluded
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kv_protocol.decided import RouteRequest
from kv_protocol.fleet import WorkerRegistered
from kv_protocol.ids import WorkerRank
from router.decision.policies import MODES, Mode, Rules
from router.decision.policy import Policy
from router.decision.state import LEASE_S, AffinityLimits, ApproximateLimits
from router.decision.verdict import Verdict
from router.decision.view import RateColumns
from router.fleet.trust import Trust
from router.native import built


class View(NamedTuple):
    """The columns of `router.decision.view.View`, and why ranks take no work: all that the core reads of them."""

    now_s: float
    turn: int
    ranks: tuple[WorkerRank, ...]
    registrations: tuple[WorkerRegistered, ...]
    unfit: tuple[str, ...]
    trust: tuple[Trust, ...]
    overlap: Any
    predicted: Any
    epochs: tuple[int, ...]
    seqs: tuple[int, ...]
    queued_tokens: Any
    active_requests: Any
    active_blocks: Any
    shared_blocks: Any
    newcomer: Sequence[bool]
    bound: WorkerRank | None = None
    trust_factor: Any = None
    rates: RateColumns | None = None
    is_uniform: bool = False
    seq_len_min: int = 0
    is_blank: bool = False
    misfits: Mapping[str, Mapping[str, str]] = {}


def decide(view: View, request: RouteRequest, policy: Policy, seed: int, modes: Mapping[str, Mode] = MODES) -> Verdict:
    """Choose a rank for the request, by the mode of `modes` that the policy of its phase names.

    Raises:
        NoEligibleWorker: no rank is eligible.
        WorkerNotNamed: the mode requires the client to name a worker, and it did not.
        LimitExceeded: a user's mode chose a rank that does not exist.
        ValueError: the view lacks columns that the mode reads.
    """
    core = built.Core(LEASE_S, *ApproximateLimits(), *AffinityLimits())
    standing = core.standing(view.ranks, [each.total_kv_blocks for each in view.registrations])
    rates, columns = view.rates, view._asdict()
    learnt = {"output_tokens": 0.0, "is_learnt": False} if rates is None else rates._asdict()
    columns = {name: found for name, found in (columns | learnt).items() if found is not None}
    return core.decide_by(view, columns, standing, Rules(modes).of(policy, request), request, seed)
