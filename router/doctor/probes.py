"""Queries one router or worker at the beginning and the end of a survey.

An engine that is attached without our agent has `/health` alone: whatever else it lacks is not held against it.
"""

from collections.abc import Sequence

from kv_protocol.fleet import WorkerRegistered
from router.decision.policies import MODES
from router.doctor.facts import LOSSES, WATCHED, AddressAnswer, Counts, RouterLook, RouterSeen, WorkerSeen
from router.doctor.http_client import OK, HttpAsker, Reply
from router.doctor.pages import PageUnreadable, PolicyPage, Workers, counts, decoded, not_ready, unhealthy

_UNREADY, _UNAUTHORIZED = 503, 401
_ALLOWED = "allowed a router's control plane"


async def ready_answer(asker: HttpAsker, url: str) -> AddressAnswer:
    """Return a plane's answer."""
    reply = await asker.get(f"{url}/ready")
    if reply.problem or reply.status not in (OK, _UNREADY):
        return AddressAnswer(url=url, problem=reply.problem or f"status {reply.status} at /ready")
    try:
        return AddressAnswer(url=url, reason=not_ready(reply.body))
    except PageUnreadable as error:
        return AddressAnswer(url=url, problem=str(error))


class RouterProbe:
    """A control plane. Call `first`, later `last`; then `seen`."""

    def __init__(self, asker: HttpAsker, url: str, token: str) -> None:
        self._asker, self.url, self._token = asker, url, token
        self._policy: PolicyPage | None = None
        self._workers = Workers([])
        self._before = self._after = RouterLook()
        self.answer = AddressAnswer(url=url, problem="not asked")
        self.is_token_refused = False

    @property
    def registrations(self) -> Sequence[WorkerRegistered]:
        """Workers that the router knows."""
        return [each.registration for each in self._workers.workers]

    async def first(self) -> None:
        """`answer` is the router's status; without a problem, all of it was read."""
        self.answer = await ready_answer(self._asker, self.url)
        if not self.answer.problem:
            await self._read_policy()
            self._before = await self._look()

    async def last(self) -> None:
        """Query it again."""
        if not self.answer.problem:
            self._after = await self._look()

    def seen(self) -> RouterSeen:
        """Return the observations of both looks."""
        policy = self._policy
        return RouterSeen(
            control=self.answer,
            mode="" if policy is None else policy.mode,
            reads_overlap=policy is None or any(map(reads_overlap, policy.modes())),
            workers=tuple(registration.worker_id for registration in self.registrations),
            broken=self._workers.broken(),
            before=self._before,
            after=self._after,
        )

    async def _read_policy(self) -> None:
        try:
            self._policy = decoded(await self._page("/v1/policy"), PolicyPage, "/v1/policy")
        except PageUnreadable as error:
            self._fail(error)

    async def _look(self) -> RouterLook:
        try:
            self._workers = decoded(await self._page("/v1/workers"), Workers, "/v1/workers")
            metrics = counts(await self._page("/metrics"), WATCHED)
        except PageUnreadable as error:
            self._fail(error)
            return RouterLook()
        return RouterLook(ranks=self._workers.statuses(), metrics=metrics)

    async def _page(self, path: str) -> bytes:
        reply: Reply = await self._asker.get(f"{self.url}{path}", self._token)
        if reply.is_ok:
            return reply.body
        self.is_token_refused = self.is_token_refused or reply.status == _UNAUTHORIZED
        raise PageUnreadable(reply.problem or f"status {reply.status} at {path}, {_ALLOWED}")

    def _fail(self, error: PageUnreadable) -> None:
        if not self.answer.problem:
            self.answer = AddressAnswer(url=self.url, problem=str(error))


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


def reads_overlap(mode: str) -> bool:
    """Return whether the mode reads overlap; assumed for a user's mode."""
    return mode not in MODES or MODES[mode].reads_overlap
