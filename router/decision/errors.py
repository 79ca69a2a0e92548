"""Errors of requests that cannot be routed."""

from collections.abc import Sequence

from kv_protocol.decision import Exclusion


class NoEligibleWorker(Exception):
    """No rank may take the request. `exclusions` has the reason of every rank, the message those of the first ones."""

    def __init__(self, model: str, exclusions: tuple[Exclusion, ...]) -> None:
        reasons = [f"{each.worker_id}/{each.dp_rank}: {each.reason}" for each in exclusions[:_NAMED_MAX]]
        why = _some(reasons, len(exclusions), "; ") or "none is registered"
        super().__init__(f"no worker for model {model!r}: {why}")
        self.model = model
        self.exclusions = exclusions


class WorkerNotNamed(Exception):
    """The mode requires the client to name a worker, and it did not: the client's fault."""

    def __init__(self, allowed: tuple[str, ...]) -> None:
        some = _some(allowed[:_NAMED_MAX], len(allowed), ", ")
        super().__init__(f"x-worker-instance-id: found none, and mode direct needs one; allowed {some}")
        self.field = "x-worker-instance-id"
        self.allowed = allowed


_NAMED_MAX = 8


def _some(named: Sequence[str], count: int, separator: str) -> str:
    """Join the names, and add how many of the `count` are missing."""
    more = count - len(named)
    return separator.join(named) + (f" and {more} more" if more > 0 else "")
