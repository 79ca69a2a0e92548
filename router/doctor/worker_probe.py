"""Queries one worker's HTTP at the beginning of a survey, and its counters at the end.

An engine that is attached without our agent has `/health` alone: whatever else it lacks is not held against it.
"""

from kv_protocol.fleet import WorkerRegistered
from router.doctor.facts import LOSSES, AddressAnswer, Counts, WorkerSeen
from router.doctor.http_client import OK, HttpAsker, Reply, is_beyond_loopback
from router.doctor.pages import counts, health, versions

_LOG_AWAY = "away"


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
        reply = await self._get("/health")
        if reply.problem:
            self._answer = AddressAnswer(url=self._url, problem=reply.problem)
            return
        reason = health(reply.body).reason or f"status {reply.status} at /health"
        status = await self._get("/status", self._token)
        self._answer = AddressAnswer(
            url=self._url,
            is_well=reply.status == OK,
            reason="" if reply.status == OK else reason,
            version=versions((await self._get("/version")).body).agent,
            is_open=is_beyond_loopback(self._url) and (await self._get("/status")).is_ok,
            is_log_away=status.is_ok and health(status.body).log == _LOG_AWAY,
        )
        self._before = counts((await self._get("/metrics")).body, LOSSES)

    async def last(self) -> None:
        """Read its counters again."""
        if self._answer is not None and not self._answer.problem:
            self._after = counts((await self._get("/metrics")).body, LOSSES)

    def seen(self) -> WorkerSeen:
        """Return the observations of both looks."""
        return WorkerSeen(registration=self._registration, http=self._answer, before=self._before, after=self._after)

    async def _get(self, path: str, token: str = "") -> Reply:
        return await self._asker.get(f"{self._url}{path}", token)
