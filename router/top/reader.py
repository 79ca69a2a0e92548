"""Snapshots of a running router, by GETs of its control plane alone."""

from urllib.parse import quote

from kv_protocol.errors import UNDECODABLE
from kv_runtime.clock import Clock
from router.doctor.http_client import HttpAsker, Reply
from router.processes.merged_metrics import parsed
from router.top.pages import DECISIONS, Labels, Metrics, Snapshot, decisions_of, explained_of, workers_of

_UNAUTHORIZED = 401


class NotAnswered(Exception):
    """The control plane did not answer as one does; the message says why."""


class FleetReader:
    """Snapshots of one router, each after the last."""

    def __init__(self, asker: HttpAsker, clock: Clock, url: str, token: str) -> None:
        self._asker, self._clock, self._token = asker, clock, token
        self._read_s = 0.0
        self.snapshot = Snapshot(url)

    async def read(self, decision_id: str = "") -> None:
        """Take the next snapshot, with the explanation of the decision if one is named."""
        last = self.snapshot
        try:
            found = await self._next(decision_id)
        except NotAnswered as error:
            found = last._replace(problem=str(error), polls_failed=last.polls_failed + 1)
        self.snapshot = found

    async def _next(self, decision_id: str) -> Snapshot:
        last = self.snapshot
        try:
            workers = workers_of(await self._get("/v1/workers")).workers
            decisions = decisions_of(await self._get(f"/v1/decisions?limit={DECISIONS}")).decisions
            metrics = _metrics(await self._get("/metrics"))
            explained = None
            if decision_id:
                reply = await self._reply(f"/v1/decisions/{quote(decision_id, safe='')}")
                explained = explained_of(reply.body) if reply.is_ok else last.explained
        except (*UNDECODABLE, ValueError) as error:
            raise NotAnswered(f"this is no answer of a router's control plane: {error}") from error
        now_s, before_s = self._clock.now(), self._read_s
        self._read_s = now_s
        return Snapshot(
            last.url,
            is_known=True,
            workers=tuple(sorted(workers, key=lambda each: each.worker_id)),
            decisions=tuple(decisions),
            metrics=metrics,
            before=last.metrics if last.is_known else None,
            passed_s=now_s - before_s,
            explained=explained,
        )

    async def _get(self, path: str) -> bytes:
        reply = await self._reply(path)
        if reply.status == _UNAUTHORIZED:
            raise NotAnswered("401: the token is missing or wrong (--token, KVROUTER_CONTROL__TOKEN)")
        if not reply.is_ok:
            raise NotAnswered(f"{path} answered {reply.status}")
        return reply.body

    async def _reply(self, path: str) -> Reply:
        reply = await self._asker.get(f"{self.snapshot.url}{path}", self._token)
        if reply.problem:
            raise NotAnswered(reply.problem)
        return reply

    def forget_explanation(self) -> None:
        """Drop the explanation of a decision that is not shown any more."""
        self.snapshot = self.snapshot._replace(explained=None)


def _metrics(body: bytes) -> Metrics:
    samples: dict[str, dict[Labels, float]] = {}
    for family in parsed(body.decode()):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return Metrics(samples)
