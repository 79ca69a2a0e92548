"""The encode workers of one model in the fleet, and which of them is asked.

    registered with role encode                     asked
    draining                                        not asked
    left                                            forgotten
    not heard, or failed, in the last `SILENT_S`    asked after all others

Of several the one with the fewest requests of this worker in flight is asked, of equals the one asked least often. An
engine opens only handles that were made on its machine: where handles are wanted, only workers of `host` are known.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Container, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import structlog

from kv_protocol import fleet, subjects
from kv_protocol.errors import MalformedMessage
from kv_protocol.fleet import HEARTBEAT_PERIOD_S, MISSED_HEARTBEATS_MAX, WorkerDraining, WorkerRegistered
from kv_protocol.fleet_gate import FleetEventRefused, FleetGate
from kv_runtime.clock import Clock
from kv_runtime.event_log import BrokerUnavailable, EventLog, LogMessage
from kv_runtime.supervise import Part
from kv_runtime.telemetry import RateLimitedLog
from worker_agent.media.refusals import MediaRefused
from worker_agent.port.types import EncoderUnavailable

SILENT_S = HEARTBEAT_PERIOD_S * MISSED_HEARTBEATS_MAX

_RETRY_S = 1.0
_log = structlog.get_logger("media")


class EncodeWorker:
    """One encode worker of the fleet."""

    def __init__(self, registration: WorkerRegistered, now_s: float) -> None:
        self.registration, self.draining = registration, registration.drained
        self.heard_s, self.failed_s = now_s, -math.inf
        self.in_flight = self.asked_total = 0

    @property
    def url(self) -> str:
        """Its address."""
        return self.registration.base_url

    def order(self, now_s: float) -> tuple[bool, int, int]:
        """Return the key by which the worker to ask is the smallest."""
        is_doubtful = now_s >= self.heard_s + SILENT_S or now_s < self.failed_s + SILENT_S
        return is_doubtful, self.in_flight, self.asked_total


class EncodeWorkers:
    """The encode workers of `model`; `host` empty: on any machine."""

    def __init__(self, model: str, host: str, clock: Clock) -> None:
        self._model, self._host, self._clock = model, host.lower(), clock
        self._gate = FleetGate()
        self._workers: dict[str, EncodeWorker] = {}
        self._failures = RateLimitedLog(_log, clock)
        self.where = f" at {host}" if host else ""
        self.attempts_total: Counter[str] = Counter()
        """How often one was asked, by outcome: ok, refused (the media, or the worker is busy), failed."""

    def part(self, stage: int, log: EventLog, gate: FleetGate) -> Part:
        """Return the part that follows the workers in `log`; `gate` checks their fleet events."""
        self._gate = gate
        return Part("encode-workers", lambda stop: self._follow(log, stop), stage)

    async def _follow(self, log: EventLog, stop: asyncio.Event) -> None:
        slug, is_read = subjects.model_slug(self._model), False
        await log.listen(subjects.pattern("heartbeat", slug=slug), self._on_heartbeat)
        while not (is_read or stop.is_set()):
            try:
                await log.follow(subjects.FLEET_STREAM, subjects.pattern("fleet", slug=slug), self._on_fleet_event)
                is_read = True
            except BrokerUnavailable:  # a router makes the stream, perhaps later
                await self._clock.wait(stop, _RETRY_S)
        await stop.wait()

    def to_ask(self, tried: Container[str]) -> EncodeWorker | None:
        """Return the worker to ask, none of those whose addresses are `tried`; None if there is no other."""
        now_s = self._clock.now()
        workers = [each for each in self._workers.values() if not each.draining and each.url not in tried]
        return min(workers, key=lambda each: each.order(now_s), default=None)

    @contextmanager
    def asking(self, worker: EncodeWorker) -> Iterator[None]:
        """Count a request at the worker in the block; `EncoderUnavailable` is logged, and names the worker then."""
        worker.in_flight += 1
        worker.asked_total += 1
        outcome = "failed"
        try:
            yield
            outcome = "ok"
        except MediaRefused:
            outcome = "refused"
            raise
        except EncoderUnavailable as error:
            if error.retry_s is None:
                worker.failed_s = self._clock.now()
            else:  # it works, and has enough to do
                outcome = "refused"
            self._failures.warning("encode_worker_failed", key=worker.url, at=worker.url, reason=str(error))
            raise EncoderUnavailable(f"the encode worker at {worker.url}: {error}", error.retry_s) from error
        finally:
            worker.in_flight -= 1
            self.attempts_total[outcome] += 1

    async def _on_fleet_event(self, message: LogMessage) -> None:
        try:
            event = self._gate.admit(message.subject, message.data, message.headers)
        except FleetEventRefused:  # routers log it
            return
        known = self._workers.get(event.worker_id)
        if known is not None and known.registration.instance != event.instance:
            known = None
        if isinstance(event, WorkerRegistered):
            if event.role != "encode" or self._host not in ("", urlsplit(event.base_url).hostname):
                self._workers.pop(event.worker_id, None)
            elif known is None:
                self._workers[event.worker_id] = EncodeWorker(event, self._clock.now())
            else:
                known.registration = event
                known.draining = (known.draining or event.drained) and not event.ends_drain
        elif known is not None and isinstance(event, WorkerDraining):
            known.draining = True
        elif known is not None:
            del self._workers[event.worker_id]

    async def _on_heartbeat(self, message: LogMessage) -> None:
        try:
            worker = self._workers.get(subjects.rank_of(message.subject).worker_id)
            if worker is not None and fleet.decode_heartbeat(message.data).instance == worker.registration.instance:
                worker.heard_s = self._clock.now()
        except MalformedMessage:
            return
