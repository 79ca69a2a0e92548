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


@click.command("report", context_settings={"show_default": True})
@click.argument("directory", type=_DIRECTORY)
@click.option("--base", type=_DIRECTORY, help="another directory: its runs of the same names are compared with these")
@click.option("--gpus", type=click.IntRange(1, 4096), default=1, help="by which throughput of aiperf's runs is divided")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="for the files; DIRECTORY/report without")
@click.pass_context
def report(context: click.Context, directory: Path, base: Path | None, gpus: int, out: Path | None) -> None:
    """Print the runs of a sweep's DIRECTORY as tables, and write them as summary.json, summary.md and plots.

    profile_export_aiperf.json in it and in directories below it are read, too. For each workload, pareto-* has
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


def rows_of(directory: Path, gpus: int) -> list[SummaryRow]:
    """Return the runs of sweeps in the directory, and those of aiperf in and below it.

    Raises:
        ResultInvalid: a file is neither.
    """
    rows = [row_of(record) for record in read(directory, but=NAME).values()]
    for file in sorted(directory.rglob(NAME)):
        run, name = read_export(file, workers=gpus), file.parent.relative_to(directory).as_posix()
        fleet = f"aiperf-{name}" if name != "." else "aiperf"
        rows.append(
            SummaryRow(
                name=f"{fleet}-{run.load}",
                fleet=fleet,
                workload="aiperf",
                load=run.load,
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
