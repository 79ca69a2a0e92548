"""`router demo`: one workload through the real thing twice, first round-robin, then by KV overlap; one table.

Every hop is real: nats-server, router and workers are processes; only the engines are simulated, with timing fitted to
an H200. Times to first token (TTFT) are measured at the client; its process, the router and the engines share this
machine's cores. A quantile of the TTFT is shown if every process's event-loop lag, at the quantile that `LAG_QUANTILES`
has for it, was at most `LATE_SHARE` of this TTFT. p99 of 100 requests would be a single request, so the tail is p90.
"""

import asyncio
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import NamedTuple

import aiohttp
import click
import psutil
from prometheus_client import generate_latest
from rich.console import Console
from rich.markup import escape

from bench.demo.monitoring import ALERTMANAGER, PROMETHEUS, ProgramMissing, monitoring, program
from bench.demo.workload import Player, WorkloadShape, conversations
from bench.processes import FleetProcesses, FleetShape, ProcessFailed
from bench.report import cpu_s, imbalances, lag_counts, lag_s, machine_line, percentile
from bench.streaming_client import Measured
from bench.tables import FigureTable, progress, rich_table
from kv_runtime.clock import Clock
from kv_runtime.process import run_process
from kv_runtime.supervise import until
from kv_runtime.telemetry import LoopLag, new_registry
from router.decision.policies import MODES

BLOCK_SIZE = 32
SPEED = 0.5
"""Simulated seconds in a second: the slower the engines, the less it matters that this machine is late."""
LAG_QUANTILES = {0.50: 0.90, 0.90: 0.99}
LATE_SHARE = 0.1


class Run(NamedTuple):
    """One mode's run. `lags_s`: the lag of the process that had the most, by quantile, in seconds of this machine."""

    mode: str
    measured: Sequence[Measured]
    lags_s: Mapping[float, float]
    cpu_s: Mapping[str, float]
    explanation: str

    @property
    def answered(self) -> list[Measured]:
        """The requests without an error."""
        return [each for each in self.measured if not each.error]

    @property
    def saved_tokens(self) -> int:
        """Prompt tokens that came from a cache."""
        return sum(each.cached_tokens for each in self.answered)

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that came from a cache."""
        return self.saved_tokens / max(1, sum(each.prompt_tokens for each in self.answered))

    def ttft_ms(self, quantile: float) -> float | None:
        """Return this quantile in simulated milliseconds; None if the machine was too busy to measure it."""
        ttft_s = percentile([each.ttft_s for each in self.answered], quantile)
        return ttft_s * SPEED * 1000 if self.lags_s[LAG_QUANTILES[quantile]] <= LATE_SHARE * ttft_s else None

    @property
    def sentence(self) -> str:
        """The result in one sentence."""
        ttft_ms = self.ttft_ms(0.50)
        reused = f"{self.mode}: {self.hit_rate:.0%} of the prompt tokens came from a cache"
        if ttft_ms is None:
            return f"{reused}; this machine was too busy to measure the time to first token."
        return f"{reused}, and the median time to first token was {ttft_ms:.0f} simulated ms."


def rows(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return the rows of the table: a name, and a cell for each run."""
    return [
        ("requests", [f"{len(run.measured)}" for run in runs]),
        ("errors", [f"{len(run.measured) - len(run.answered)}" for run in runs]),
        ("hit rate", [f"{run.hit_rate:.1%}" for run in runs]),
        *((f"TTFT p{q * 100:.0f}, simulated ms", [_ttft(run, q) for run in runs]) for q in LAG_QUANTILES),
        ("tokens saved", [f"{run.saved_tokens:,}" for run in runs]),
        ("imbalance (max / mean)", [f"{_imbalance(run):.2f}" for run in runs]),
        ("overlap predicted exactly", [_exact(run) for run in runs]),
        ("CPU router, s", [f"{run.cpu_s['router']:.1f}" for run in runs]),
        ("CPU nats-server, s", [f"{run.cpu_s['nats-server']:.1f}" for run in runs]),
        ("CPU workers, s", [f"{run.cpu_s['workers']:.1f}" for run in runs]),
        (
            "event-loop lag p90 / p99, simulated ms",
            ["<= " + " / ".join(f"{lag_s * SPEED * 1000:.1f}" for lag_s in run.lags_s.values()) for run in runs],
        ),
    ]


def _ttft(run: Run, quantile: float) -> str:
    ttft_ms = run.ttft_ms(quantile)
    return "not measured" if ttft_ms is None else f"{ttft_ms:.0f}"


def _imbalance(run: Run) -> float:
    requests = [(each.sent_s, each.worker, each.prompt_tokens - each.cached_tokens) for each in run.answered]
    return mean(imbalances(requests, workers=len({each.worker for each in run.answered})))


def _exact(run: Run) -> str:
    if not MODES[run.mode].reads_overlap:
        return "not asked for"
    exact = sum(each.predicted_blocks * BLOCK_SIZE == each.cached_tokens for each in run.answered)
    return f"{exact} of {len(run.measured)}"


MODEL = "sim-8b"
PLAYED = ("round-robin", "kv")
_WORKER_SETTINGS = (
    f"engine.block_size={BLOCK_SIZE}",
    f"engine.speed={SPEED}",
    "engine.total_kv_blocks=2048",
    "telemetry.log_level=warning",
)


class DemoStopped(Exception):
    """The demonstration was stopped before it had printed its table."""


