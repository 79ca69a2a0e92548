"""Iteration statistics to load reports on a real NATS: what routers hear of an engine that works, rests or fails."""

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from structlog.testing import capture_logs

from kv_protocol import subjects
from kv_protocol.load import LoadReport, decode_load
from kv_runtime.clock import Clock
from kv_runtime.event_log import EventLog, LogMessage
from tests.support.parts import at_work
from tests.system.integration.broker import eventually
from tests.system.integration.event_path import MODEL, WORKER
from tests.system.integration.scripted_engine import ScriptedEngine
from tests.unit.router.samples import registered
from worker_agent.load.reports import LoadReports
from worker_agent.port.types import EngineError

REST_S = 0.05


def row(number: int, running: int = 1, rank: int | None = None, **changes: Any) -> dict[str, Any]:
    """Return an iteration's statistics. Source: `docs/SOURCES.md` E1.7."""
    told = {
        "iter": number,
        "iterLatencyMS": 12.5,
        "numActiveRequests": running,
        "numQueuedRequests": 2,
        "kvCacheStats": {"maxNumBlocks": 100, "usedNumBlocks": 60},
        "inflightBatchingStats": {"numContextRequests": 1, "numCtxTokens": 7},
    }
    return {**told, **({} if rank is None else {"attentionDpRank": rank}), **changes}


class CountingEngine(ScriptedEngine):
    """Answers polls for statistics with what a test put there, or raises it."""

    def __init__(self, dp_ranks: tuple[int, ...] = (0,)) -> None:
        super().__init__(dp_ranks)
        self._answers: list[Any] = []
        self._told = threading.Condition()
        self.polls = 0

    def iteration_stats(self, timeout_s: float) -> list[dict[str, Any]]:
        with self._told:
            self._told.wait_for(lambda: bool(self._answers), timeout_s)
            self.polls += 1
            answer = self._answers.pop(0) if self._answers else []
        if isinstance(answer, Exception):
            raise answer
        return answer

    def tell(self, *answers: object) -> None:
        with self._told:
            self._answers += answers
            self._told.notify_all()


@dataclass
class Reporting:
    """What runs, and what routers heard of each rank, in order."""

    engine: CountingEngine
    loads: LoadReports
    in_flight: list[int]
    heard: dict[int, list[LoadReport]] = field(default_factory=dict)

    def figures(self, dp_rank: int = 0) -> tuple[int, int, int, int] | None:
        """Return iteration, running, waiting and used blocks, as heard last of the rank."""
        if not self.heard.get(dp_rank):
            return None
        last = self.heard[dp_rank][-1]
        return last.iteration, last.running_requests, last.waiting_requests, last.used_blocks

    async def pass_polls(self, polls: int) -> None:
        """Return once the engine was polled so many times more."""
        target = self.engine.polls + polls
        await eventually(lambda: self.engine.polls >= target)


@asynccontextmanager
async def reporting(
    log: EventLog, monkeypatch: pytest.MonkeyPatch, *, dp_ranks: tuple[int, ...] = (0,)
) -> AsyncIterator[Reporting]:
    monkeypatch.setattr("worker_agent.load.reports.REST_PERIOD_S", REST_S)
    monkeypatch.setattr("worker_agent.load.reports.REPORT_PERIOD_S", 0.01)
    monkeypatch.setattr("worker_agent.load.reports.POLL_S", 0.01)
    engine, in_flight = CountingEngine(dp_ranks), [0]
    worker = registered(WORKER, model=MODEL, dp_ranks=dp_ranks)
    loads = LoadReports(engine, log, Clock(), worker, lambda: in_flight[0])
    running = Reporting(engine, loads, in_flight)

    async def on_report(message: LogMessage) -> None:
        running.heard.setdefault(subjects.rank_of(message.subject).dp_rank, []).append(decode_load(message.data))

    await log.listen(subjects.LOAD_ALL, on_report)
    async with at_work(loads.work.part()):
        yield running


# -------------------------------------------------------------------- at rest
async def test_an_engine_at_rest_is_reported_again_and_again_without_requests(
    log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with reporting(log, monkeypatch, dp_ranks=(0, 1)) as running:
        running.engine.tell([row(1, 3, rank=0), row(1, 3, rank=1)])
        await eventually(lambda: running.figures(0) == (1, 0, 0, 60) and running.figures(1) == (1, 0, 0, 60))
        told = len(running.heard[0])
        await eventually(lambda: len(running.heard[0]) >= told + 3)
        assert running.loads.newest[0].running_requests == 0
        running.in_flight[0] = 1
        running.engine.tell([row(2, 4, rank=0)])
        await eventually(lambda: running.figures(0) == (2, 4, 2, 60))
        assert running.loads.newest[0].running_requests == 4


async def test_the_engine_is_polled_while_requests_keep_the_default_executor_busy(
    log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    with ThreadPoolExecutor(1) as requests:
        asyncio.get_running_loop().set_default_executor(requests)
        requests.submit(release.wait)
        try:
            async with reporting(log, monkeypatch) as running:
                await running.pass_polls(2)
        finally:
            release.set()


async def test_an_engine_that_has_requests_of_ours_and_says_nothing_is_not_taken_to_rest(
    log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with reporting(log, monkeypatch) as running:
        running.in_flight[0] = 1
        running.engine.tell([row(1, 3)])
        await eventually(lambda: running.heard)
        await running.pass_polls(20)
        assert [report.running_requests for report in running.heard[0]] == [3]
        running.in_flight[0] = 0
        await eventually(lambda: running.figures() == (1, 0, 0, 60))


# -------------------------------------------------------------------- failures
async def test_while_statistics_cannot_be_polled_nothing_is_reported_and_that_is_counted_and_told_once(
    log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    with capture_logs() as lines:
        async with reporting(log, monkeypatch) as running:
            running.in_flight[0] = 1
            running.engine.tell([row(1, 3)], *[EngineError("gone")] * 200)
            await eventually(lambda: running.loads.failure == "cannot be polled: gone")
            running.in_flight[0] = 0
            await running.pass_polls(20)
            assert [report.running_requests for report in running.heard[0]] == [3]
            assert running.loads.poll_failures_total >= 20
    assert [line["event"] for line in lines].count("engine_stats_not_polled") == 1
