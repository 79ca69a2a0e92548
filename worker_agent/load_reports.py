"""Iteration statistics to core NATS: a thread of its own polls the engine, the newest report of each rank is announced.

Reports are snapshots: when iterations come faster than they are announced, only the newest of a rank counts.
"""

import asyncio
import threading
from typing import Any

import structlog

from kv_protocol import subjects
from kv_protocol.ids import WorkerRank
from kv_protocol.load import LoadReport, encode_load
from kv_runtime.clock import Clock
from kv_runtime.event_log import BrokerUnavailable, EventLog
from kv_runtime.supervise import until
from worker_agent.core.engine import EngineError
from worker_agent.core.load import load_report
from worker_agent.engines.port import Engine

REPORT_PERIOD_S = 0.1
_FAILED_S = 0.1
"""Between a poll that failed and the next."""

_log = structlog.get_logger("load_reports")


class LoadReports:
    """`poll` belongs to a thread, `run` to the event loop."""

    def __init__(
        self, engine: Engine, log: EventLog, clock: Clock, *, model: str, worker_id: str, instance: str, poll_s: float
    ) -> None:
        self._engine, self._event_log, self._clock = engine, log, clock
        self._model, self._worker_id, self._instance = model, worker_id, instance
        self._poll_s = poll_s
        self._newest: dict[int, LoadReport] = {}
        self._announced: dict[int, LoadReport] = {}
        self._fresh = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    @property
    def newest(self) -> dict[int, LoadReport]:
        """The newest report of each rank."""
        return dict(self._newest)

    def poll(self, stop: threading.Event) -> None:
        """Keep the newest reports until `stop` is set."""
        while not stop.is_set():
            for stats in self._polled(stop):
                dp_rank, report = load_report(stats, self._instance)
                self._newest[dp_rank] = report
                self._loop.call_soon_threadsafe(self._fresh.set)

    def _polled(self, stop: threading.Event) -> list[dict[str, Any]]:
        try:
            return self._engine.iteration_stats(self._poll_s)
        except EngineError as error:
            _log.debug("engine_not_polled", reason=str(error))
            stop.wait(_FAILED_S)
            return []

    async def run(self, stop: asyncio.Event) -> None:
        """Announce new reports, each rank at most every `REPORT_PERIOD_S`, until `stop` is set."""
        while not stop.is_set():
            await until(stop, self._fresh.wait())
            self._fresh.clear()
            for dp_rank, report in self.newest.items():
                if self._announced.get(dp_rank) is not report:
                    await self._announce(dp_rank, report)
            await until(stop, self._clock.sleep(REPORT_PERIOD_S))

    async def _announce(self, dp_rank: int, report: LoadReport) -> None:
        self._announced[dp_rank] = report
        await announce_load(self._event_log, self._model, self._worker_id, dp_rank, report)


async def announce_load(log: EventLog, model: str, worker_id: str, dp_rank: int, report: LoadReport) -> None:
    """The report is on core NATS; where that is away, it is lost: a newer one follows."""
    try:
        await log.announce(subjects.load(model, WorkerRank(worker_id, dp_rank)), encode_load(report))
    except BrokerUnavailable as error:
        _log.debug("load_report_lost", reason=str(error))