class Demo:
    """The demonstration; the same `seed` gives the same workload. `program`: how to call `router`."""

    def __init__(self, *, program: str, workers: int, seed: int) -> None:
        self._program, self._workers, self._seed = program, workers, seed
        self._console, self._shape, self._clock = Console(), WorkloadShape(), Clock()
        self._is_shown = False

    async def run(self, stop: asyncio.Event, *, keep: bool, observe: bool = False) -> None:
        """Print the table; with `keep`, leave the last fleet up until `stop` is set.

        With `observe` the last fleet gets requests until then, and Prometheus and Alertmanager watch it.

        Once `stop` is set the processes are ended, and this returns when they are gone. Raises `DemoStopped` if the
        table was not printed.
        """
        await until(stop, self._run(stop, keep=keep, observe=observe))
        if not self._is_shown:
            raise DemoStopped("stopped before its end; its processes are gone")

    async def _run(self, stop: asyncio.Event, *, keep: bool, observe: bool) -> None:
        total = self._shape.conversations * self._shape.turns
        self._console.print(
            f"{self._workers} simulated workers at {SPEED:.0%} of an H200's speed, {total} requests of "
            f"{self._shape.conversations} conversations, twice. {machine_line()}"
        )
        runs = list[Run]()
        for mode in PLAYED:
            settings = ("telemetry.log_level=warning", f"policy.seed={self._seed}")
            shape = FleetShape(self._workers, mode, MODEL, _WORKER_SETTINGS, settings)
            async with FleetProcesses(shape) as fleet:
                runs.append(await self._play(fleet, mode))
                if mode == PLAYED[-1]:
                    if keep or observe:
                        self._show(runs, f"{fleet.control_url}/ui/", f"{self._program} top {fleet.control_url}")
                    else:
                        self._show(runs, "", f"{self._program} up, with the web page http://127.0.0.1:8001/ui/")
                    self._is_shown = True
                    if observe:
                        await self._observe(fleet, stop)
                    elif keep:
                        await self._stay(fleet, stop)

    async def _play(self, fleet: FleetProcesses, mode: str) -> Run:
        registry, is_over = new_registry(), asyncio.Event()
        with progress(self._shape.conversations * self._shape.turns) as on_progress:
            player = Player(fleet.data_url, MODEL, self._clock, lambda: on_progress(mode))
            cpu_before, lags_before = _cpu_s(fleet), await fleet.lags()
            async with asyncio.TaskGroup() as group:
                group.create_task(LoopLag(registry, self._clock).run(is_over))
                measured = await player.play(list(conversations(self._shape, self._seed)), self._shape.answer_tokens)
                is_over.set()
            used = {name: seconds - cpu_before[name] for name, seconds in _cpu_s(fleet).items()}
            lags = {url: (lags_before[url], lag) for url, lag in (await fleet.lags()).items()}
        lags["client"] = Counter(), lag_counts(generate_latest(registry).decode())
        worst_s = {q: max(lag_s(*each, q) for each in lags.values()) for q in LAG_QUANTILES.values()}
        return Run(mode, measured, worst_s, used, await self._explanation(fleet, measured))

    async def _explanation(self, fleet: FleetProcesses, measured: list[Measured]) -> str:
        """Return the sentence of the decision that reused most."""
        best = max(measured, key=lambda each: each.cached_tokens)
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{fleet.control_url}/v1/decisions/{best.decision_id}") as response,
        ):
            return str((await response.json()).get("sentence", ""))

    def _show(self, runs: list[Run], page_url: str, command: str) -> None:
        cells = [(name, *each) for name, each in rows(runs)]
        table = FigureTable("the same workload, two policies", ("", *(run.mode for run in runs)), cells)
        self._console.print(rich_table(table))
        lines = ["\n[bold]One decision, in words[/bold] (ms of this machine)", escape(runs[-1].explanation), ""]
        lines += [
            *(run.sentence for run in runs),
            *([f"Web page: {page_url}"] if page_url else []),
            f"Next:     {command}",
        ]
        self._console.print("\n".join(lines), highlight=False, soft_wrap=True)

    async def _observe(self, fleet: FleetProcesses, stop: asyncio.Event) -> None:
        jobs = {"kv-router": [fleet.control_url], "kv-router-agents": list(fleet.worker_urls.values())}
        with TemporaryDirectory() as directory:
            async with monitoring(Path(directory), jobs) as (prometheus_url, alertmanager_url):
                self._console.print(f"\nPrometheus {prometheus_url}/alerts, Alertmanager {alertmanager_url}")
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


def _cpu_s(fleet: FleetProcesses) -> dict[str, float]:
    """Return the CPU seconds used so far by the router, the nats-server and all workers."""
    return {
        "router": cpu_s(fleet.router.pid),
        "nats-server": sum(cpu_s(child.pid) for child in psutil.Process(fleet.router.pid).children()),
        "workers": sum(cpu_s(worker.pid) for worker in fleet.workers.values()),
    }


@click.command()
@click.option("--keep", is_flag=True, help="leave the fleet up afterwards, and print its addresses")
@click.option(
    "--observe", is_flag=True, help="like --keep, with requests, Prometheus and Alertmanager (installed ones)"
)
@click.option("--workers", default=4, show_default=True, type=click.IntRange(1, 64))
@click.option("--seed", default=1, show_default=True, type=int, help="seed of the workload and of every draw")
def demo(keep: bool, observe: bool, workers: int, seed: int) -> None:
    """Show it: one workload through a real fleet twice, round-robin and kv."""
    own = "router" if shutil.which("router") else sys.argv[0]
    show = Demo(program=own, workers=workers, seed=seed)
    try:
        for each in (PROMETHEUS, ALERTMANAGER) if observe else ():
            program(each)  # fails now, not after the table was printed
        run_process(lambda stop: show.run(stop, keep=keep, observe=observe))
    except (DemoStopped, ProcessFailed, ProgramMissing) as error:
        sys.exit(f"router demo: {error}")
