"""`router bench report`: the runs of a directory as tables, a summary and plots; two directories compared."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import click

from bench.plot import PlotLabels, Point, pareto_labels, plotted
from bench.sweep.aiperf_export import NAME, read_export
from bench.sweep.results import ResultInvalid, read
from bench.sweep.summary import (
    COLUMNS,
    COMPARED,
    SummaryRow,
    as_json,
    by_workload,
    cells,
    compared,
    differing,
    hits_and_ttfts,
    row_of,
    throughputs,
)
from bench.tables import FigureTable, markdown_table

_DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)
_KINDS: tuple[Literal["svg", "png"], ...] = ("svg", "png")


def _gpus(_context: click.Context, _parameter: click.Parameter, texts: Sequence[str]) -> dict[str, int]:
    """Return the GPUs of each fleet; "" has those of all others."""
    found = {"": 1}
    for each in texts:
        fleet, _, number = each.rpartition("=")
        if not number.isdecimal() or not int(number):
            raise click.BadParameter(f"found {each!r}, allowed a whole number above 0, or FLEET=NUMBER")
        found[fleet] = int(number)
    return found


@click.command("report", context_settings={"show_default": True})
@click.argument("directory", type=_DIRECTORY)
@click.option("--base", type=_DIRECTORY, help="another directory: its runs of the same names are compared with these")
@click.option("--gpus", callback=_gpus, multiple=True, metavar="[FLEET=]N", help="of aiperf's fleets; without it 1")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="for the files; DIRECTORY/report without")
@click.pass_context
def report(context: click.Context, directory: Path, base: Path | None, gpus: dict[str, int], out: Path | None) -> None:
    """Print the runs of a sweep's DIRECTORY as tables, and write them as summary.json, summary.md and plots.

    profile_export_aiperf.json in it and in directories below it are read, too; the first of those
    directories is the name of the fleet. For each workload, pareto-* has
    throughput of a worker against that of a user, and ttft-* has TTFT against hit rate, each as SVG and PNG. Empty
    points: a request failed, or a process lagged by more than 10 ms.
    """
    try:
        rows = rows_of(directory, gpus)
        comparison = [] if base is None else compared(rows, {each.name: each for each in rows_of(base, gpus)})
    except ResultInvalid as error:
        raise click.UsageError(str(error)) from error
    if not rows:
        context.fail(f"DIRECTORY: found no run in {directory}, allowed one with files of a sweep or {NAME}")
    if base is not None and not comparison:
        context.fail(f"--base: found no run in {base} that {directory} has, allowed one with runs of the same names")
    to = out or directory / "report"
    to.mkdir(parents=True, exist_ok=True)
    text = "\n".join((*_tables(rows), *_comparison(comparison), *differing(rows)))
    (to / "summary.json").write_bytes(as_json(rows, comparison))
    (to / "summary.md").write_text(text + "\n")
    for workload, fleets in by_workload(rows).items():
        _plot(to, workload, fleets)
    click.echo(text)


def rows_of(directory: Path, gpus: Mapping[str, int]) -> list[SummaryRow]:
    """Return the runs of sweeps in the directory, and those of aiperf in and below it.

    Raises:
        ResultInvalid: a file is neither.
    """
    rows = [row_of(record) for record in read(directory, but=NAME).values()]
    for file in sorted(directory.rglob(NAME)):
        place = file.parent.relative_to(directory).parts
        workers = gpus.get("".join(place[:1]), gpus[""])
        run = read_export(file, workers=workers)
        rows.append(
            SummaryRow(
                name="-".join(("aiperf", *place, run.load)),
                fleet="-".join(("aiperf", *place[:1])),
                workload="aiperf",
                load=run.load,
                workers=workers,
                figures=run.figures,
                versions={"aiperf": run.version},
            )
        )
    return rows


def _tables(rows: Sequence[SummaryRow]) -> list[str]:
    return [
        markdown_table(FigureTable(f"fleet {fleet}: {workload}", COLUMNS, tuple(map(cells, found))))
        for workload, fleets in by_workload(rows).items()
        for fleet, found in fleets.items()
    ]


def _comparison(found: Sequence[tuple[str, ...]]) -> list[str]:
    return [markdown_table(FigureTable("compared with the base", COMPARED, tuple(found)))] if found else []


def _plot(to: Path, workload: str, fleets: Mapping[str, Sequence[SummaryRow]]) -> None:
    pareto = pareto_labels(f"What a worker gives, what a user gets: {workload}", "a worker")
    hits = PlotLabels(f"Hit rate and time to first token: {workload}", "hit rate, %", "TTFT p50, ms")
    _write(to / f"pareto-{workload}", fleets, throughputs, pareto, has_frontier=True)
    _write(to / f"ttft-{workload}", fleets, hits_and_ttfts, hits, has_frontier=False)


def _write(
    path: Path,
    fleets: Mapping[str, Sequence[SummaryRow]],
    points: Callable[[Sequence[SummaryRow]], list[Point]],
    labels: PlotLabels,
    *,
    has_frontier: bool,
) -> None:
    lines = {fleet: points(rows) for fleet, rows in fleets.items()}
    for kind in _KINDS:
        path.with_name(f"{path.name}.{kind}").write_bytes(plotted(lines, labels, kind, has_frontier=has_frontier))
