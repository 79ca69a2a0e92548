"""`router bench bodies`: which body of a request holds up a router, or a worker, for longest?

A search draws bodies by shape (`shapes.py`), sends them to a real router and to a real agent, one after the other,
and measures what each does to the process (`probe.py`). The worst of the search are sent `--repeats` times more.
"""

import asyncio
from typing import NamedTuple

import click
import msgspec
from rich.console import Console
from rich.table import Table

from bench.bodies.probe import Probed, Target, probe
from bench.bodies.shapes import BodyShape, Search
from bench.processes import FleetProcesses, FleetShape
from bench.report import machine_line
from kv_runtime.process import run_process

HELD_MS_MAX = 20.0
MEMORY_RATIO_MAX = 3.0
_MIB = 1 << 20
SIZES = (60 << 10, 250 << 10, _MIB - 4096, 4 * _MIB, 8 * _MIB - 4096, 16 * _MIB, 64 * _MIB - 4096)
"""Just within each bound by default, and between."""
_WIDTH = 140
_MS_PER_S = 1000


class WorstShape(NamedTuple):
    """A shape at a target: the least of several probes (`Probed`)."""

    target: str
    shape: BodyShape
    status: int
    pause_ms: float
    held_ms: float
    cpu_ms: float
    memory_bytes: int

    @property
    def memory_ratio(self) -> float:
        """Memory in bodies; of small bodies, in 64 MiB: what a process takes at once is not theirs."""
        return self.memory_bytes / max(self.shape.size_bytes, SIZES[-1])


def found_of(target: Target, shape: BodyShape, probed: list[Probed]) -> WorstShape:
    """Return what several probes of a shape found."""
    return WorstShape(
        target.name,
        shape,
        probed[-1].status,
        min(each.pause_s for each in probed) * _MS_PER_S,
        min(each.held_s for each in probed) * _MS_PER_S,
        min(each.cpu_s for each in probed) * _MS_PER_S,
        min(each.memory_bytes for each in probed),
    )


def searched(target: Target, seed: int, draws: int, sizes: tuple[int, ...], *, by_cpu: bool = False) -> Search:
    """Return a search that has sent `draws` bodies; `by_cpu`: what costs CPU time is bad, else what holds up."""
    search = Search(seed, sizes)
    for shape in search.shapes(draws):
        probed = probe(target, shape.path, shape.body())
        search.scores[shape] = probed.cpu_s if by_cpu else probed.held_s
    return search


def worst(target: Target, seed: int, draws: int, repeats: int, rows: int) -> list[WorstShape]:
    """Return the worst shapes of a search, each sent `repeats` times more, the worst first."""
    shapes = searched(target, seed, draws, SIZES).worst(2 * rows)
    found = [
        found_of(target, shape, [probe(target, shape.path, shape.body()) for _ in range(repeats)]) for shape in shapes
    ]
    return sorted(found, key=lambda each: -each.held_ms)[:rows]


def fleet_shape(text: str, encoder: str, *, router_module: str = "router") -> FleetShape:
    """Return a router and a worker whose tokenizer and template are `text`: `byte`, or a local model directory."""
    return FleetShape(
        workers=1,
        worker_settings=("telemetry.log_level=error", "engine.speed=1000", f"engine.text={text}"),
        router_settings=("telemetry.log_level=error", f"tokens.text={text}", f"tokens.encoder={encoder}"),
        router_module=router_module,
    )


def targets_of(fleet: FleetProcesses) -> list[Target]:
    """Return the router and the first worker of a fleet."""
    (name, url), *_ = fleet.worker_urls.items()
    return [Target("router", fleet.data_url, fleet.router.pid), Target("agent", url, fleet.workers[name].pid)]


def verdicts(found: list[WorstShape]) -> list[str]:
    """Return what is not as it should be."""
    slow = [f"{each.target}: {each.shape}: held for {each.held_ms:.0f} ms" for each in found if _is_slow(each)]
    return slow + [
        f"{each.target}: {each.shape}: memory of {each.memory_ratio:.1f} bodies"
        for each in found
        if each.memory_ratio > MEMORY_RATIO_MAX
    ]


def _is_slow(found: WorstShape) -> bool:
    return found.held_ms > HELD_MS_MAX


@click.command("bodies", context_settings={"show_default": True})
@click.option("--draws", type=click.IntRange(1, 100_000), default=200, help="bodies that are tried at each process")
@click.option("--repeats", type=click.IntRange(1, 100), default=5, help="how often the worst are sent again")
@click.option("--rows", type=click.IntRange(1, 100), default=12, help="of the worst, at each process")
@click.option("--seed", type=int, default=1, help="of the search")
@click.option("--text", default="byte", help="tokenizer and template of both: `byte`, or a local model directory")
@click.option(
    "--encoder", type=click.Choice(["auto", "fast", "hf"]), default="auto", help="the router's (tokens.encoder)"
)
@click.option("--json", "is_json", is_flag=True, help="print JSON and nothing else")
@click.pass_context
def bodies(
    context: click.Context, draws: int, repeats: int, rows: int, seed: int, text: str, encoder: str, *, is_json: bool
) -> None:
    """Search for the request bodies that hold up a router or a worker for longest, and print the worst.

    Exit code 1 where one holds a process for more than 20 ms, or takes more than three times its own memory.
    """
    found: list[WorstShape] = []

    async def main(_: asyncio.Event) -> None:
        shape = fleet_shape(text, encoder)
        async with FleetProcesses(shape) as fleet:
            for target in targets_of(fleet):
                found.extend(await asyncio.to_thread(worst, target, seed, draws, repeats, rows))

    run_process(main)
    problems = verdicts(found)
    if is_json:
        cells = [{**each._asdict(), "shape": each.shape._asdict()} for each in found]
        click.echo(
            msgspec.json.encode(
                {"seed": seed, "draws": draws, "text": text, "encoder": encoder, "cells": cells, "problems": problems}
            )
        )
    else:
        _show(found, problems)
    context.exit(1 if problems else 0)


def _show(found: list[WorstShape], problems: list[str]) -> None:
    console = Console(width=_WIDTH)
    table = Table(
        "process",
        "place",
        "filled with",
        "KiB",
        "status",
        "held ms",
        "pause ms",
        "CPU ms",
        "memory MiB",
        title="bodies",
    )
    for each in found:
        place, filler, size_bytes = each.shape
        figures = (
            f"{each.held_ms:.1f}",
            f"{each.pause_ms:.1f}",
            f"{each.cpu_ms:.0f}",
            f"{each.memory_bytes / _MIB:.0f}",
        )
        table.add_row(each.target, place, filler, str(size_bytes >> 10), str(each.status), *figures)
    console.print(table)
    console.print(machine_line())
    for problem in problems:
        console.print(problem, style="red")
