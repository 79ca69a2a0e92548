"""Applies fleet events, heartbeats, load reports, the log's connection and time to the state (`Routing.apply`).

`RatesStore` stores in `state.dir` the learnt speed and answer lengths of each model, for a router that restarts.

    rates.json   {"version": 1, "models": [[model, prefill, decode, output_tokens, answers], ...]}

The file is written every `WRITE_S` and when the router stops, if anything was learnt since. A file that cannot be used
is logged and ignored: the router learns everything again.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import structlog

from kv_protocol import subjects
from kv_protocol.errors import UNDECODABLE, MalformedMessage
from kv_protocol.fleet import HEARTBEAT_PERIOD_S, WorkerRegistered, decode_heartbeat
from kv_protocol.fleet_gate import FleetEventRefused, FleetGate
from kv_protocol.journal import (
    FleetApplied,
    LearntRates,
    LedgerApplied,
    LoadApplied,
    LogConnection,
    RatesRestored,
    WorkerHeard,
)
from kv_protocol.ledger import Expired
from kv_protocol.load import decode_load
from kv_runtime.event_log import EventLog, LogMessage, Reading
from kv_runtime.files import replace_file
from kv_runtime.telemetry import RateLimitedLog
from router.decision.routing import Routing
from router.doctor.checks import pairing_findings
from router.doctor.facts import CATALOGUE, Finding
from router.fleet.registry import RANKS_MAX, REFUSAL_CAUSES, RefusalCause

WRITE_S = 60.0
MODELS_MAX = 1024
_log = structlog.get_logger("router")
TICK_S = 1.0
ACQUAINTED_S = 2 * HEARTBEAT_PERIOD_S
_EARLY_MAX = 1024
"""How many unregistered instances are remembered with their last heartbeats; one more, and all are forgotten."""
_LOOK_S = 0.05
MessageKind = Literal["heartbeat", "load"]
_rank_of = lru_cache(RANKS_MAX)(subjects.rank_of)


class _Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the file."""

    version: Literal[1]
    models: Annotated[tuple[LearntRates, ...], msgspec.Meta(max_length=MODELS_MAX)]


class RatesStore:
    """The stored rates of one router; without a directory nothing is stored."""

    def __init__(self, directory: str, routing: Routing) -> None:
        """The directory must exist: `PolicyStore.restore` makes it."""
        self._path = Path(directory) / "rates.json" if directory else None
        self._routing, self._clock = routing, routing.clock
        self._written: tuple[LearntRates, ...] = ()

    def restore(self) -> None:
        """Apply the rates in the file, if there is one that can be used."""
        if self._path is None:
            return
        try:
            models = msgspec.json.decode(self._path.read_bytes(), type=_Stored).models
        except FileNotFoundError:
            return
        except (OSError, *UNDECODABLE) as error:
            _log.warning("rates_not_restored", path=str(self._path), reason=str(error))
            return
        if models:
            self._routing.apply(RatesRestored(now_s=self._clock.now(), models=models))
            self._written = models
            _log.info("rates_restored", path=str(self._path), models=len(models))

    async def run(self, stop: asyncio.Event) -> None:
        """Write the file every `WRITE_S` until `stop` is set, and once more then. Writes do not overlap."""
        is_last = False
        while not is_last:
            await self._clock.wait(stop, WRITE_S)
            is_last = stop.is_set()
            await self._write()

    async def _write(self) -> None:
        models = self._routing.state.learnt()[:MODELS_MAX]
        if self._path is None or models == self._written:
            return
        data = msgspec.json.encode(_Stored(1, models))
        try:
            await asyncio.to_thread(replace_file, self._path, data)  # a disk may be slow
        except OSError as error:
            _log.warning("rates_not_written", path=str(self._path), reason=str(error))
        else:
            self._written = models


