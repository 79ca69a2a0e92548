"""`decide`: what a policy chooses of a view that a test made. Pure and reproducible.

excluded     ranks that may not take the request (`eligibility.py`), and, for a full miss, of which no candidate
             holds or expects a block, newcomers with a spent share, unless all candidates are such newcomers
candidates   the other ranks; the mode chooses among them (`policies.py`)
reason       the mode's, but `pinned` if the client named the worker, `newcomer` if newcomers were excluded
"""

from collections import namedtuple
from collections.abc import Mapping
from typing import Any

import numpy as np

from kv_protocol.decided import RouteRequest
from router.decision import view
from router.decision.policies import MODES, Mode, rule_of
from router.decision.policy import Policy
from router.decision.state import LEASE_S, AffinityLimits, ApproximateLimits
from router.decision.verdict import Verdict
from router.decision.view import RANK_NUMBERS
from router.native import built

_FIELDS = (*view.View._fields, "unfit", "has_misfits", "apart")
_named: Any = namedtuple  # noqa: PYI024 - its fields are those of another
View: Any = _named("View", _FIELDS, defaults=(None, None, None, False, (), False, None))
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
    given = moment._asdict() | ({} if moment.rates is None else moment.rates._asdict())
    numbers = np.zeros(len(moment.ranks), RANK_NUMBERS)
    for name in RANK_NUMBERS.names or ():
        if given.get(name) is not None:
            numbers[name] = given[name]
    numbers["held"], numbers["capacity"] = moment.overlap.T, [each.total_kv_blocks for each in moment.registrations]
    rule = rule_of(modes, policy, request.phase, request.endpoint)
    return core.decide_by(moment, numbers.tobytes(), standing, rule, request, seed)
