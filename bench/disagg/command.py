"""`router bench disagg`: the same GPUs aggregated, and divided into prefill and decode workers, in virtual time."""

import os
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.disagg.figures import SLOS, DisaggFigures
from bench.disagg.fleet import DisaggSetting
from bench.disagg.grid import FULL_RATES, SHORT_RATES, DisaggCell, Grid, default_layouts, play_all
from bench.disagg.layouts import layouts_of
from bench.disagg.report import as_json, plot, show
from bench.routing.figures import Slo
from bench.routing.grid import GridShape, check_fits
from bench.routing.synthetic import SyntheticShape, synthetic_trace
from bench.routing.trace import TraceInvalid, TraceRequest, load_trace, spread
from router.decision.disaggregation import ConditionalLimits
from worker_agent.engines.simulated.transfer import TransferRules

_SHORT_REQUESTS, _FULL_REQUESTS = 400, 1500
_MADE_UP = SyntheticShape(
    turns=2.0,
    systems=32,
    system_tokens=2048,
    question_tokens=6000.0,
    answer_tokens=350.0,
    think_s=10.0,
    session_rate=1.5,
)
"""Prompts and answers about as long as the recorded conversations', and as many a second."""
_WIDTH = 230
"""Columns of a table that is not printed on a terminal."""
_SIZES = tuple(str(1 << power) for power in range(4, 10))  # 16..512: divisors of a trace's block


def _rates(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[float, ...] | None:
    if value is None:
        return None
    try:
        rates = tuple(dict.fromkeys(float(each) for each in value.split(",")))
    except ValueError:
        rates = ()
    if not rates or not all(0 < rate < float("inf") for rate in rates):  # a NaN is neither
        raise click.BadParameter(f"found {value!r}, allowed numbers above 0 between commas")
    return rates


def _slos(_context: click.Context, _parameter: click.Parameter, value: tuple[str, ...]) -> tuple[Slo, ...]:
    slos = []
    for each in value:
        ttft, _, itl = each.partition("/")
        try:
            slo = Slo(float(ttft) / 1000, float(itl) / 1000)
        except ValueError:
            slo = Slo(0.0, 0.0)
        if not (slo.ttft_s > 0 and slo.itl_s > 0):
            raise click.BadParameter(f"found {each!r}, allowed ms of TTFT / ms of ITL, as 2000/50")
        slos.append(slo)
    return tuple(dict.fromkeys(slos)) or SLOS


@click.command("disagg", context_settings={"show_default": True})
@click.option(
    "--trace",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON lines with timestamp (ms), input_length, output_length, hash_ids; without it a trace is made up",
)
@click.option("--full", is_flag=True, help="1,500 requests, more layouts, more rates: some ten minutes of CPU")
@click.option("--requests", "requests_max", type=click.IntRange(min=1), help="only the first so many")
@click.option("--layouts", help="between commas, as 8a,3p5d,3p5d+isl_bounding,3p5d@65536; all of as many GPUs")
@click.option("--rates", callback=_rates, help="speeds of arrival between commas; 1: as recorded")
@click.option("--slo", "slos", multiple=True, callback=_slos, help="MS/MS of TTFT and mean ITL; may be repeated")
@click.option("--kv-tokens", type=click.IntRange(min=1), default=700_000, help="KV cache of one worker")
@click.option("--block-size", type=click.Choice(_SIZES), default="512", help="tokens; smaller is slower")
@click.option("--bandwidth-gb-s", type=click.FloatRange(0, min_open=True), default=50.0, help="of every transfer")
@click.option("--prefill-busy", type=click.FloatRange(min=0), default=2.0, help="of isl_or_load, prefill_load")
@click.option("--decode-busy", type=click.FloatRange(0, 1), default=0.8, help="of conditional layouts")
@click.option("--seed", type=int, default=1, help="of the router's draws, of arrivals, and of a made-up trace")
@click.option("--jobs", type=click.IntRange(min=1), default=os.cpu_count() or 1, help="cells played side by side")
@click.option("--json", "is_json", is_flag=True, help="print JSON and nothing else")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="write disagg.json and disagg.svg there")
@click.pass_context
def disagg(context: click.Context, /, **flags: Any) -> None:  # noqa: ANN401 - one value a flag
    """Measure what dividing GPUs into prefill and decode workers gives, and what it costs.

    A trace is played at several speeds by simulated H200 engines, of which each layout has as many, with KV on its way
    between them, and the real router core in mode kv, plans and phases included. Requests that a trace's clock shows at
    one moment are spread up to the next. Printed are all cells, also those in which requests fail because a transfer
    buffer is smaller than the longest prompt, and by which figures the aggregated layout wins and loses.
    """
    try:
        requests = _requests(flags)
        grid = _grid(flags, requests)
        check_fits(requests, GridShape(kv_tokens=grid.setting.kv_tokens, block_size=grid.setting.block_size))
    except TraceInvalid as error:
        context.fail(str(error))
    found = _played(grid, requests, flags["jobs"])
    if flags["out"] is not None:
        flags["out"].mkdir(parents=True, exist_ok=True)
        (flags["out"] / "disagg.json").write_bytes(as_json(grid, found, requests))
        (flags["out"] / "disagg.svg").write_text(plot(grid, found))
    if flags["is_json"]:
        click.echo(as_json(grid, found, requests), nl=False)
        return
    show(Console() if Console().is_terminal else Console(width=_WIDTH), grid, found, requests)


def _played(grid: Grid, requests: list[TraceRequest], jobs: int) -> dict[DisaggCell, DisaggFigures]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("runs", total=len(grid.cells))
        return play_all(grid, requests, jobs=jobs, on_cell=lambda: progress.advance(task))


def _grid(flags: dict[str, Any], requests: list[TraceRequest]) -> Grid:
    named, is_full = flags["layouts"], flags["full"]
    return Grid(
        layouts=default_layouts(requests, full=is_full) if named is None else layouts_of(named),
        rates=flags["rates"] or (FULL_RATES if is_full else SHORT_RATES),
        slos=flags["slos"],
        setting=DisaggSetting(
            kv_tokens=flags["kv_tokens"],
            block_size=int(flags["block_size"]),
            transfers=TransferRules(bandwidth_bytes_s=flags["bandwidth_gb_s"] * 1e9),
            limits=ConditionalLimits(prefill_busy=flags["prefill_busy"], decode_busy=flags["decode_busy"]),
            seed=flags["seed"],
        ),
    )


def _requests(flags: dict[str, Any]) -> list[TraceRequest]:
    requests_max = flags["requests_max"] or (_FULL_REQUESTS if flags["full"] else _SHORT_REQUESTS)
    if flags["file"] is None:
        return synthetic_trace(_MADE_UP, flags["seed"])[:requests_max]
    return spread(load_trace(flags["file"], requests_max), flags["seed"])
