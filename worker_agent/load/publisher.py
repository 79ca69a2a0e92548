"""Publishes load reports: a thread polls the engine's statistics, the newest report of each rank is sent.

    the engine                                            announced
    ---------------------------------------------------   ----------------------------------------------------------
    reports new statistics of a rank                      the newest, at most every `REPORT_PERIOD_S`
    is idle: it has none of our requests and reports      every `REST_PERIOD_S`: no requests, the last block counts,
      nothing for `REST_PERIOD_S`                           so that a router corrects requests that it still counts
    has requests of ours, and reports nothing             nothing: an iteration may take long
    cannot be polled, or the thread failed                nothing: the load is unknown

Reports are snapshots: if iterations are faster than announcements, only the newest of a rank counts. A router discards
a report after 5 s without a new one (`router/native/ledger.hpp`); so an idle engine is reported more often.
"""

import asyncio
import threading
from collections.abc import Callable, Iterable

import structlog

from kv_protocol import subjects
from kv_protocol.ids import WorkerRank
from kv_protocol.load import LoadReport, encode_load
from kv_runtime.clock import Clock
from kv_runtime.event_log import BrokerUnavailable, EventLog
from kv_runtime.supervise import RESTARTS, Part, Restarts, SupervisedThread, until
from worker_agent.load.reports import LoadRows, at_rest
from worker_agent.port.engine import POLL_S, Engine
from worker_agent.port.types import EngineError

REPORT_PERIOD_S = 0.1
REST_PERIOD_S = 1.0
FAILED_S = 0.1
"""Pause after a failed poll."""

_log = structlog.get_logger("load_reports")


class LoadReports:
    """`poll` belongs to a thread, `run` to the event loop. `in_flight`: how many requests of ours the engine has."""

    def __init__(
        self,
        engine: Engine,
        log: EventLog,
        clock: Clock,
        *,
        model: str,
        worker_id: str,
        instance: str,
        dp_ranks: Iterable[int],
        in_flight: Callable[[], int],
        poll_s: float = POLL_S,
        restarts: Restarts = RESTARTS,
    ) -> None:
        self._engine, self._event_log, self._clock = engine, log, clock
        self._model, self._worker_id = model, worker_id
        self._poll_s, self._in_flight = poll_s, in_flight
        self.rows = LoadRows(instance, dp_ranks)
        """The parser of the statistics, for its skipped rows."""
        self.thread = SupervisedThread("iteration-stats", self._polls, restarts=restarts)
        """The thread that polls, for its failures."""
        self.poll_failures_total = 0
        self.failure = ""
        """Why the last poll failed; empty if it did not."""
        self.newest: dict[int, LoadReport] = {}
        """The report of each rank that was announced last."""
        self._polled: dict[int, LoadReport] = {}
        self._seen: dict[int, LoadReport] = {}
        self._moved_s = clock.now()
        self._fresh = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def parts(self, stage: int) -> list[Part]:
        """Return the parts: the polling thread, and the announcing task."""
        return [self.thread.part(stage=stage), Part("load-reports", self.run, stage)]

    def poll(self, stop: threading.Event) -> None:
        """Keep the newest reports until `stop` is set; raise `PartGaveUp` after too many failures."""
        self.thread.run(stop)

    def _polls(self, stop: threading.Event) -> None:
        while not stop.is_set():
            for dp_rank, report in self.rows.read(self._rows(stop)):
                self._polled[dp_rank] = report
                self._loop.call_soon_threadsafe(self._fresh.set)

    def _rows(self, stop: threading.Event) -> object:
        try:
            rows = self._engine.iteration_stats(self._poll_s)
        except EngineError as error:
            self.poll_failures_total += 1
            if not self.failure:
                _log.warning("engine_stats_not_polled", reason=str(error))
            self.failure = f"cannot be polled: {error}"
            stop.wait(FAILED_S)
            return []
        self.failure = ""
        return rows

    async def run(self, stop: asyncio.Event) -> None:
        """Announce, each rank at most every `REPORT_PERIOD_S`, until `stop` is set."""
        while not stop.is_set():
            await until(stop, self._clock.wait(self._fresh, REST_PERIOD_S))
            self._fresh.clear()
            for dp_rank, report in self._polled.copy().items():
                if self._seen.get(dp_rank) is not report:
                    self._seen[dp_rank] = report
                    self._moved_s = self._clock.now()
                    await self._announce(dp_rank, report)
            if self._is_at_rest():
                for dp_rank, last in self._seen.items():
                    await self._announce(dp_rank, at_rest(last))
            await self._clock.wait(stop, REPORT_PERIOD_S)

    def _is_at_rest(self) -> bool:
        if self._in_flight() or self.failure or self.thread.failure:
            self._moved_s = self._clock.now()
        return self._clock.now() - self._moved_s >= REST_PERIOD_S

    async def _announce(self, dp_rank: int, report: LoadReport) -> None:
        self.newest = {**self.newest, dp_rank: report}  # a new one: other threads read it
        await announce_load(self._event_log, self._model, self._worker_id, dp_rank, report)


async def announce_load(log: EventLog, model: str, worker_id: str, dp_rank: int, report: LoadReport) -> None:
    """Publish the report on core NATS; without a connection it is lost, and a newer one follows."""
    try:
        await log.announce(subjects.load(model, WorkerRank(worker_id, dp_rank)), encode_load(report))
    except BrokerUnavailable as error:
        _log.debug("load_report_lost", reason=str(error))
