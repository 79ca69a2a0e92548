"""What a bench prints and writes: figures in tables, targets and whether they are reached, where it was measured."""

import subprocess
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

from bench.report import machine_line
from kv_runtime.process import child_environment

NONE = "-"
"""Stands for what was not measured."""
_ROOT = Path(__file__).parents[1]
_WIDTH = 200
"""Characters in a line of a table that is not printed on a terminal."""
_VERDICT_TEXT = {True: "reached", False: "MISSED", None: "not measured"}
Figure = tuple[str, float | None]
"""The name of a cell, or another text that describes the figure; and the figure, or None if it was not measured."""
CommandT = TypeVar("CommandT", bound=Callable[..., Any])


class FigureTable(NamedTuple):
    """A title with the unit of its figures, the columns (the first is text), and the rows."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


class Verdict(NamedTuple):
    """One target, and every figure that was measured for it.

    Each figure must be at most `needed` if `sign` is "<=", else at least `needed`; all are in `unit`.
    """

    target: str
    sign: str
    needed: float
    unit: str
    figures: tuple[tuple[str, float], ...]

    @property
    def holds(self) -> bool | None:
        """Whether the target is reached in all cells; None if nothing was measured."""
        if not self.figures:
            return None
        return all(each <= self.needed if self.sign == "<=" else each >= self.needed for _, each in self.figures)


def at_most(target: str, needed: float, figures: Iterable[Figure], unit: str = "x") -> Verdict:
    """Return the verdict on a target that no figure may exceed. Figures that are None are left out."""
    return Verdict(target, "<=", needed, unit, tuple((cell, each) for cell, each in figures if each is not None))


def at_least(target: str, needed: float, figures: Iterable[Figure], unit: str = "x") -> Verdict:
    """Return the verdict on a target that no figure may be below. Figures that are None are left out."""
    return at_most(target, needed, figures, unit)._replace(sign=">=")


def verdict_table(verdicts: Iterable[Verdict]) -> FigureTable:
    """Return the targets with the measured figures."""
    rows = [
        (
            verdict.target,
            f"{verdict.sign} {number(verdict.needed)}{verdict.unit}",
            "; ".join(f"{number(each)}{verdict.unit}{f', {cell}' if cell else ''}" for cell, each in verdict.figures),
            _VERDICT_TEXT[verdict.holds],
        )
        for verdict in verdicts
    ]
    return FigureTable("Targets", ("target", "needed", "measured", ""), rows)


def number(value: float | None) -> str:
    """Return a figure as text: whole from 100 on, else with three significant digits; `NONE` if it is missing."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"  # noqa: PLR2004 - the third digit


def times(ratio: float | None) -> str:
    """Return a ratio as text, for example `1.5x`; `NONE` if it is missing."""
    return NONE if ratio is None else f"{number(ratio)}x"


def commit() -> str:
    """Return the commit that is checked out, marked if files differ from it; `unknown` outside of a checkout."""
    command = ("git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--abbrev=12")
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, env=child_environment()
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def rich_table(table: FigureTable) -> RichTable:
    """Return a table to be printed."""
    made = RichTable(title=table.title, title_justify="left")
    for at, name in enumerate(table.columns):
        made.add_column(name, justify="right" if at else "left")
    for row in table.rows:
        made.add_row(*row)
    return made


def markdown_table(table: FigureTable) -> str:
    """Return a table as Markdown, below a heading of the third level."""
    head = f"| {' | '.join(table.columns)} |"
    rule = f"|{'---|' * len(table.columns)}"
    rows = (f"| {' | '.join(row)} |" for row in table.rows)
    return "\n".join((f"### {table.title[:1].upper()}{table.title[1:]}", "", head, rule, *rows, ""))


def names_of(known: Collection[str]) -> Callable[[click.Context, click.Parameter, str | None], tuple[str, ...]]:
    """Return the callback of an option that takes some of the known names, separated by commas.

    The callback returns each name once. If the option is not given, it returns all known names.
    """

    def names(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(value.split(","))) if value is not None else tuple(known)
        for name in found:
            if name not in known:
                raise click.BadParameter(f"found {name!r}, allowed {', '.join(known)}")
        return found

    return names


def report_options(command: CommandT) -> CommandT:
    """Give a command the options of `report`: `json_file` and `markdown`."""
    path = click.Path(path_type=Path)
    for option in (
        click.option("--markdown", type=path, help="write facts and tables to this file, as Markdown"),
        click.option("--json", "json_file", type=path, help="write facts and everything measured to this file"),
    ):
        command = option(command)
    return command


def report(
    facts: Iterable[str],
    tables: Sequence[FigureTable],
    measured: dict[str, Any],
    json_file: Path | None,
    markdown: Path | None,
) -> None:
    """Print the facts of a run and its tables.

    The facts and tables are also written to `markdown`, the facts and all that was `measured` to `json_file`, if given.
    """
    facts = [machine_line(), f"commit {commit()}", *facts]
    if markdown is not None:
        markdown.write_text("\n".join([*(f"* {line}" for line in facts), "", *map(markdown_table, tables)]))
    if json_file is not None:
        json_file.write_bytes(msgspec.json.encode({"facts": facts, **measured}))
    for line in facts:
        click.echo(line)
    console = Console() if Console().is_terminal else Console(width=_WIDTH)
    for table in tables:
        console.print(rich_table(table))


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Show on a terminal how many of `total` steps are done; yield a function to call after each, with its name."""
    terminal = Console(stderr=True)
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=terminal, refresh_per_second=2, disable=not terminal.is_terminal) as shown:
        task = shown.add_task("", total=total)
        yield lambda name: shown.update(task, advance=1, description=name)


class Rounds:
    """The figures of every round, by subject and cell.

    A round measures all subjects one after another, so that a disturbance of the machine affects all of them.
    """

    def __init__(self) -> None:
        self.rounds: defaultdict[tuple[str, str], list[Mapping[str, float]]] = defaultdict(list)

    def add(self, subject: str, cell: str, found: Mapping[str, float]) -> None:
        """Add the figures of a round."""
        self.rounds[subject, cell].append(found)

    def of(self, subject: str, cell: str, name: str) -> list[float]:
        """Return a figure's value in every round in which it was measured."""
        return [each[name] for each in self.rounds.get((subject, cell), ()) if name in each]

    def figure(self, subject: str, cell: str, name: str) -> float | None:
        """Return the median of all rounds; None: not measured."""
        found = self.of(subject, cell, name)
        return float(median(found)) if found else None

    def ratio(self, cell: str, name: str, above: str, below: str) -> float | None:
        """Return the median of the ratios that the figures of subjects `above` and `below` have in each round.

        A round is left out if it lacks one of the figures, or if that of `below` is 0. None: no round is left.
        """
        rounds = zip(self.rounds.get((above, cell), ()), self.rounds.get((below, cell), ()), strict=False)
        found = [one[name] / other[name] for one, other in rounds if name in one and other.get(name)]
        return float(median(found)) if found else None

    def cells(self, beginning: str = "") -> list[str]:
        """Return the names of the measured cells that begin with `beginning`, in the order of measurement."""
        return list(dict.fromkeys(cell for _, cell in self.rounds if cell.startswith(beginning)))

    def plain(self) -> list[dict[str, object]]:
        """Return everything, to be written as JSON."""
        return [{"subject": subject, "cell": cell, "rounds": rounds} for (subject, cell), rounds in self.rounds.items()]
