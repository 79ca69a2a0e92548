"""Engines' metrics to load reports on a real NATS: what routers hear, and what is told and counted when it fails."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from structlog.testing import capture_logs

from kv_protocol import subjects
from kv_protocol.ids import WorkerRank
from kv_protocol.load import LoadReport, decode_load
from kv_runtime.clock import Clock
from kv_runtime.event_log import EventLog, LogMessage
from tests.support.manual_clock import ManualClock
from tests.system.integration.broker import eventually
from tests.system.integration.engine_doubles import (
    DOUBLES,
    EngineDouble,
    Fault,
    PrometheusDouble,
    Rank,
    TrtllmServeDouble,
    VllmDouble,
)
from worker_agent.attached.client import EngineClient, FetchOutcome
from worker_agent.attached.watch import EngineLoads
from worker_agent.events.consolidator import WorkerStreams

MODEL, WORKER = "m", "w0"
WITH_TEXT = [kind for kind, double in DOUBLES.items() if issubclass(double, PrometheusDouble)]
TWO = [Rank(running=3, waiting=1, used_blocks=250), Rank(running=0, waiting=2, used_blocks=10)]


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker_agent.attached.watch.POLL_S", 0.01)


@asynccontextmanager
async def reporting(
    log: EventLog,
    kind: str,
    engine: EngineDouble,
    *,
    dp_ranks: tuple[int, ...] = (0,),
    clock: Clock | None = None,
) -> AsyncIterator[tuple[EngineLoads, EngineClient, dict[int, LoadReport]]]:
    """Loads of the engine are read and announced; what was heard last of each rank."""
    heard: dict[int, LoadReport] = {}

    async def on_report(message: LogMessage) -> None:
        heard[subjects.rank_of(message.subject).dp_rank] = decode_load(message.data)

    for dp_rank in dp_ranks:
        await log.listen(subjects.load(MODEL, WorkerRank(WORKER, dp_rank)), on_report)
    stop = asyncio.Event()
    async with EngineClient(engine.url, kind=kind) as client, asyncio.TaskGroup() as group:
        loads = EngineLoads(
            client,
            log,
            clock or Clock(),
            WorkerStreams(id=WORKER, model=MODEL, instance="i", block_size=engine.block_size, dp_ranks=dp_ranks),
            total_blocks=engine.total_blocks,
        )
        group.create_task(loads.run(stop))
        yield loads, client, heard
        stop.set()


def figures(report: LoadReport) -> tuple[int, int, int, int]:
    return report.running_requests, report.waiting_requests, report.used_blocks, report.total_blocks


@pytest.mark.parametrize("kind", WITH_TEXT)
async def test_each_rank_is_reported_as_the_engine_counts_it(log: EventLog, kind: str) -> None:
    async with (
        DOUBLES[kind](ranks=TWO).serving() as engine,
        reporting(log, kind, engine, dp_ranks=(0, 1)) as (loads, _, heard),
    ):
        await eventually(lambda: len(heard) == 2)
        assert {rank: figures(report) for rank, report in heard.items()} == {0: (3, 1, 250, 1000), 1: (0, 2, 10, 1000)}
        engine.ranks = [Rank(running=9), Rank()]
        await eventually(lambda: heard[0].running_requests == 9)
        assert loads.newest.keys() == {0, 1}
        assert heard[0].instance == "i"


async def test_iterations_are_reported_once_and_an_idle_engine_is_silent(log: EventLog) -> None:
    double = TrtllmServeDouble(ranks=[Rank(running=3, waiting=1, used_blocks=250)])
    async with double.serving() as engine, reporting(log, "trtllm-serve", engine) as (loads, client, heard):
        await eventually(lambda: client.requests_total["metrics", "ok"] > 2)
        assert (heard, loads.newest) == ({}, {})
        engine.iterate(number=41)
        engine.iterate(number=42)
        await eventually(lambda: heard)
        assert figures(heard[0]) == (3, 1, 250, 1000)
        assert (heard[0].iteration, heard[0].iteration_s, heard[0].context_tokens) == (42, 0.0125, 7)


@pytest.mark.parametrize(
    ("outcome", "fault"),
    [
        ("status", Fault(status=404)),
        ("unreadable", Fault(body=b"up 1\n")),
        ("unreadable", Fault(body=b'vllm:num_requests_running{engine="0"} x\n')),
        ("oversize", Fault(body=b"#" * (4 << 20) + b"\n")),
    ],
)
async def test_metrics_that_cannot_be_had_are_counted_told_once_and_forgotten(
    log: EventLog, outcome: FetchOutcome, fault: Fault
) -> None:
    with capture_logs() as lines:
        async with VllmDouble().serving() as engine, reporting(log, "vllm", engine) as (loads, client, heard):
            await eventually(lambda: loads.newest)
            engine.faults["/metrics"] = fault
            await eventually(lambda: client.requests_total["metrics", outcome] > 1)
            assert loads.newest == {}
            del engine.faults["/metrics"]
            engine.ranks = [Rank(running=5)]
            await eventually(lambda: heard[0].running_requests == 5)
    told = [line["event"] for line in lines if line["event"].startswith("engine_load")]
    assert told == ["engine_load_unknown", "engine_load_known_again"]


async def test_the_engines_own_metrics_are_shown_until_they_are_stale(log: EventLog) -> None:
    clock = ManualClock()
    async with (
        VllmDouble(ranks=[Rank(running=3)]).serving() as engine,
        reporting(log, "vllm", engine, clock=clock) as (loads, client, _),
    ):
        await eventually(lambda: clock.sleepers)
        families = loads.own_families()
        assert not isinstance(families, str)
        running = next(each for each in families if each.name == "vllm:num_requests_running").samples
        assert [(each.labels["worker"], each.labels["model"], each.value) for each in running] == [(WORKER, MODEL, 3.0)]
        engine.faults["/metrics"] = Fault(status=500)
        await clock.advance(2.0)
        await eventually(lambda: client.requests_total["metrics", "status"] and clock.sleepers)
        assert (loads.own_families(), loads.text_age_s) == (families, 2.0)
        await clock.advance(0.5)
        assert (loads.own_families(), loads.text_age_s) == ("stale", 2.5)
