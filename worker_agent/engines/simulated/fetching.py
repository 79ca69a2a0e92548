"""Requests of a decode rank that wait for KV of another engine.

begin    an admitted request waits, with its blocks
end      its KV has come, or failed; a request that was cancelled meanwhile is forgotten
take     requests whose KV came or failed since the last iteration: the next one begins with them
"""

from worker_agent.engines.simulated.handovers import fetch_of
from worker_agent.engines.simulated.sequences import RunningRequest
from worker_agent.engines.simulated.transfer import Fetch


class FetchingRequests:
    """Requests by id."""

    def __init__(self) -> None:
        self._begun: list[RunningRequest] = []
        self._waiting: dict[str, RunningRequest] = {}
        self._come: dict[str, RunningRequest] = {}
        self._failed: dict[str, RunningRequest] = {}

    def __len__(self) -> int:
        """How many have blocks and are not decoded."""
        return len(self._waiting) + len(self._come) + len(self._failed)

    @property
    def waiting_count(self) -> int:
        """How many wait for their KV."""
        return len(self._waiting)

    @property
    def is_settled(self) -> bool:
        """Whether no request waits for the next iteration to begin with it."""
        return not (self._come or self._failed)

    def begin(self, running: RunningRequest) -> None:
        """Let an admitted request wait for its KV."""
        self._waiting[running.request.request_id] = running
        self._begun.append(running)

    def waiting(self, request_id: str) -> RunningRequest | None:
        """Return a request that waits for its KV."""
        return self._waiting.get(request_id)

    def end(self, request_id: str, *, has_come: bool) -> RunningRequest:
        """End the wait of a request and return it. A cancelled one is forgotten."""
        running = self._waiting.pop(request_id)
        if not running.is_cancelled:
            (self._come if has_come else self._failed)[request_id] = running
        return running

    def forget(self, request_id: str) -> RunningRequest | None:
        """Remove and return a request whose wait is over."""
        return self._come.pop(request_id, None) or self._failed.pop(request_id, None)

    def take(self) -> tuple[list[RunningRequest], list[RunningRequest]]:
        """Return the requests whose KV came, and those whose KV failed, since the last call."""
        come, failed = [*self._come.values()], [*self._failed.values()]
        self._come.clear()
        self._failed.clear()
        return come, failed

    def take_begun(self) -> list[tuple[RunningRequest, Fetch]]:
        """Return the requests that began to wait since the last call, each with its fetch."""
        begun, self._begun = self._begun, []
        return [(running, fetch_of(running)) for running in begun]
