"""Whether the fleet has headroom for a request: some eligible rank is at its threshold or below.

    over its threshold    queued uncached tokens > threshold x max_num_batched_tokens of its worker

Every rank is over its threshold only after all free tokens (`spare_tokens`) were routed, to whichever rank. So a result
is valid for that many tokens, without another check.

A threshold of 0 is the most sensitive: a rank with any queued prefill is over it. If no rank is eligible, the request
is admitted, and the decision reports the reasons.
"""

import math

import numpy as np

from kv_protocol.decided import RouteRequest
from kv_protocol.fleet import WorkerRegistered
from router.decision.eligibility import RankColumns, exclusions
from router.decision.view import Floats, Ints

BATCHED_TOKENS_DEFAULT = 8192
"""For a worker that does not state its max_num_batched_tokens."""


class Headroom:
    """The threshold, and the allowed queued tokens of each rank of the last call."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._registrations: tuple[WorkerRegistered, ...] = ()
        self._tokens: Floats = np.zeros(0)

    def spare_tokens(self, ranks: RankColumns, queued_tokens: Ints, request: RouteRequest) -> float:
        """Return the free tokens below the thresholds of the eligible ranks; O(ranks).

        Less than 0: all are over their thresholds. Inf: no rank is eligible.
        """
        slack = self._tokens_of(ranks.registrations) - queued_tokens
        why = exclusions(ranks, request)
        if any(why):
            slack = slack[[place for place, reason in enumerate(why) if not reason]]
        if not len(slack):
            return math.inf
        below = slack[slack >= 0]
        return float(below.sum()) if len(below) else -1.0

    def _tokens_of(self, registrations: tuple[WorkerRegistered, ...]) -> Floats:
        if registrations is not self._registrations:
            stated = [each.max_num_batched_tokens or BATCHED_TOKENS_DEFAULT for each in registrations]
            self._registrations, self._tokens = registrations, self._threshold * np.array(stated, dtype=np.float64)
        return self._tokens
