"""`router bench report`: the runs of a directory as tables, a summary and plots; two directories compared.

comparable   rows of one workload (lengths and shares); each workload has plots of its own
served       a run in which no request failed and no process lagged by more than `LAG_LIMIT_S`; others: empty points
frontier     the served rows of a workload that no other one beats in one throughput without being worse in the other

Runs of aiperf are read, too. Source: aiperf 0.13.0, schema 1.4: `profile_export_aiperf.json`, as it was written against
this router. A metric is an object with `unit` and `avg`, and percentiles `p50`, `p90`, `p99` if it has one value for
each request. Times are in ms. `error_summary` lists errors with their counts.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import click
import msgspec

from bench.plot import PlotLabels, Point, frontier, plotted
from bench.report import LAG_LIMIT_S
from bench.sweep.results import ResultInvalid, RunFigures, read
from bench.tables import FigureTable, markdown_table

NAME = "profile_export_aiperf.json"


class _Latency(msgspec.Struct, frozen=True):
    p50: float
    p90: float
    p99: float

    @property
    def quantiles_s(self) -> tuple[float, ...]:
        return self.p50 / 1000, self.p90 / 1000, self.p99 / 1000


class _Metric(msgspec.Struct, frozen=True):
    avg: float = 0.0


class _InputConfig(msgspec.Struct, frozen=True):
    phases: list[dict[str, Any]]


class _Export(msgspec.Struct, frozen=True, kw_only=True):
    """A profile with `--streaming`; without it there are no latencies of tokens."""

    time_to_first_token: _Latency
    inter_token_latency: _Latency
    request_latency: _Latency
    request_throughput: _Metric
    output_token_throughput: _Metric
    request_count: _Metric
    benchmark_duration: _Metric
    input_config: _InputConfig
    error_summary: list[dict[str, Any]] = []
    aiperf_version: str = "unknown"
    overall_usage_prompt_cache_read_pct: _Metric = _Metric()
    usage_prompt_tokens: _Metric = _Metric()
    usage_completion_tokens: _Metric = _Metric()
    input_sequence_length: _Metric = _Metric()
    output_sequence_length: _Metric = _Metric()


class SummaryRow(msgspec.Struct, frozen=True, kw_only=True):
    """One run, of a sweep or of aiperf."""

    name: str
    fleet: str
    workload: str
    load: str
    workers: int
    """Workers or GPUs, by which the throughput is divided."""
    figures: RunFigures
    machine: str = ""
    versions: dict[str, str] = {}

    @property
    def is_served(self) -> bool:
        """Whether its users were served, and its latencies are not those of a busy machine."""
        return not self.figures.failed and (self.figures.lag_p99_s or 0.0) <= LAG_LIMIT_S


def read_export(file: Path, place: Sequence[str], workers: int) -> SummaryRow:
    """Return the run; `workers` served it, and the first of the directories in `place` is the name of its fleet.

    Raises:
        ResultInvalid: the file is no export, or one without `--streaming`.
    """
    try:
        found = msgspec.json.decode(file.read_bytes(), type=_Export)
        failed = sum(int(each["count"]) for each in found.error_summary)
        load = _load(found.input_config.phases)
    except (msgspec.MsgspecError, UnicodeDecodeError, LookupError, TypeError, ValueError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ResultInvalid(f"{file}: found no export ({why}), allowed aiperf's {NAME}, with --streaming") from None
    itl_s, tokens_s = found.inter_token_latency.quantiles_s, found.output_token_throughput.avg
    return SummaryRow(
        name="-".join(("aiperf", *place, load)),
        fleet="-".join(("aiperf", *place[:1])),
        workload="aiperf",
        load=load,
        workers=workers,
        versions={"aiperf": found.aiperf_version},
        figures=RunFigures(
            requests=int(found.request_count.avg) + failed,
            failed=failed,
            reasons=tuple(f"{each['count']} x {_reason(each)}" for each in found.error_summary[:3]),
            span_s=found.benchmark_duration.avg,
            requests_s=found.request_throughput.avg,
            output_tokens_s=tokens_s,
            tokens_s_worker=tokens_s / workers,
            tokens_s_user=1 / itl_s[0] if itl_s[0] else 0.0,
            ttft_s=found.time_to_first_token.quantiles_s,
            itl_s=itl_s,
            e2e_s=found.request_latency.quantiles_s,
            hit_rate=found.overall_usage_prompt_cache_read_pct.avg / 100,
            isl_tokens=found.usage_prompt_tokens.avg or found.input_sequence_length.avg,
            osl_tokens=found.usage_completion_tokens.avg or found.output_sequence_length.avg,
        ),
    )


def _load(phases: list[dict[str, Any]]) -> str:
    """Return the load of the last phase, which is the one that is measured."""
    last = phases[-1]
    for key, letter in (("rate", "r"), ("concurrency", "c")):
        if isinstance(last.get(key), int | float):
            return f"{letter}{last[key]:g}"
    return str(last["type"]).replace("_", "-")


def _reason(each: dict[str, Any]) -> str:
    details = each.get("error_details") or {}
    return f"{details.get('type', '')}: {str(details.get('message', ''))[:200]}"


COLUMNS = (
    "load", "workers", "requests", "failed", "req/s", "tok/s/worker", "tok/s/user", "TTFT p50 ms", "p90", "p99",
    "ITL p50 ms", "p99", "hit rate", "lag p99 ms",
)  # fmt: skip
COMPARED = ("run", "figure", "base", "this", "this / base")


def by_workload(rows: Iterable[SummaryRow]) -> dict[str, dict[str, list[SummaryRow]]]:
    """Return the rows by workload and fleet, in the order of the load."""
    ordered = sorted(rows, key=lambda each: (each.workload, each.fleet, _load_order(each.load)))
    return {
        workload: {fleet: list(found) for fleet, found in groupby(group, key=lambda each: each.fleet)}
        for workload, group in groupby(ordered, key=lambda each: each.workload)
    }


def _load_order(load: str) -> tuple[str, float]:
    return (load[:1], float(load[1:])) if load[1:].replace(".", "", 1).isdigit() else (load, 0.0)


def throughputs(rows: Sequence[SummaryRow]) -> list[Point]:
    """Return the throughput of a worker against that of a user."""
    return [Point(each.figures.tokens_s_user, each.figures.tokens_s_worker, each.load, each.is_served) for each in rows]


def hits_and_ttfts(rows: Sequence[SummaryRow]) -> list[Point]:
    """Return the TTFT p50 in ms against the hit rate in percent."""
    return [
        Point(100 * each.figures.hit_rate, 1e3 * each.figures.ttft_s[0], each.load, each.is_served) for each in rows
    ]


def on_frontier(fleets: Mapping[str, Sequence[SummaryRow]]) -> list[str]:
    """Return the names of the rows of one workload on its frontier, in the order of a user's throughput."""
    rows = [each for found in fleets.values() for each in found if each.is_served]
    points = throughputs(rows)
    return [rows[points.index(best)].name for best in frontier(points)]


