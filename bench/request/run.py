"""Measures one request: routers of both modes, a back end and clients, each a process of its own.

    CPU        of a plain `router`, in rounds; modes and shapes take turns
    stages     of a router that can be observed (`observed_router.py`): shares of moments, times the plain one's CPU;
               of a compiled one by `perf` (`machine_stacks.py`)
    tools      system calls and shared objects of the plain router
    chunks     CPU of a long stream less that of a short one, over the chunks that it has more
    events     CPU of the router in mode kv while a worker publishes KV events, less that of a time without

Workers register a source of KV events, so that mode kv reads the index; the workers that answer publish none.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import NamedTuple, Self

import psutil

from bench.dataplane.systems import (
    KV,
    OURS,
    ROUND_ROBIN,
    Backend,
    RunningSystem,
    SystemPlan,
    on_core,
    start,
)
from bench.events.run import Child
from bench.request.call_path import call_path
from bench.request.feed import events_use
from bench.request.observed import Observed
from bench.request.results import (
    LONG_CHUNKS,
    PACES,
    SHAPES,
    SHORT_CHUNKS,
    ChunkPace,
    CpuUse,
    RequestResults,
    RequestShape,
    Stages,
    medians,
    of_a_chunk,
)
from bench.request.stages import Moment, Step, calls_by_stage, own_shares, shares
from bench.request.tools import ToolAbsent, counted_calls, sampled_objects

MODES = (KV, ROUND_ROBIN)
_CONNECTIONS = 8
_TRACE_S = 0.3


class MeasuredAmount(NamedTuple):
    """How much is measured. `cores`: the routers', and that of all others; -1: any."""

    rounds: int
    seconds: float
    sample_s: float
    events_s: float
    blocks_s: int
    cores: tuple[int, int]
    uses_perf: bool


