"""`router bench request`: where the CPU time of one request goes.

For each mode the bench starts a plain router and an observed one. The routers, the back end and the clients run in
separate processes.

    CPU        of a request at the plain router, in rounds; modes and shapes take turns
    stages     the observed router's stacks are sampled (`observed_router.py`). The CPU of a stage is its share of the
               samples, times the CPU of a request at the plain router

The workers register a source of KV events, so that mode kv reads the index; they publish no events.
"""

import os
import signal
from collections.abc import Callable, Mapping
from typing import Any

import click
import msgspec
import psutil

from bench.child import BenchFailed, finished
from bench.dataplane.command import cores
from bench.dataplane.systems import (
    KV,
    OURS,
    ROUND_ROBIN,
    RunningSystem,
    SystemAbsent,
    SystemPlan,
    SystemProcesses,
    on_core,
)
from bench.request.stages import ELSE, LOOP, STAGES, SampledStack, own_shares, shares
from bench.tables import FigureTable, Rounds, number, progress, report, report_options
from kv_runtime.clock import Clock

MODES = (KV, ROUND_ROBIN)
SHAPES = {"300 B": (300, 0), "300 B, streamed": (300, 8), "40 KB": (40_000, 0), "40 KB, streamed": (40_000, 8)}
"""The bytes of a request's body, and the chunks of its answer; 0: the answer is no stream."""
_CONNECTIONS = 8
_POLL_S = 0.05


class RequestBench(SystemProcesses):
    """The processes; `run` measures. `of_cores`: the core of the routers, and that of all other processes; -1: any."""

    def __init__(self, of_cores: tuple[int, int], *, rounds: int, seconds: float, sample_s: float) -> None:
        super().__init__(of_cores, event_source="trtllm")
        self._rounds, self._seconds, self._sample_s = rounds, seconds, sample_s
        self._plain: dict[str, RunningSystem] = {}
        self._observed: dict[str, RunningSystem] = {}
        self.rounds = Rounds()
        self.stacks: dict[tuple[str, str], list[SampledStack]] = {}
        """The sampled stacks of the observed routers, by mode and shape."""
        self.failed: list[str] = []

    async def begin(self) -> None:
        """Start all routers."""
        for mode in MODES:
            self._plain[mode] = await self.start(SystemPlan(OURS, mode))
            directory = self._directory / f"observed {mode}"
            directory.mkdir()
            command = ("-m", "bench.request.observed_router", str(directory))
            self._observed[mode] = await self.start(SystemPlan(OURS, mode, command=command))

    @property
    def steps(self) -> int:
        """How many steps `run` takes."""
        return len(MODES) * len(SHAPES) * (self._rounds + 1)

    async def run(self, on_progress: Callable[[str], None]) -> None:
        """Measure everything; `on_progress` gets the name of each part once it is measured."""
        cells = [(mode, shape) for mode in MODES for shape in SHAPES]
        for mode, shape in cells:
            for running in (self._plain[mode], self._observed[mode]):
                await self._saturate(running, shape, self._seconds / 2)  # warm
        for _ in range(self._rounds):
            for mode, shape in cells:
                self.rounds.add(mode, shape, await self._used(mode, shape))
                on_progress(f"{mode}, {shape}")
        for mode, shape in cells:
            self.stacks[mode, shape] = await self._sampled(mode, shape)
            on_progress(f"stages, {mode}, {shape}")

    async def _saturate(self, running: RunningSystem, shape: str, seconds: float) -> float:
        body_bytes, chunks = SHAPES[shape]
        parameters = {"body_bytes": body_bytes, "chunks": chunks, "connections": _CONNECTIONS, "pause_ms": 0}
        answer = await self._load.call("saturate", port=running.port, seconds=seconds, **parameters)
        if answer["errors"]:
            self.failed.append(f"{answer['errors']} of {answer['requests']} requests failed: {shape}")
        return float(answer["requests"])

    async def _used(self, mode: str, shape: str) -> dict[str, float]:
        """Return the CPU of a request at the plain router, and the kernel's part of it."""
        running = self._plain[mode]
        process = psutil.Process(running.pid)
        before_s, before = running.used().cpu_s, process.cpu_times()
        requests = await self._saturate(running, shape, self._seconds)
        cpu_us, after = 1e6 * (running.used().cpu_s - before_s) / requests, process.cpu_times()
        user, system = after.user - before.user, after.system - before.system
        return {"cpu_us": cpu_us, "kernel_us": cpu_us * system / max(user + system, 1e-9)}

    async def _sampled(self, mode: str, shape: str) -> list[SampledStack]:
        running = self._observed[mode]
        os.kill(running.pid, signal.SIGUSR1)
        await self._saturate(running, shape, self._sample_s)
        os.kill(running.pid, signal.SIGUSR2)
        written = self._directory / f"observed {mode}" / "stacks.json"
        while not written.exists():
            await Clock().sleep(_POLL_S)
        stacks = msgspec.json.decode(written.read_bytes(), type=list[SampledStack])
        written.unlink()
        return stacks


