"""Whether the fleet has room for a request: some eligible rank is at its threshold or below.

    over its threshold    queued uncached tokens > threshold x max_num_batched_tokens of its worker

Every rank is over its threshold only after all that was missing to the thresholds (`spare_tokens`) was routed, wherever
it went: so what a look finds holds for that many tokens, without another look.

A threshold of 0 is the most sensitive: a rank with any prefill ahead of it is over. Where no rank may take the request
there is room: whoever decides says why nobody may.
"""

import math

import numpy as np

from kv_protocol.fleet import WorkerRegistered
from router.decision.eligibility import Ranks, exclusions
from router.decision.view import Floats, Ints, RouteRequest

BATCHED_TOKENS_DEFAULT = 8192
"""Of a worker that does not state its max_num_batched_tokens."""


class Headroom:
    """The threshold, and for the ranks that were last looked at how many tokens each may have queued."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._registrations: tuple[WorkerRegistered, ...] = ()
        self._tokens: Floats = np.zeros(0)

    def spare_tokens(self, ranks: Ranks, queued_tokens: Ints, request: RouteRequest) -> float:
        """Return how many tokens are missing to the thresholds of the ranks that may take the request; O(ranks).

        Less than 0: all are over theirs, there is no room. Inf: nobody may take the request.
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
