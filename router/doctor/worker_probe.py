"""Queries one worker's HTTP at the beginning of a survey, and its counters at the end.

An engine that is attached without our agent has `/health` alone: whatever else it lacks is not held against it.
"""

from kv_protocol.fleet import WorkerRegistered
from router.doctor.facts import LOSSES, AddressAnswer, Counts, WorkerSeen
from router.doctor.http_client import HttpAsker
from router.doctor.pages import counts, unhealthy


class WorkerProbe:
    """A worker at its registered address. Call `first`, later `last`; then `seen`."""

    def __init__(self, asker: HttpAsker, registration: WorkerRegistered, token: str) -> None:
        self._asker, self._registration, self._token = asker, registration, token
        self._url = registration.base_url.rstrip("/")
        self._answer: AddressAnswer | None = None
        self._before: Counts = {}
        self._after: Counts = {}

    async def first(self) -> None:
        """Query its health; if it does not answer, query nothing else."""
        reply = await self._asker.get(f"{self._url}/health")
        reason = "" if reply.is_ok or reply.problem else unhealthy(reply.body) or f"status {reply.status} at /health"
        self._answer = AddressAnswer(url=self._url, problem=reply.problem, reason=reason)
        self._before = await self._losses()

    async def last(self) -> None:
        """Read its counters again."""
        self._after = await self._losses()

    def seen(self) -> WorkerSeen:
        """Return the observations of both looks."""
        return WorkerSeen(registration=self._registration, http=self._answer, before=self._before, after=self._after)

    async def _losses(self) -> Counts:
        if self._answer is None or self._answer.problem:
            return {}
        return counts((await self._asker.get(f"{self._url}/metrics", self._token)).body, LOSSES)