ORDER = (*STAGES, LOOP, ELSE)
"""The stages, in the order of the tables."""
_FUNCTIONS = 20
_QUICK = {"rounds": 1, "seconds": 0.3, "sample_s": 0.3}


@click.command("request", context_settings={"show_default": True})
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=5,
    help="in how many rounds each request is measured; medians are shown",
)
@click.option(
    "--seconds", type=click.FloatRange(0.1, 60), default=2.0, help="for how many seconds a round repeats each request"
)
@click.option(
    "--sample",
    "sample_s",
    type=click.FloatRange(0.1, 300),
    default=15.0,
    help="for how many seconds stacks are sampled for each column",
)
@click.option("--quick", is_flag=True, help="one short round: does it run at all")
@report_options
def request(**flags: Any) -> None:  # noqa: ANN401 - one value a flag
    """Measure where the CPU time of one request goes, by stage and by function.

    Routers are real processes with metrics, ledger and journal on, in modes kv and round-robin. The exit status says
    whether the bench ran.
    """
    if flags["quick"]:
        flags |= _QUICK
    of_cores, amount = cores(), {name: flags[name] for name in _QUICK}
    with on_core(of_cores[1]):
        found = finished(_measured(RequestBench(of_cores, **amount)), (BenchFailed, SystemAbsent))
    facts = [f"routers on core {of_cores[0]}; medians of {flags['rounds']} rounds of {flags['seconds']:g} s"]
    measured = {
        "cells": found.rounds.plain(),
        "stages": [{"mode": key[0], "shape": key[1], "shares": shares(each)} for key, each in found.stacks.items()],
        "failed": found.failed,
    }
    made = tables(found.rounds, found.stacks)
    report([*facts, *found.failed], made, measured, flags["json_file"], flags["markdown"])


async def _measured(bench: RequestBench) -> RequestBench:
    async with bench:
        await bench.begin()
        with progress(bench.steps) as on_progress:
            await bench.run(on_progress)
    return bench


def tables(rounds: Rounds, stacks: Mapping[tuple[str, str], list[SampledStack]]) -> list[FigureTable]:
    """Return the CPU of each request: all, the kernel's and each stage's; and the CPU of 20 functions.

    They are the functions that take the most CPU of the 300 B request in mode kv.
    """
    columns = [f"{mode}, {shape}" for mode, shape in stacks]
    cpu_us = {key: rounds.figure(*key, "cpu_us") or 0.0 for key in stacks}
    by_stage = {key: shares(each) for key, each in stacks.items()}
    by_function = {key: own_shares(each) for key, each in stacks.items()}

    def row(title: str, name: str, found: Mapping[tuple[str, str], Mapping[str, float]]) -> tuple[str, ...]:
        return (title, *(number(of.get(name, 0.0) * cpu_us[key]) for key, of in found.items()))

    most = [*by_function[MODES[0], next(iter(SHAPES))]][:_FUNCTIONS]
    stages = [
        ("all", *(number(each) for each in cpu_us.values())),
        ("of it in the kernel", *(number(rounds.figure(*key, "kernel_us")) for key in stacks)),
        *(row(stage, stage, by_stage) for stage in ORDER),
    ]
    functions = [row(f"`{name}`", name, by_function) for name in most]
    return [
        FigureTable("CPU us of a request by stage", ("stage", *columns), stages),
        FigureTable("CPU us of our functions, with the libraries that they call", ("function", *columns), functions),
    ]
