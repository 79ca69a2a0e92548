"""Measures one request: routers of both modes, a back end and clients, each a process of its own.

    CPU        of a plain `router`, in rounds; modes and shapes take turns
    stages     of a router that can be observed (`observed_router.py`): shares of moments, times the plain one's CPU

Workers register a source of KV events, so that mode kv reads the index; they publish none.
"""

import os
import signal
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import psutil

from bench.dataplane.systems import KV, OURS, ROUND_ROBIN, RunningSystem, SystemPlan, SystemProcesses
from bench.request.stages import Moment
from bench.rounds import Rounds
from kv_runtime.clock import SystemClock

MODES = (KV, ROUND_ROBIN)
SHAPES = {"300 B": (300, 0), "300 B, streamed": (300, 8), "40 KB": (40_000, 0), "40 KB, streamed": (40_000, 8)}
"""The bytes of a request's body, and the chunks of its answer; 0: the answer is no stream."""
_CONNECTIONS = 8
_POLL_S = 0.05


class MeasuredAmount(NamedTuple):
    """How much is measured. `cores`: the routers', and that of all others; -1: any."""

    rounds: int
    seconds: float
    sample_s: float
    cores: tuple[int, int]


class RequestBench(SystemProcesses):
    """The processes; `run` measures."""

    def __init__(self, amount: MeasuredAmount) -> None:
        super().__init__(amount.cores, event_source="trtllm")
        self._amount = amount
        self._plain: dict[str, RunningSystem] = {}
        self._observed: dict[str, RunningSystem] = {}
        self.rounds = Rounds()
        self.moments: dict[tuple[str, str], list[Moment]] = {}
        """By mode and shape."""
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
        return len(MODES) * len(SHAPES) * (self._amount.rounds + 1)

    async def run(self, on_progress: Callable[[str], None]) -> None:
        """Measure everything; `on_progress` gets the name of each part once it is measured."""
        cells = [(mode, shape) for mode in MODES for shape in SHAPES]
        for mode, shape in cells:
            for running in (self._plain[mode], self._observed[mode]):
                await self._saturate(running, shape, self._amount.seconds / 2)  # warm
        for _ in range(self._amount.rounds):
            for mode, shape in cells:
                self.rounds.add(mode, shape, await self._used(mode, shape))
                on_progress(f"{mode}, {shape}")
        for mode, shape in cells:
            self.moments[mode, shape] = await self._sampled(mode, shape)
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
        process = psutil.Process(pid_of(running))
        before_s, before = running.used().cpu_s, process.cpu_times()
        requests = await self._saturate(running, shape, self._amount.seconds)
        cpu_us, after = 1e6 * (running.used().cpu_s - before_s) / requests, process.cpu_times()
        user, system = after.user - before.user, after.system - before.system
        return {"cpu_us": cpu_us, "kernel_us": cpu_us * system / max(user + system, 1e-9)}

    async def _sampled(self, mode: str, shape: str) -> list[Moment]:
        running = self._observed[mode]
        os.kill(pid_of(running), signal.SIGUSR1)
        await self._saturate(running, shape, self._amount.sample_s)
        os.kill(pid_of(running), signal.SIGUSR2)
        written = self._directory / f"observed {mode}" / "moments.json"
        while not written.exists():
            await SystemClock().sleep(_POLL_S)
        moments = msgspec.json.decode(written.read_bytes(), type=list[Moment])
        written.unlink()
        return moments


def pid_of(running: RunningSystem) -> int:
    """Return the id of the router's process."""
    assert running.process is not None
    return running.process.pid
