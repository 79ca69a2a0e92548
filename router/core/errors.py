"""Why a request could not be routed."""

from kv_protocol.decision import Exclusion


class NoEligibleWorker(Exception):
    """No rank may take the request; `exclusions` says for every rank why not."""

    def __init__(self, model: str, exclusions: tuple[Exclusion, ...]) -> None:
        reasons = "; ".join(f"{each.worker_id}/{each.dp_rank}: {each.reason}" for each in exclusions)
        super().__init__(f"no worker for model {model!r}: {reasons or 'none is registered'}")
        self.model = model
        self.exclusions = exclusions
