"""vllm-router's policy `consistent_hash`, written from its documentation; none of its code is here.

    ring      160 points for each worker; a key belongs to the worker of the first point at or after its hash, the first
              of all after the last
    key       the session id of the request (a header), else its user, else its body

Load is not read. Source: vllm-router's README and flags (the policy), descriptions of it (160 virtual nodes a worker;
the key is looked for in headers, then in the body). Its hash function is another one; here it is BLAKE2b.
"""

from bisect import bisect_left
from hashlib import blake2b

from kv_protocol.decided import RouteRequest
from router.decision.policies import Candidates, Choice
from router.decision.policy import Policy

VIRTUAL_NODES = 160


class SessionHash:
    """The ring, built anew when the workers change."""

    def __init__(self) -> None:
        self._workers: tuple[str, ...] = ()
        self._points: list[tuple[int, int]] = []

    def choose(self, candidates: Candidates, request: RouteRequest, _policy: Policy, _seed: int) -> Choice:
        """Return the worker of the request's key."""
        workers = tuple(rank.worker_id for rank in candidates.columns.ranks)
        if workers != self._workers:
            self._workers = workers
            self._points = sorted(
                (_hash(f"{worker}:{node}".encode()), place)
                for place, worker in enumerate(workers)
                for node in range(VIRTUAL_NODES)
            )
        key = request.session_id.encode() or request.sequence_hashes or request.request_id.encode()
        at = bisect_left(self._points, (_hash(key), 0))
        return Choice(self._points[at % len(self._points)][1], "affinity")


def _hash(key: bytes) -> int:
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little")