def cells(row: SummaryRow) -> tuple[str, ...]:
    """Return the row's cells of `COLUMNS`."""
    each = row.figures
    lag = "" if each.lag_p99_s is None else f"{each.lag_p99_s * 1e3:g}"
    return (
        row.load,
        f"{row.workers}",
        f"{each.requests}",
        f"{each.failed}",
        f"{each.requests_s:.2f}",
        f"{each.tokens_s_worker:.1f}",
        f"{each.tokens_s_user:.1f}",
        *(f"{seconds * 1e3:.0f}" for seconds in each.ttft_s),
        f"{each.itl_s[0] * 1e3:.1f}",
        f"{each.itl_s[2] * 1e3:.1f}",
        f"{each.hit_rate:.1%}",
        lag if (each.lag_p99_s or 0.0) <= LAG_LIMIT_S else f"**{lag}**",
    )


def compared(rows: Iterable[SummaryRow], base: Mapping[str, SummaryRow]) -> list[tuple[str, ...]]:
    """Return the cells of `COMPARED` for every run that both have, by its name."""
    return [
        (row.name, figure, f"{before:.3g}", f"{now:.3g}", f"{now / before:.2f}" if before else "-")
        for row in rows
        if row.name in base
        for figure, before, now in _pairs(base[row.name].figures, row.figures)
    ]


