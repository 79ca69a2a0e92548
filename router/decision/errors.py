"""Why a request could not be routed."""

from collections.abc import Sequence

from kv_protocol.decision import Exclusion


class NoEligibleWorker(Exception):
    """No rank may take the request; `exclusions` says for every rank why not, the message for the first ones."""

    def __init__(self, model: str, exclusions: tuple[Exclusion, ...]) -> None:
        reasons = [f"{each.worker_id}/{each.dp_rank}: {each.reason}" for each in exclusions[:_NAMED_MAX]]
        why = _some(reasons, len(exclusions), "; ") or "none is registered"
        super().__init__(f"no worker for model {model!r}: {why}")
        self.model = model
        self.exclusions = exclusions


class WorkerNotNamed(Exception):
    """The mode leaves the choice to the caller, who has not made it: the request's own fault."""

    def __init__(self, allowed: tuple[str, ...]) -> None:
        some = _some(allowed[:_NAMED_MAX], len(allowed), ", ")
        super().__init__(f"x-worker-instance-id: found none, and mode direct chooses nobody; allowed {some}")
        self.field = "x-worker-instance-id"
        self.allowed = allowed


_NAMED_MAX = 8


def _some(named: Sequence[str], count: int, separator: str) -> str:
    """Return those that are named, and how many of the `count` are not."""
    more = count - len(named)
    return separator.join(named) + (f" and {more} more" if more > 0 else "")
