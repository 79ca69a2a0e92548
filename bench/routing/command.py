"""`router bench trace`: routing quality on a trace, in virtual time."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.report import machine_line
from bench.routing.cost_flag import cost_parameters
from bench.routing.figures import Slo
from bench.routing.grid import GridResult, GridShape, cells, check_fits, run_grid
from bench.routing.report import as_json, show, trace_lines
from bench.routing.synthetic import SyntheticShape, synthetic_trace
from bench.routing.trace import TraceInvalid, TraceRequest, load_trace, spread
from router.decision.policies import MODES

_MODES = tuple(mode for mode in MODES if mode != "direct")
"""A trace names no worker."""
_SIZES = tuple(str(1 << power) for power in range(4, 10))  # 16..512: divisors of a trace's block
_WIDTH = 150
"""Columns of a table that is not printed on a terminal."""
_DEFAULT = SyntheticShape()


def _list(number: type[int] | type[float], least: float, *, above: bool = False) -> Callable[[str], tuple[float, ...]]:
    """Return what reads numbers between commas, none below `least`, each once."""

    def numbers(value: str) -> tuple[float, ...]:
        try:
            found = tuple(number(each) for each in value.split(","))
        except ValueError as error:
            raise ValueError(f"found {value!r}, allowed {number.__name__}s between commas ({error})") from error
        # a NaN is neither
        if not all(each > least or (each == least and not above) for each in found):
            raise ValueError(f"found {value!r}, allowed {'more than' if above else 'at least'} {least:g}")
        return tuple(dict.fromkeys(found))

    return numbers


def _modes(_context: click.Context, _parameter: click.Parameter, value: str) -> tuple[str, ...]:
    modes = tuple(dict.fromkeys(value.split(",")))
    for mode in modes:
        if mode not in _MODES:
            raise click.BadParameter(f"found {mode!r}, allowed {', '.join(_MODES)}")
    return modes


@click.command("trace", context_settings={"show_default": True})
@click.option(
    "--trace",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON lines with timestamp (ms), input_length, output_length, hash_ids; without it a trace is made up",
)
@click.option("--requests", "requests_max", type=click.IntRange(min=1), help="only the first so many")
@click.option(
    "--arrivals",
    type=click.Choice(("recorded", "spread")),
    default="recorded",
    help="spread: those of one moment at random up to the next, for a trace with a coarse clock",
)
@click.option("--workers", type=_list(int, 1), default="4,8,16", help="fleet sizes")
@click.option("--rates", type=_list(float, 0, above=True), default="0.5,1,2", help="speeds of arrival; 1: as recorded")
@click.option("--modes", callback=_modes, default="kv,round-robin", help="how the router chooses")
@click.option("--lag-ms", type=_list(float, 0), default="5,0,50,500", help="from engine to index; grid at the first")
@click.option("--timing-scale", type=_list(float, 0, above=True), default="1", help="engines so many times as slow")
@click.option("--control/--no-control", default=True, help="also play the middle cell with nothing shared")
@click.option("--kv-tokens", type=click.IntRange(min=1), default=700_000, help="KV cache of one worker")
@click.option("--block-size", type=click.Choice(_SIZES), default="512", help="tokens; smaller is slower")
@click.option("--slo-ttft-ms", type=click.FloatRange(min=0), default=2000.0, help="goodput: first token by then")
@click.option("--slo-itl-ms", type=click.FloatRange(min=0), default=50.0, help="goodput: mean between the others")
@click.option(
    "--cost", multiple=True, callback=cost_parameters, help="NAME=VALUE: a cost parameter of mode kv; may be repeated"
)
@click.option("--seed", type=int, default=1, help="of the router's draws and of a made-up trace")
@click.option("--jobs", type=click.IntRange(min=1), default=os.cpu_count() or 1, help="cells played side by side")
@click.option("--json", "is_json", is_flag=True, help="print JSON and nothing else")
@click.option("--sessions", type=click.IntRange(min=1), default=_DEFAULT.sessions, help="made up: how many")
@click.option("--session-rate", type=click.FloatRange(0, min_open=True), default=_DEFAULT.session_rate, help="a second")
@click.option("--turns", type=click.FloatRange(min=1), default=_DEFAULT.turns, help="requests of a session, mean")
@click.option("--think-s", type=click.FloatRange(0, min_open=True), default=_DEFAULT.think_s, help="between, mean")
@click.option("--systems", type=click.IntRange(min=1), default=_DEFAULT.systems, help="different system prompts")
@click.option("--system-tokens", type=click.IntRange(min=0), default=_DEFAULT.system_tokens, help="length of each")
@click.option("--question-tokens", type=click.FloatRange(min=1), default=_DEFAULT.question_tokens, help="mean")
@click.option("--answer-tokens", type=click.FloatRange(min=1), default=_DEFAULT.answer_tokens, help="mean")
@click.pass_context
def trace(context: click.Context, /, **flags: Any) -> None:  # noqa: ANN401 - one value a flag
    """Measure how well requests are placed: simulated H200 engines and the real router core, in virtual time.

    A trace is played by fleets of several sizes, at several speeds, in several modes. Printed are hit rate (share of
    prompt tokens that were not computed again), also as a share of the bound (one cache of the fleet's total size),
    latencies, imbalance and goodput; then the middle cell by lag of KV events, and without any sharing (the control, in
    which no mode may have a hit); then what the targets ask for, and every cell that lost.
    """
    shape = _shape(flags)
    console = Console() if Console().is_terminal else Console(width=_WIDTH)
    try:
        requests = _requests(flags)
        if flags["arrivals"] == "spread":
            requests = spread(requests, flags["seed"])
        check_fits(requests, shape)
    except TraceInvalid as error:
        context.fail(str(error))
    if flags["is_json"]:
        click.echo(as_json(run_grid(shape, requests, jobs=flags["jobs"]), requests))
        return
    console.print(f"{len(cells(shape))} runs in virtual time. {machine_line()}", highlight=False)
    console.print(f"arrivals {flags['arrivals']}; {shape.cost}", highlight=False, soft_wrap=True)
    for line in trace_lines(shape, requests):
        console.print(line, highlight=False, soft_wrap=True)
    show(console, _run(shape, requests, flags["jobs"]))


def _run(shape: GridShape, requests: list[TraceRequest], jobs: int) -> GridResult:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("runs", total=len(cells(shape)))
        return run_grid(shape, requests, jobs=jobs, on_cell=lambda: progress.advance(task))


def _shape(flags: dict[str, Any]) -> GridShape:
    return GridShape(
        workers=flags["workers"],
        rates=flags["rates"],
        modes=flags["modes"],
        lags_s=tuple(lag_ms / 1000 for lag_ms in flags["lag_ms"]),
        slowdowns=flags["timing_scale"],
        control=flags["control"],
        kv_tokens=flags["kv_tokens"],
        block_size=int(flags["block_size"]),
        seed=flags["seed"],
        cost=flags["cost"],
        slo=Slo(flags["slo_ttft_ms"] / 1000, flags["slo_itl_ms"] / 1000),
    )


def _requests(flags: dict[str, Any]) -> list[TraceRequest]:
    if flags["file"] is not None:
        return load_trace(flags["file"], flags["requests_max"])
    made_up = {name: flags[name] for name in SyntheticShape._fields}
    return synthetic_trace(SyntheticShape(**made_up), flags["seed"])[: flags["requests_max"]]
