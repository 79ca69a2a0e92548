"""The results of the index bench as tables, Markdown and JSON."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table as RichTable

from bench.index.results import IndexResults
from bench.index.tables import NONE, FigureTable, number, tables
from bench.index.verdicts import IndexVerdict, verdicts
from bench.report import machine_line
from kv_runtime.process import child_environment

_CPU_INFO = Path("/proc/cpuinfo")
_ROOT = Path(__file__).parents[2]
_SCALE_JUDGED = 1.0
_NOT_JUDGED = "targets are for scale 1"
_VERDICT_TEXT = {True: "reached", False: "MISSED", None: "not measured"}


class IndexFacts(NamedTuple):
    """Where and how the figures were measured."""

    machine: str
    commit: str
    peer: str
    core: int
    rounds: int
    scale: float
    trace: str

    def lines(self) -> Iterator[str]:
        """Yield them as lines of text."""
        yield f"{self.machine}; all on core {self.core}" if self.core >= 0 else f"{self.machine}; not pinned to a core"
        yield f"commit {self.commit}; peer: {self.peer}"
        yield f"medians of {self.rounds} rounds, scale {self.scale:g}; trace: {self.trace}"
        yield "ranks are registered with their capacity, as the service does, but for memory and where a row says so"


def machine() -> str:
    """Return one line about this machine and its processor."""
    try:
        info = _CPU_INFO.read_text()
    except OSError:
        return machine_line()
    models = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    return f"{machine_line()}, {models[0]}" if models else machine_line()


def commit() -> str:
    """Return the commit that is checked out, marked where files differ from it; `unknown` outside of a checkout."""
    command = ("git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--abbrev=12")
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, env=child_environment()
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def show(console: Console, facts: IndexFacts, results: IndexResults) -> None:
    """Print the tables, and the verdicts where the targets are for this scale."""
    for table in tables(results):
        console.print(rich_table(table))
    if not _is_judged(facts):
        console.print(_NOT_JUDGED)
    for verdict in _judged(facts, results):
        for line in _lines(verdict):
            console.print(line, highlight=False, soft_wrap=True)


def as_markdown(facts: IndexFacts, results: IndexResults) -> str:
    """Return what is shown as Markdown, to be put below a heading of the second level."""
    last = markdown_table(_verdict_table(results)) if _is_judged(facts) else f"{_NOT_JUDGED}\n"
    return "\n".join([*facts.lines(), "", *(markdown_table(table) for table in tables(results)), last])


def as_json(facts: IndexFacts, results: IndexResults) -> bytes:
    """Return everything measured, every round of it; a time is (CPU ns, wall ns, operations)."""
    return msgspec.json.encode(
        facts._asdict()
        | {
            "cells": [
                {"group": group, "cell": cell, "seat": seat, "rounds": rounds}
                for (group, cell, seat), rounds in results.rounds.items()
            ],
            "verdicts": [verdict._asdict() | {"holds": verdict.holds} for verdict in _judged(facts, results)],
        }
    )


def _is_judged(facts: IndexFacts) -> bool:
    return facts.scale == _SCALE_JUDGED


def _judged(facts: IndexFacts, results: IndexResults) -> list[IndexVerdict]:
    return verdicts(results) if _is_judged(facts) else []


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


def _verdict_table(results: IndexResults) -> FigureTable:
    rows = [
        (
            verdict.target,
            f"{verdict.sign} {verdict.needed:g}{verdict.unit}",
            _measured(verdict),
            _VERDICT_TEXT[verdict.holds],
        )
        for verdict in verdicts(results)
    ]
    return FigureTable("Targets", ("target", "needed", "measured, by cell", ""), rows)


def _measured(verdict: IndexVerdict) -> str:
    figures = [f"{number(each.measured)}{verdict.unit}" for each in verdict.judged]
    if len(figures) > 1 and len(set(figures)) == 1:
        return f"{figures[0]} in all of {len(figures)} cells"
    return ", ".join(figures) or NONE


def _lines(verdict: IndexVerdict) -> Iterator[str]:
    needed = f"{verdict.sign} {verdict.needed:g}{verdict.unit}"
    yield f"{_VERDICT_TEXT[verdict.holds]:12}  {verdict.target} {needed}"
    for each in verdict.judged:
        if verdict.sign == ">=" or verdict.needed or not each.holds:  # correct answers need no line
            yield f"{'':14}{'' if each.holds else 'lost: '}{each.cell}: {number(each.measured)}{verdict.unit}"
