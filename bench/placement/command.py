"""`router bench placement`: our modes and other routers' rules in many regimes, in virtual time."""

import os
from pathlib import Path

import click

from bench.placement.policies import PLACEMENTS
from bench.placement.regimes import REGIMES
from bench.placement.report import PlacementGrid, by_queue, medians, regrets, remarks, run_grid, tables
from bench.routing.trace import TraceInvalid
from bench.tables import names_of, progress, report, report_options

FAST_SCALE = 0.08


@click.command("placement", context_settings={"show_default": True})
@click.option("--regimes", callback=names_of(REGIMES), help="between commas; without it all")
@click.option("--policies", callback=names_of(PLACEMENTS), help="between commas; without it all")
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="the Mooncake conversation trace; without it the regime mooncake is left out",
)
@click.option("--held-out", type=int, metavar="SEED", help="report a third of the places apart, drawn by this seed")
@click.option("--fast", is_flag=True, help="few requests: for a first look, and for tests")
@click.option("--seed", type=int, default=1, help="of the workloads and of the draws")
@click.option("--runs", type=click.IntRange(min=1), default=1, help="of each policy at each place; compared: medians")
@click.option("--jobs", type=click.IntRange(min=1), default=os.cpu_count() or 1, help="cells played side by side")
@report_options
def placement(
    *,
    regimes: tuple[str, ...],
    policies: tuple[str, ...],
    trace: Path | None,
    held_out: int | None,
    seed: int,
    runs: int,
    jobs: int,
    json_file: Path | None,
    markdown: Path | None,
    fast: bool,
) -> None:
    """Compare placements: simulated H200 engines and the real router core, in virtual time.

    Each regime is played at three loads with two cache sizes, under our modes and under the rules of other routers,
    which were written for this bench from their documentation. Printed is the regret: how far each policy
    is from the best of all in the same place, in TTFT, requests a second and goodput (first token within 1 s, then at
    most 20 ms between tokens on average).
    """
    grid = PlacementGrid(regimes, policies, scale=FAST_SCALE if fast else 1.0, seed=seed, runs=runs, trace=trace)
    left_out = [name for name in regimes if name not in grid.played_regimes]
    if not grid.played_regimes:
        raise click.UsageError(f"{', '.join(left_out)}: needs --trace")
    click.echo(f"{len(grid.cells())} runs in virtual time", err=True)
    try:
        with progress(len(grid.cells())) as on_progress:
            played = run_grid(grid, jobs=jobs, on_cell=lambda: on_progress("runs"))
    except TraceInvalid as error:
        raise click.UsageError(str(error)) from error
    result = medians(played)
    cells = [
        place._asdict()
        | {"policy": name, "runs": [each._asdict() for each in played[place][name]], "regret": regrets(at)[name]}
        | figures._asdict()
        for of_queue in map(medians, by_queue(played).values())
        for place, at in of_queue.items()
        for name, figures in at.items()
    ]
    facts = [f"{len(grid.cells())} runs in virtual time, from seed {seed} on", *remarks(result)]
    facts += [f"left out without --trace: {name}" for name in left_out]
    report(facts, tables(played, held_out), {"cells": cells}, json_file, markdown)
