"""`decide`: what a policy chooses of a view that a test made. Pure and reproducible.

excluded     ranks that may not take the request (`eligibility.py`), and, for a full miss, of which no candidate
             holds or expects a block, newcomers with a spent share, unless all candidates are such newcomers
candidates   the other ranks; the mode chooses among them (`policies.py`)
reason       the mode's, but `pinned` if the client named the worker, `newcomer` if newcomers were excluded
"""

from collections import namedtuple
from collections.abc import Mapping
from typing import Any

from kv_protocol.decided import RouteRequest
from router.decision import view
from router.decision.policies import MODES, Mode, Rules
from router.decision.policy import Policy
from router.decision.state import LEASE_S, AffinityLimits, ApproximateLimits
from router.decision.verdict import Verdict
from router.native import built

_FIELDS = (*view.View._fields, "unfit", "misfits")
_named: Any = namedtuple  # noqa: PYI024 - its fields are those of another
View: Any = _named("View", _FIELDS, defaults=(None, None, None, False, (), {}))
"""A view with why its ranks take no work: all that the core reads of them."""


def decide(moment: Any, request: RouteRequest, policy: Policy, seed: int, modes: Mapping[str, Mode] = MODES) -> Verdict:
    """Choose a rank of the `View` for the request, by the mode of `modes` that the policy of its phase names.

    Raises:
        NoEligibleWorker: no rank is eligible.
        WorkerNotNamed: the mode requires the client to name a worker, and it did not.
        LimitExceeded: a user's mode chose a rank that does not exist.
        ValueError: the view lacks columns that the mode reads.
    """
    core = built.Core(LEASE_S, *ApproximateLimits(), *AffinityLimits())
    standing = core.standing(moment.ranks, [each.total_kv_blocks for each in moment.registrations])
    rates, columns = moment.rates, moment._asdict()
    learnt = {"output_tokens": 0.0, "is_learnt": False} if rates is None else rates._asdict()
    columns = {name: found for name, found in (columns | learnt).items() if found is not None}
    return core.decide_by(moment, columns, standing, Rules(modes).of(policy, request), request, seed)