def _pairs(base: RunFigures, this: RunFigures) -> list[tuple[str, float, float]]:
    return [
        ("tok/s/worker", base.tokens_s_worker, this.tokens_s_worker),
        ("tok/s/user", base.tokens_s_user, this.tokens_s_user),
        ("TTFT p50, ms", base.ttft_s[0] * 1e3, this.ttft_s[0] * 1e3),
        ("TTFT p99, ms", base.ttft_s[2] * 1e3, this.ttft_s[2] * 1e3),
        ("hit rate, %", base.hit_rate * 100, this.hit_rate * 100),
    ]


def differing(rows: Sequence[SummaryRow]) -> list[str]:
    """Return a line for the machine and for each version that differs between rows: such runs compare badly."""
    facts: dict[str, set[str]] = {}
    for row in rows:
        for name, value in {"machine": row.machine, **row.versions}.items():
            facts.setdefault(name, set()).update({value} - {""})
    return [f"runs differ in {name}: {', '.join(sorted(values))}" for name, values in facts.items() if len(values) > 1]


def as_json(rows: Sequence[SummaryRow], comparison: Sequence[tuple[str, ...]]) -> bytes:
    """Return everything, as JSON."""
    workloads = by_workload(rows)
    summary: dict[str, Any] = {
        "runs": rows,
        "frontier": {workload: on_frontier(fleets) for workload, fleets in workloads.items()},
        "differing": differing(rows),
        "compared": [dict(zip(COMPARED, each, strict=True)) for each in comparison],
    }
    return msgspec.json.format(msgspec.json.encode(summary), indent=1) + b"\n"


_DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)
_KINDS: tuple[Literal["svg", "png"], ...] = ("svg", "png")


def _gpus(_context: click.Context, _parameter: click.Parameter, texts: Sequence[str]) -> dict[str, int]:
    """Return the GPUs of each fleet; under "" those of all others."""
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
@click.option("--gpus", callback=_gpus, multiple=True, metavar="[FLEET=]N", help="GPUs of aiperf's fleets; absent: 1")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="for the files; absent: DIRECTORY/report")
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
    tables = [
        FigureTable(f"fleet {fleet}: {workload}", COLUMNS, tuple(map(cells, found)))
        for workload, fleets in by_workload(rows).items()
        for fleet, found in fleets.items()
    ]
    if comparison:
        tables.append(FigureTable("compared with the base", COMPARED, comparison))
    text = "\n".join((*map(markdown_table, tables), *differing(rows)))
    (to / "summary.json").write_bytes(as_json(rows, comparison))
    (to / "summary.md").write_text(text + "\n")
    for workload, fleets in by_workload(rows).items():
        _plot(to, workload, fleets)
    click.echo(text)


def rows_of(directory: Path, gpus: Mapping[str, int]) -> list[SummaryRow]:
    """Return the runs of sweeps in the directory, and those of aiperf in and below it.

    Raises:
        ResultInvalid: a file is of neither.
    """
    rows = [
        SummaryRow(
            **{name: getattr(record.inputs, name) for name in ("name", "fleet", "workload", "load", "workers")},
            figures=record.figures,
            machine=record.machine,
            versions=record.versions,
        )
        for record in read(directory, but=NAME).values()
    ]
    for file in sorted(directory.rglob(NAME)):
        place = file.parent.relative_to(directory).parts
        rows.append(read_export(file, place, gpus.get("".join(place[:1]), gpus[""])))
    return rows


def _plot(to: Path, workload: str, fleets: Mapping[str, Sequence[SummaryRow]]) -> None:
    user, worker = "output tokens/s of a user (1 / ITL p50)", "output tokens/s of a worker"
    pareto = PlotLabels(f"What a worker gives, what a user gets: {workload}", user, worker)
    hits = PlotLabels(f"Hit rate and time to first token: {workload}", "hit rate, %", "TTFT p50, ms")
    for name, points, labels in (("pareto", throughputs, pareto), ("ttft", hits_and_ttfts, hits)):
        lines = {fleet: points(rows) for fleet, rows in fleets.items()}
        for kind in _KINDS:
            plot = plotted(lines, labels, kind, has_frontier=name == "pareto")
            (to / f"{name}-{workload}.{kind}").write_bytes(plot)
