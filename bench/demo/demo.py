"""`router demo`: one workload through the real thing twice, first round-robin, then by KV overlap; one table.

Every hop is real: nats-server, router and workers are processes; only the engines are simulated, with timing fitted to
an H200. Latency is measured at the client, so a busy machine blurs it: where an event loop lags, it is marked invalid.
"""

import asyncio
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.demo.monitoring import monitoring
from bench.demo.replay import Player
from bench.demo.workload import WorkloadShape, conversations
from bench.processes import FleetProcesses, FleetShape
from bench.report import LAG_LIMIT_S, ShownFigures, figures, lag_p99_s, machine_line
from bench.streaming_client import Measured
from kv_runtime.clock import Clock, SystemClock
from kv_runtime.supervise import until
from router.decision.policies import MODES as MODES_OF_THE_ROUTER

MODEL = "sim-8b"
BLOCK_SIZE = 32
SPEED = 1.0
MODES = ("round-robin", "kv")
_WORKER_SETTINGS = (
    f"engine.block_size={BLOCK_SIZE}",
    f"engine.speed={SPEED}",
    "engine.total_kv_blocks=2048",
    "telemetry.log_level=warning",
)


class ModeResult(NamedTuple):
    """One mode's run."""

    mode: str
    figures: ShownFigures
    lag_p99_s: float
    cpu_s: dict[str, float]
    explanation: str


class DemoStopped(Exception):
    """The demonstration was stopped before it had printed its table."""


