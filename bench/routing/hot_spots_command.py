"""`router bench hot-spots`: do one hot prompt, or agents that ask one thing after another, pile up at one worker?"""

import click
import msgspec
from rich.console import Console
from rich.table import Table

from bench.report import WINDOW_S, machine_line
from bench.routing.cost_flag import cost_parameters
from bench.routing.hot_spots import Hotness, play, workloads
from router.decision.policies import MODES
from router.decision.policy import CostParameters

SPREAD_MAX = 1.5
"""Of the mean over a run's windows."""
BASE_MODE = "round-robin"
_WIDTH = 120


@click.command("hot-spots", context_settings={"show_default": True})
@click.option("--workers", type=click.IntRange(2, 64), default=8)
@click.option(
    "--modes", default="kv,round-robin", help="how the router chooses, between commas; round-robin is the base"
)
@click.option(
    "--cost", multiple=True, callback=cost_parameters, help="NAME=VALUE: a cost parameter of mode kv; may be repeated"
)
@click.option("--seed", type=int, default=1, help="of the workloads and of the router's draws")
@click.option("--json", "is_json", is_flag=True, help="print JSON and nothing else")
@click.pass_context
def hot_spots(
    context: click.Context, workers: int, modes: str, cost: CostParameters, seed: int, *, is_json: bool
) -> None:
    """Play two workloads that begin with one system prompt on simulated engines and the real router core.

    Printed are hit rate, first-token latency, and the spread: the most uncached tokens of a worker over the mean of
    all, in windows of 10 s. Exit code 1 where kv is less even than 1.5 on average, or hits less often than round robin.
    """
    named = tuple(dict.fromkeys([*modes.split(","), BASE_MODE]))
    unknown = [mode for mode in named if mode not in MODES]
    if unknown:
        context.fail(f"--modes: found {unknown[0]!r}, allowed {', '.join(MODES)}")
    found = {
        (name, mode): play(workload, mode, workers=workers, seed=seed, cost=cost)
        for name, workload in workloads(seed).items()
        for mode in named
    }
    problems = verdicts(found)
    if is_json:
        cells = [{"workload": name, "mode": mode, **each._asdict()} for (name, mode), each in found.items()]
        click.echo(msgspec.json.encode({"workers": workers, "seed": seed, "cells": cells, "problems": problems}))
    else:
        _show(found, problems, workers)
    context.exit(1 if problems else 0)


def verdicts(found: dict[tuple[str, str], Hotness]) -> list[str]:
    """Return what is not as it should be of the runs in mode kv."""
    problems = []
    for (name, mode), hotness in found.items():
        base = found[name, BASE_MODE]
        if mode == "kv" and hotness.spread > SPREAD_MAX:
            problems.append(f"{name}: spread {hotness.spread:.2f}, at most {SPREAD_MAX} allowed")
        if mode == "kv" and hotness.hit_rate <= base.hit_rate:
            problems.append(f"{name}: hit rate {hotness.hit_rate:.4f}, more than {base.hit_rate:.4f} wanted")
    return problems


def _show(found: dict[tuple[str, str], Hotness], problems: list[str], workers: int) -> None:
    console = Console() if Console().is_terminal else Console(width=_WIDTH)
    console.print(f"{workers} workers, virtual time, windows of {WINDOW_S:.0f} s. {machine_line()}", highlight=False)
    table = Table(
        "workload", "mode", "requests", "hit rate", "spread", "worst window", "windows", "TTFT p50, ms", "p99, ms"
    )
    for (name, mode), each in found.items():
        table.add_row(
            name,
            mode,
            str(each.requests),
            f"{each.hit_rate:.1%}",
            f"{each.spread:.2f}",
            f"{each.worst_spread:.2f}",
            str(each.windows),
            f"{each.ttft_p50_s * 1000:.0f}",
            f"{each.ttft_p99_s * 1000:.0f}",
        )
    console.print(table)
    for problem in problems or ["kv: even enough, and more hits than round robin, in both"]:
        console.print(problem, highlight=False)
