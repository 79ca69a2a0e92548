"""Why a request could not be routed."""

from kv_protocol.decision import Exclusion


class NoEligibleWorker(Exception):
    """No rank may take the request; `exclusions` says for every rank why not."""

    def __init__(self, model: str, exclusions: tuple[Exclusion, ...]) -> None:
        reasons = "; ".join(f"{each.worker_id}/{each.dp_rank}: {each.reason}" for each in exclusions)
        super().__init__(f"no worker for model {model!r}: {reasons or 'none is registered'}")
        self.model = model
        self.exclusions = exclusions


class WorkerNotNamed(Exception):
    """The mode leaves the choice to the caller, who has not made it: the request's own fault."""

    def __init__(self, allowed: tuple[str, ...]) -> None:
        super().__init__(f"x-worker-instance-id: found none, and mode direct chooses nobody; allowed {_some(allowed)}")
        self.field = "x-worker-instance-id"
        self.allowed = allowed


_NAMED_MAX = 8


def _some(names: tuple[str, ...]) -> str:
    more = len(names) - _NAMED_MAX
    return ", ".join(names[:_NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
