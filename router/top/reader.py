"""Snapshots of a running router, by GETs of its control plane alone."""

from kv_protocol.errors import UNDECODABLE
from kv_runtime.clock import Clock
from router.doctor.http_client import HttpAsker
from router.processes.merged_metrics import parsed
from router.top.pages import DECISIONS, Labels, Metrics, Snapshot, decisions_of, workers_of

_UNAUTHORIZED = 401


class NotAnswered(Exception):
    """The control plane did not answer as one does; the message says why."""


class FleetReader:
    """Snapshots of one router, each after the last."""

    def __init__(self, asker: HttpAsker, clock: Clock, url: str, token: str) -> None:
        self._asker, self._clock, self._url, self._token = asker, clock, url, token
        self._read_s = 0.0
        self._before: Metrics | None = None

    async def read(self) -> Snapshot:
        """Return the next snapshot; raise `NotAnswered`."""
        try:
            workers = workers_of(await self._get("/v1/workers")).workers
            decisions = decisions_of(await self._get(f"/v1/decisions?limit={DECISIONS}")).decisions
            metrics = _metrics(await self._get("/metrics"))
        except (*UNDECODABLE, ValueError) as error:
            raise NotAnswered(f"this is no answer of a router's control plane: {error}") from error
        passed_s, self._read_s = self._clock.now() - self._read_s, self._clock.now()
        before, self._before = self._before, metrics
        workers.sort(key=lambda each: each.worker_id)
        return Snapshot(self._url, tuple(workers), tuple(decisions), metrics, before, passed_s)

    async def _get(self, path: str) -> bytes:
        reply = await self._asker.get(f"{self._url}{path}", self._token)
        if reply.status == _UNAUTHORIZED:
            raise NotAnswered("401: the token is missing or wrong (--token, KVROUTER_CONTROL__TOKEN)")
        if not reply.is_ok:
            raise NotAnswered(reply.problem or f"{path} answered {reply.status}")
        return reply.body


def _metrics(body: bytes) -> Metrics:
    samples: dict[str, dict[Labels, float]] = {}
    for family in parsed(body.decode()):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return Metrics(samples)
