"""Modes of a user's own for tests: each is right until a request says that it should not be."""

from kv_protocol.decided import RouteRequest
from router.decision.policies import Candidates
from router.decision.policy import Policy

UNLUCKY = 13


def first(candidates: Candidates, request: RouteRequest, policy: Policy, seed: int) -> int:
    """Return the first candidate; raise for a request of unlucky priority, and for one that is tried again."""
    del candidates, policy, seed
    if request.priority == UNLUCKY or request.tried:
        raise ValueError("this mode has a defect")
    return 0