class RequestBench:
    """The processes, between entering and leaving the block; `run` measures."""

    def __init__(self, amount: MeasuredAmount) -> None:
        self._amount = amount
        self._cleanup = AsyncExitStack()
        self._plain: dict[str, RunningSystem] = {}
        self._observed: dict[str, RunningSystem] = {}
        self._observing: dict[str, Observed] = {}
        self.results = RequestResults()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as cleanup:
            self._scratch = Path(cleanup.enter_context(TemporaryDirectory()))
            self._group = await cleanup.enter_async_context(asyncio.TaskGroup())
            with on_core(self._amount.cores[1]):
                backend = await Child.start("dataplane.backend", {"event_source": "trtllm"})
                self._load = await Child.start("dataplane.load", {})
            for child in (backend, self._load):
                cleanup.push_async_callback(child.close)
            workers = Backend(backend, backend.started["ports"])
            for mode in MODES:
                self._plain[mode] = await self._started(cleanup, workers, mode, ("-m", "router"))
                directory = self._scratch / mode.replace(" ", "-")
                directory.mkdir()
                command = ("-m", "bench.request.observed_router", str(directory))
                running = self._observed[mode] = await self._started(cleanup, workers, mode, command)
                self._observing[mode] = Observed(pid_of(running), directory)
            self._cleanup = cleanup.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._cleanup.__aexit__(kind, error, traceback)

    async def _started(
        self, cleanup: AsyncExitStack, workers: Backend, mode: str, command: tuple[str, ...]
    ) -> RunningSystem:
        plan = SystemPlan(OURS, mode, command=command)
        running = await start(plan, workers, self._amount.cores, self._scratch, self._group)
        assert running.process is not None
        cleanup.push_async_callback(running.process.end)
        return running

    async def run(self, on_progress: Callable[[str], None]) -> RequestResults:
        """Measure everything; `on_progress` gets the name of each part before it is measured."""
        cells = [(mode, shape) for mode in MODES for shape in SHAPES]
        for running in (*self._plain.values(), *self._observed.values()):
            for shape in SHAPES:
                await self._saturate(running, shape, self._amount.seconds / 2)  # warm
        for number in range(self._amount.rounds):
            on_progress(f"round {number + 1}")
            for mode, shape in cells:
                use = await self._used(mode, shape, self._amount.seconds)
                self.results.rounds.setdefault((mode, shape.name), []).append(use)
        for mode, shape in cells:
            on_progress(f"stages, {mode}, {shape.name}")
            self.results.stages[mode, shape.name] = await self._stages(mode, shape)
        for mode in MODES:
            on_progress(f"tools and chunks, {mode}")
            await self._tools(mode)
            for pace in PACES:
                self.results.chunks[mode, pace.name] = await self._chunk(mode, pace)
        on_progress("events")
        self.results.events = await events_use(
            self._plain[KV], self._amount.events_s, self._amount.blocks_s, self._amount.cores[1]
        )
        return self.results

    async def _saturate(self, running: RunningSystem, shape: RequestShape, seconds: float, **more: int) -> float:
        parameters = {"body_bytes": shape.body_bytes, "chunks": shape.chunks, "connections": _CONNECTIONS} | more
        answer = await self._load.call("saturate", port=running.port, seconds=seconds, **parameters)
        if answer["errors"]:
            self.results.absent.append(f"{answer['errors']} of {answer['requests']} requests failed: {shape.name}")
        return float(answer["requests"])

    async def _used(self, mode: str, shape: RequestShape, seconds: float, **more: int) -> CpuUse:
        """Return the CPU of a request at the plain router."""
        running = self._plain[mode]
        before, ticks_before = running.used().cpu_s, _ticks(running)
        requests = await self._saturate(running, shape, seconds, **more)
        cpu_us = 1e6 * (running.used().cpu_s - before) / requests
        user, system = (after - then for after, then in zip(_ticks(running), ticks_before, strict=True))
        return CpuUse(cpu_us, cpu_us * system / max(user + system, 1e-9))

    async def _stages(self, mode: str, shape: RequestShape) -> Stages:
        running, observed = self._observed[mode], self._observing[mode]
        await observed.start("sample")
        await self._saturate(running, shape, self._amount.sample_s)
        moments = await observed.stop(list[Moment])
        await observed.start("trace")
        requests = await self._saturate(running, shape, _TRACE_S, connections=1)
        steps = await observed.stop(list[Step])
        calls = {stage: count / requests for stage, count in calls_by_stage(steps).items()}
        times = sum(each.times for each in moments)
        return Stages(shares(moments), own_shares(moments), times, calls, call_path(steps))

    async def _tools(self, mode: str) -> None:
        running = self._plain[mode]
        tools = [(counted_calls, self.results.system_calls)]
        if self._amount.uses_perf:
            tools.append((sampled_objects, self.results.objects))
        for tool, results in tools:
            for shape in SHAPES:

                def work(shape: RequestShape = shape) -> Awaitable[float]:
                    return self._saturate(running, shape, self._amount.seconds)

                try:
                    results[mode, shape.name] = await tool(pid_of(running), self._scratch, work)
                except ToolAbsent as error:
                    self.results.absent.append(f"{mode}, {shape.name}: {error}")

    async def _chunk(self, mode: str, pace: ChunkPace) -> CpuUse:
        found = []
        for _ in range(self._amount.rounds):
            short, long = [
                await self._used(mode, shape, self._amount.seconds, **pace.parameters) for shape in pace.shapes()
            ]
            found.append(of_a_chunk(short, long, LONG_CHUNKS - SHORT_CHUNKS))
        return medians(found)


def pid_of(running: RunningSystem) -> int:
    """Return the id of the router's process."""
    assert running.process is not None
    return running.process.pid


def _ticks(running: RunningSystem) -> tuple[float, float]:
    """Return the user and the system CPU seconds of the router's process."""
    times = psutil.Process(pid_of(running)).cpu_times()
    return times.user, times.system