class RouterFeeds:
    """Applies messages of the log to one router's state; a part of a process: `run` applies the passing of time."""

    def __init__(
        self, routing: Routing, log: EventLog, gate: FleetGate, looks: Sequence[Callable[[], None]] = ()
    ) -> None:
        """`gate` checks fleet events. `looks` are called every `TICK_S`: each looks at what has changed."""
        self._routing, self._event_log, self._clock, self._looks = routing, log, routing.clock, looks
        self.gate = gate
        self._refusals = RateLimitedLog(_log, self._clock)
        self._fleet = routing.state.fleet
        self._fleet_log: Reading | None = None
        self._logged_pairings: set[Finding] = set()
        self.refused_messages_total = 0
        self.events_without_effect: dict[RefusalCause, int] = dict.fromkeys(REFUSAL_CAUSES, 0)
        """Fleet events that passed the gate and change nothing."""
        self.unregistered_messages: dict[MessageKind, int] = {"heartbeat": 0, "load": 0}
        """Heartbeats of instances, and load reports of ranks, that are not registered; they are not recorded."""
        self._heard_early: dict[tuple[str, str], float] = {}
        """When unregistered instances sent their last heartbeat; a registration may come later, by another stream."""

    async def start(self) -> None:
        """Subscribe to the log."""
        await self._event_log.listen(subjects.HEARTBEAT_ALL, self._on_heartbeat)
        await self._event_log.listen(subjects.LOAD_ALL, self._on_load)
        self._fleet_log = await self._event_log.follow(subjects.FLEET_STREAM, subjects.FLEET_ALL, self._on_fleet_event)

    async def acquainted(self, stop: asyncio.Event) -> None:
        """Return once every registered worker sent a heartbeat, `ACQUAINTED_S` have passed, or `stop` is set.

        A router that takes requests sooner after a restart finds no worker, though the fleet is complete.
        """
        end_s = self._clock.now() + ACQUAINTED_S
        while self._clock.now() < end_s and not stop.is_set():
            is_read = self._fleet_log is not None and not self._fleet_log.unread
            if is_read and all(worker.heard_at_s is not None for worker in self._fleet.workers()):
                return
            await self._clock.sleep(_LOOK_S)

    async def run(self, stop: asyncio.Event) -> None:
        """Apply the passing of time, and look, until `stop` is set."""
        while not stop.is_set():
            now_s, connected = self._clock.now(), self._event_log.is_connected
            if connected != self._fleet.is_log_connected:
                self._routing.apply(LogConnection(now_s=now_s, heard=connected))
            for record in self._routing.tick():
                if isinstance(record, LedgerApplied) and isinstance(record.event, Expired):
                    _log.warning("lease_expired", lease=record.event.lease_id, cause=record.event.cause)
            for look in self._looks:
                await self._clock.sleep(0)  # requests get a turn before each look
                look()
            await self._clock.wait(stop, TICK_S)

    async def _on_fleet_event(self, message: LogMessage) -> None:
        try:
            event = self.gate.admit(message.subject, message.data, message.headers)
        except FleetEventRefused as error:
            self.refused_messages_total += 1
            self._log_refused_event(message, error.reason, str(error))
            return
        refusal = self._fleet.refusal(event)
        if refusal is not None:
            self.events_without_effect[refusal.cause] += 1
            if refusal.cause != "unregistered":  # a gone worker's last event stays on the log
                self._log_refused_event(message, refusal.cause, refusal.reason)
            return
        now_s = self._clock.now()
        self._routing.apply(FleetApplied(now_s=now_s, event=event))
        _log.info("fleet_event", kind=type(event).__name__, worker=event.worker_id, instance=event.instance)
        heard_s = self._heard_early.pop((event.worker_id, event.instance), -math.inf)
        worker = self._fleet.worker(event.worker_id)
        if isinstance(event, WorkerRegistered) and worker is not None:
            if now_s - heard_s < ACQUAINTED_S:
                self._routing.apply(WorkerHeard(now_s=now_s, worker_id=event.worker_id, instance=event.instance))
            for each in self._fleet.differences([worker], now_s)[event.worker_id]:
                _log.error("worker_differs", worker=event.worker_id, **each._asdict())
        self._log_pairings()

    def _log_refused_event(self, message: LogMessage, cause: str, reason: str) -> None:
        self._refusals.warning("fleet_event_refused", key=cause, subject=message.subject, cause=cause, reason=reason)

    def _log_pairings(self) -> None:
        """Log the incompatible pairs among each model's workers, each once while it lasts."""
        registered = [worker.registration for worker in self._fleet.workers()]
        models = {each.model for each in registered}
        found = {
            one for model in models for one in pairing_findings([each for each in registered if each.model == model])
        }
        for each in sorted(found - self._logged_pairings, key=str):
            meaning = CATALOGUE[each.id]
            _log.warning("workers_do_not_go_together", of=each.of, found=each.found, why=meaning.why, fix=meaning.fix)
        self._logged_pairings = found

    async def _on_heartbeat(self, message: LogMessage) -> None:
        try:
            rank, heartbeat = _rank_of(message.subject), decode_heartbeat(message.data)
        except MalformedMessage as error:
            self._refuse(message, error)
            return
        now_s, worker = self._clock.now(), self._fleet.worker(rank.worker_id)
        if worker is not None and worker.registration.instance == heartbeat.instance:
            self._routing.apply(WorkerHeard(now_s=now_s, worker_id=rank.worker_id, instance=heartbeat.instance))
            return
        self.unregistered_messages["heartbeat"] += 1
        if len(self._heard_early) >= _EARLY_MAX:
            self._heard_early.clear()
        self._heard_early[rank.worker_id, heartbeat.instance] = now_s

    async def _on_load(self, message: LogMessage) -> None:
        try:
            (worker_id, dp_rank), report = _rank_of(message.subject), decode_load(message.data)
        except MalformedMessage as error:
            self._refuse(message, error)
            return
        now_s, worker = self._clock.now(), self._fleet.worker(worker_id)
        known = None if worker is None else worker.registration
        if known is not None and known.instance == report.instance and dp_rank in known.dp_ranks:
            self._routing.apply(LoadApplied(now_s=now_s, worker_id=worker_id, dp_rank=dp_rank, report=report))
        else:
            self.unregistered_messages["load"] += 1

    def _refuse(self, message: LogMessage, error: MalformedMessage) -> None:
        self.refused_messages_total += 1
        self._refusals.warning("message_refused", key=message.subject, subject=message.subject, reason=str(error))