class Demo:
    """The demonstration; `seed` makes it the same workload every time."""

    def __init__(self, console: Console, *, workers: int, shape: WorkloadShape, seed: int) -> None:
        self._console = console
        self._workers = workers
        self._shape = shape
        self._seed = seed
        self._clock: Clock = SystemClock()
        self._is_shown = False

    async def run(self, stop: asyncio.Event, *, keep: bool, observe: bool = False) -> None:
        """Print the table; with `keep`, leave the last fleet up until `stop` is set.

        With `observe` the last fleet gets requests until then, and Prometheus and Alertmanager watch it.

        Once `stop` is set the processes are ended, and this returns when they are gone. Raises `DemoStopped` where the
        table was not printed.
        """
        await until(stop, self._run(stop, keep=keep, observe=observe))
        if not self._is_shown:
            raise DemoStopped("stopped before its end; its processes are gone")

    async def _run(self, stop: asyncio.Event, *, keep: bool, observe: bool) -> None:
        total = self._shape.conversations * self._shape.turns
        self._console.print(
            f"{self._workers} simulated workers, {total} requests of {self._shape.conversations} conversations, "
            f"twice. {machine_line()}"
        )
        results = []
        for mode in MODES:
            settings = ("telemetry.log_level=warning", f"policy.seed={self._seed}")
            shape = FleetShape(self._workers, mode, MODEL, _WORKER_SETTINGS, settings)
            async with FleetProcesses(shape) as fleet:
                results.append(await self._play(fleet, mode))
                if mode == MODES[-1]:
                    self._show(results)
                    self._is_shown = True
                    if observe:
                        await self._observe(fleet, stop)
                    elif keep:
                        await self._stay(fleet, stop)

    async def _play(self, fleet: FleetProcesses, mode: str) -> ModeResult:
        columns = (TextColumn("{task.description:>12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console) as progress:
            task = progress.add_task(mode, total=self._shape.conversations * self._shape.turns)
            player = Player(fleet.data_url, MODEL, self._clock, lambda: progress.advance(task))
            cpu_before, lags_before = fleet.cpu_s(), await fleet.lags()
            measured = await player.play(list(conversations(self._shape, self._seed)), self._shape.answer_tokens)
            used = {name: seconds - cpu_before[name] for name, seconds in fleet.cpu_s().items()}
            lags = await fleet.lags()
        return ModeResult(
            mode,
            figures(measured, speed=SPEED, block_size=BLOCK_SIZE),
            max(lag_p99_s(lags_before[url], lags[url]) for url in lags),
            used,
            await self._explanation(fleet, measured),
        )

    async def _explanation(self, fleet: FleetProcesses, measured: list[Measured]) -> str:
        """Return the words of the decision that reused most."""
        best = max(measured, key=lambda each: each.cached_tokens)
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{fleet.control_url}/v1/decisions/{best.decision_id}") as response,
        ):
            return str((await response.json()).get("explanation", ""))

    def _show(self, results: list[ModeResult]) -> None:
        table = Table(title="the same workload, two policies")
        table.add_column("")
        for result in results:
            table.add_column(result.mode, justify="right")
        for name, cells in _rows(results):
            table.add_row(name, *cells)
        self._console.print(table)
        self._console.print("\n[bold]One decision, in words[/bold]")
        self._console.print(results[-1].explanation, highlight=False, markup=False)

    async def _observe(self, fleet: FleetProcesses, stop: asyncio.Event) -> None:
        jobs = {"kv-router": [fleet.control_url], "kv-router-agents": list(fleet.worker_urls.values())}
        with TemporaryDirectory() as directory:
            async with monitoring(Path(directory), jobs) as at:
                self._console.print(f"\nPrometheus {at.prometheus_url}/alerts, Alertmanager {at.alertmanager_url}")
                async with asyncio.TaskGroup() as group:
                    playing = group.create_task(self._play_on(fleet))
                    await self._stay(fleet, stop)
                    playing.cancel()

    async def _play_on(self, fleet: FleetProcesses) -> None:
        """Play further workloads, one after the other, until cancelled."""
        player = Player(fleet.data_url, MODEL, self._clock)
        for seed in count(self._seed + 1):
            await player.play(list(conversations(self._shape, seed)), self._shape.answer_tokens)

    async def _stay(self, fleet: FleetProcesses, stop: asyncio.Event) -> None:
        self._console.print(f"\nstill up: {fleet.data_url} (OpenAI), {fleet.control_url} (control), {fleet.nats_url}")
        for process in fleet.workers.values():
            self._console.print(f"  {process.name}: pid {process.pid}")
        self._console.print("Ctrl-C ends it.")
        await until(stop, asyncio.Event().wait())


def _exact(result: ModeResult) -> str:
    if not MODES_OF_THE_ROUTER[result.mode].reads_overlap:
        return "not asked for"
    return f"{result.figures.exact_predictions} of {result.figures.requests}"


def _rows(results: list[ModeResult]) -> list[tuple[str, list[str]]]:
    return [
        ("requests", [f"{r.figures.requests}" for r in results]),
        ("errors", [f"{r.figures.errors}" for r in results]),
        ("hit rate", [f"{r.figures.hit_rate:.1%}" for r in results]),
        ("TTFT p50, simulated ms", [_ttft(r, r.figures.ttft_p50_ms) for r in results]),
        ("TTFT p99, simulated ms", [_ttft(r, r.figures.ttft_p99_ms) for r in results]),
        ("tokens saved", [f"{r.figures.tokens_saved:,}" for r in results]),
        ("imbalance (max / mean)", [f"{r.figures.imbalance:.2f}" for r in results]),
        ("overlap predicted exactly", [_exact(r) for r in results]),
        ("CPU router, s", [f"{r.cpu_s['router']:.1f}" for r in results]),
        ("CPU nats-server, s", [f"{r.cpu_s['nats-server']:.1f}" for r in results]),
        ("CPU workers, s", [f"{r.cpu_s['workers']:.1f}" for r in results]),
        ("event-loop lag p99, worst process, ms", [f"<= {r.lag_p99_s * 1000:.1f}" for r in results]),
    ]


def _ttft(result: ModeResult, value_ms: float) -> str:
    return f"{value_ms:.0f}" if result.lag_p99_s <= LAG_LIMIT_S else f"invalid ({value_ms:.0f})"
